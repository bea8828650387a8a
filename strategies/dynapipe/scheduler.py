"""DynaPipe's schedule: the order in which microbatches enter, and the order of passes on every stage.

In every cycle (arXiv:2311.10418, section 5) a stage runs the first backward that is there, then the first forward that
memory allows; what it hands on is there in the next cycle. With as many microbatches in flight as there are stages
behind, and one more, that is 1F1B. Without a limit, forwards run ahead of it, and a slow microbatch finds others
waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np

from entrain_bench.balancing.options import check_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.schedules import (
    backward_microbatch,
    chain_program,
    microbatches_per_replica,
    stages_behind,
)
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, sum_rows
from entrain_bench.base.compiled import njit
from entrain_bench.program import Program, Slots, reorder
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .assigner import believed_costs, unit_costs


class PassOrder(NamedTuple):
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


@njit()
def cyclic_order(microbatches, forward_s, backward_s, kept_bytes, room_bytes, most_in_flight):  # type: ignore[no-untyped-def]
    """Passes of a replica in order (``PassOrder``), for microbatches that enter in this order ``[places]``.

    A microbatch has believed seconds of forward and backward and keeps bytes in between ``[microbatches, stages]``. A
    stage has room for some bytes, one microbatch at least, and for so many microbatches between forward and backward
    ``[stages]``.
    """
    count = len(microbatches)
    stages = len(room_bytes)
    forward = np.empty((count, stages), np.int64)
    backward = np.empty((count, stages), np.int64)
    forward_end = np.zeros((count, stages))
    backward_end = np.zeros((count, stages))
    ready_forward = np.zeros(stages, np.int64)
    ready_backward = np.zeros(stages, np.int64)
    done_forward = np.zeros(stages, np.int64)
    done_backward = np.zeros(stages, np.int64)
    held = np.zeros(stages)
    peak = np.zeros(stages)
    free = np.zeros(stages)
    ready_forward[0] = count
    while done_backward[0] < count:
        handed_forward = np.zeros(stages, np.int64)
        handed_backward = np.zeros(stages, np.int64)
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
            one = microbatches[place]
            flying = place - done_backward[stage]
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


METHODS = ("dynamic", "cyclic", "1f1b")
# Rounds of the clustering; it is stable after some.
ROUNDS = 16
# Classes of microbatches of about equal time, all of whose orders are tried.
CLASSES = 3


@dataclass(frozen=True, slots=True)
class DynaPipeScheduler(Recomputation):
    """Of the orders of classes of microbatches, and of cyclic and 1F1B schedules, the one believed fastest.

    Attributes:
        method: ``cyclic`` is the paper's adaptive schedule; without a limit on memory where that fits, otherwise
            forwards wait for memory. ``1f1b``. ``dynamic``: the faster one for each replica, as in the public code.
    """

    method: str = "dynamic"

    def __post_init__(self) -> None:
        Recomputation.__post_init__(self)
        check_choices(self, "strategy.scheduler", method=METHODS)

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if the modules form no chain, or differ in DP."""
        model = profile.job.model
        behind = stages_behind(layout, model.llm_index)
        program = chain_program(model, shapes, layout, assignment, behind)
        pipelines = _pipelines(program, behind, profile)
        freed = backward_microbatch(model, shapes, assignment, program.chunks)
        counts = microbatches_per_replica(layout, program.chunks, freed)[model.llm_index]
        # What a sample's LLM microbatch waits for may not enter after it.
        together = _is_one_partition(program, assignment)
        forward = np.zeros_like(pipelines.forward_s, np.int64)
        backward = np.zeros_like(pipelines.forward_s, np.int64)
        for replica, count in enumerate(counts.tolist()):
            microbatches, best = self._best(pipelines, replica, count, together)
            forward[replica, microbatches] = best.forward
            backward[replica, microbatches] = best.backward
        slots = []
        for rows, last, stages in zip(program.chunks, freed, behind, strict=True):
            place = pipelines.num_stages - 1 - stages
            slots.append(
                Slots(
                    forward[rows.replica[:, None], rows.microbatch[:, None], place],
                    backward[rows.replica[:, None], last[:, None], place],
                )
            )
        return self.within_memory(reorder(program, slots), profile)

    def _best(self, pipelines: Pipelines, replica: int, count: int, together: bool) -> tuple[IntArray, PassOrder]:
        """Microbatches in the order in which they enter a replica, and the order of their passes."""
        seconds = pipelines.forward_s[replica, :count] + pipelines.backward_s[replica, :count]
        orders: list[tuple[float, IntArray, PassOrder]] = []
        in_order = np.arange(count)
        for microbatches in entries(seconds.max(axis=1)) if together else [in_order]:
            for order in self._orders(pipelines, replica, microbatches):
                if np.all(order.peak_bytes <= pipelines.room_bytes[replica]):
                    orders.append((decisive(order.makespan_s), microbatches, order))
        if not orders:
            return in_order, pipelines.order(replica, in_order, pipelines.one_each)
        _, microbatches, order = min(orders, key=lambda entry: entry[0])
        return microbatches, order

    def _orders(self, pipelines: Pipelines, replica: int, microbatches: IntArray) -> Iterator[PassOrder]:
        """The schedules that are allowed, for microbatches that enter in this order."""
        if self.method != "cyclic":
            yield pipelines.order(replica, microbatches, pipelines.one_each)
        if self.method != "1f1b":
            free = pipelines.order(replica, microbatches)
            fits = np.all(free.peak_bytes <= pipelines.room_bytes[replica])
            yield free if fits else pipelines.order(replica, microbatches, limited=True)


@dataclass(frozen=True, slots=True)
class Pipelines:
    """Microbatches of all replicas on the stages of their chains.

    Attributes:
        forward_s, backward_s: believed seconds ``[replicas, microbatches, stages]``.
        kept_bytes: what each keeps from forward to backward, likewise.
        room_bytes: what a stage may keep ``[replicas, stages]``.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    kept_bytes: FloatArray
    room_bytes: FloatArray

    @property
    def num_stages(self) -> int:
        """Stages of the chain."""
        return int(self.forward_s.shape[2])

    @property
    def one_each(self) -> IntArray:
        """1F1B's microbatches in flight: one for each stage from here on ``[stages]``."""
        return np.arange(self.num_stages, 0, -1)

    def order(
        self, replica: int, microbatches: IntArray, most_in_flight: IntArray | None = None, limited: bool = False
    ) -> PassOrder:
        """A replica's cyclic schedule of microbatches that enter in this order, at most so many in flight a stage.

        ``limited``: forwards wait for memory.
        """
        stages = self.num_stages
        flying = np.full(stages, len(microbatches) + 1) if most_in_flight is None else most_in_flight
        room = self.room_bytes[replica] if limited else np.full(stages, np.inf)
        costs = self.forward_s[replica], self.backward_s[replica], self.kept_bytes[replica]
        return PassOrder(*cyclic_order(microbatches, *costs, room, flying))


def _pipelines(program: Program, behind: list[IntArray], profile: Profile) -> Pipelines:
    """Believed seconds and bytes of a program's microbatches."""
    shapes = program.shapes
    layout = program.layout
    costs = believed_costs(profile, shapes, layout)
    num_microbatches = 1 + max(int(rows.microbatch.max(initial=0)) for rows in program.chunks)
    shape = layout.modules[-1].dp, num_microbatches, len(costs.forward)
    forward = np.zeros(shape)
    backward = np.zeros(shape)
    kept = np.zeros(shape)
    given, moving = profile.memory.handed_bytes(program)
    spare = profile.job.planning_budget_bytes - profile.memory.lane_state_bytes(layout) - moving
    room = np.zeros(shape[::2])
    working = np.zeros(shape[::2])
    for index, (module, placed, blocks, rows) in enumerate(
        zip(program.model.modules, layout.modules, layout.blocks, program.chunks, strict=True)
    ):
        place = len(costs.forward) - 1 - behind[index]
        seconds = np.zeros(shapes.num_items if module.per_item else len(shapes))
        units = module.units(shapes)
        seconds[units], once = unit_costs(module, placed, shapes, profile)
        chunk_s = sum_rows(rows.offsets, seconds[rows.members]) + once
        where = rows.replica[:, None], rows.microbatch[:, None], place
        forward[where] += chunk_s[:, None] * costs.forward[place, index]
        backward[where] += chunk_s[:, None] * costs.backward[place, index]
        tokens = sum_rows(rows.offsets, module.lengths(shapes, rows.members))
        keeps, needs = profile.memory.token_bytes(module, placed)
        kept[where] += tokens[:, None] * keeps
        lanes = blocks.first_lane()
        room[:, place] = spare[lanes]
        kept[:, :, place] = np.maximum(kept[:, :, place], 0.0)
        working[:, place] = np.maximum(working[:, place], needs * tokens.max(initial=0.0))
        if index == program.model.llm_index:
            # Of another module's tensors a microbatch that is held keeps its own.
            kept[:, :, place] += given[lanes][:, None]
    return Pipelines(forward, backward, kept, room - working)


def _is_one_partition(program: Program, assignment: Assignment) -> bool:
    """Whether the items of every sample are in the microbatch of its LLM sequence."""
    consumer = assignment.modules[program.model.llm_index].microbatch
    return all(
        np.array_equal(labels.microbatch, consumer[module.owners(program.shapes, module.units(program.shapes))])
        for module, labels in zip(program.model.modules, assignment.modules, strict=True)
    )


def entries(seconds: FloatArray, classes: int = CLASSES) -> Iterator[IntArray]:
    """Orders in which microbatches may enter: as they are, then every order of at most so many classes of equal time.

    A class keeps the order of its microbatches; seconds are believed ``[microbatches]``.
    """
    yield np.arange(len(seconds))
    starts = time_classes(seconds, classes)
    members = [np.flatnonzero(starts == one) for one in np.unique(starts)]
    if len(members) > 1:
        for order in permutations(members):
            yield np.concatenate(order)


def time_classes(seconds: FloatArray, classes: int) -> IntArray:
    """Class of each microbatch by its time, rising, by Lloyd's k-means from quantiles ``[microbatches]``.

    The public code's starts at random, and has the times of the first and the last stage for features.
    """
    count = min(classes, len(np.unique(decisive(seconds))))
    ranked = decisive(np.sort(seconds, kind="stable"))
    centres = np.unique(ranked[((np.arange(count) + 0.5) * len(ranked) / max(count, 1)).astype(np.int64)])
    chosen = np.zeros(len(seconds), np.int64)
    for _ in range(ROUNDS):
        distance = np.abs(decisive(seconds)[:, None] - centres[None])
        chosen = distance.argmin(axis=1)
        sums = np.bincount(chosen, weights=decisive(seconds), minlength=len(centres))
        sizes = np.bincount(chosen, minlength=len(centres))
        centres = np.where(sizes > 0, sums / np.maximum(sizes, 1), centres)
    return np.asarray(chosen)
