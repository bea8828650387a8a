"""DynaPipe's cyclic schedule (arXiv:2311.10418, section 5), compiled for one replica.

In every cycle a stage runs the first backward that is there, then the first forward that memory allows; what it hands
on is there in the next cycle. With as many microbatches in flight as there are stages behind, and one more, that is
1F1B. Without a limit, forwards run ahead of it, and a slow microbatch finds others waiting.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from entrain_bench.base.arrays import FloatArray, IntArray


class Order(NamedTuple):
    """A replica's passes in order.

    Attributes:
        forward, backward: place of each microbatch's pass on its stage, by place in the replica ``[places, stages]``.
        makespan_s: believed time of it.
        peak_bytes: most that a stage keeps ``[stages]``.
    """

    forward: IntArray
    backward: IntArray
    makespan_s: float
    peak_bytes: FloatArray


@njit(cache=True)
def cyclic_order(microbatches, forward_s, backward_s, kept_bytes, room_bytes, most_in_flight):  # type: ignore[no-untyped-def]
    """Passes of a replica in order (``Order``).

    Args:
        microbatches: in the order in which they enter ``[places]``.
        forward_s: believed seconds of each forward ``[microbatches, stages]``.
        backward_s: likewise of each backward.
        kept_bytes: what a microbatch keeps from forward to backward ``[microbatches, stages]``.
        room_bytes: what a stage may keep; one microbatch is always allowed ``[stages]``.
        most_in_flight: microbatches between forward and backward ``[stages]``.
    """
    count, stages = len(microbatches), len(room_bytes)
    forward, backward = np.empty((count, stages), np.int64), np.empty((count, stages), np.int64)
    forward_end, backward_end = np.zeros((count, stages)), np.zeros((count, stages))
    ready_forward, ready_backward = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    done_forward, done_backward = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    held, peak, free = np.zeros(stages), np.zeros(stages), np.zeros(stages)
    ready_forward[0] = count
    while done_backward[0] < count:
        handed_forward, handed_backward = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
        for stage in range(stages):
            if done_backward[stage] < ready_backward[stage]:
                place = done_backward[stage]
                one = microbatches[place]
                backward[place, stage] = done_forward[stage] + place
                arrived = backward_end[place, stage + 1] if stage < stages - 1 else forward_end[place, stage]
                backward_end[place, stage] = max(free[stage], arrived) + backward_s[one, stage]
                free[stage] = backward_end[place, stage]
                held[stage] -= kept_bytes[one, stage]
                done_backward[stage] += 1
                if stage > 0:
                    handed_backward[stage - 1] += 1
            place = done_forward[stage]
            if place >= ready_forward[stage]:
                continue
            one, flying = microbatches[place], place - done_backward[stage]
            fits = held[stage] + kept_bytes[one, stage] <= room_bytes[stage] and flying < most_in_flight[stage]
            if flying > 0 and not fits:
                continue
            forward[place, stage] = place + done_backward[stage]
            arrived = forward_end[place, stage - 1] if stage > 0 else 0.0
            forward_end[place, stage] = max(free[stage], arrived) + forward_s[one, stage]
            free[stage] = forward_end[place, stage]
            held[stage] = kept_bytes[one, stage] + (held[stage] if flying > 0 else 0.0)
            peak[stage] = max(peak[stage], held[stage])
            done_forward[stage] += 1
            if stage < stages - 1:
                handed_forward[stage + 1] += 1
            else:
                handed_backward[stage] += 1
        ready_forward += handed_forward
        ready_backward += handed_backward
    return forward, backward, free.max(), peak
