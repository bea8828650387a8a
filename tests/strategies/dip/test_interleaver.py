"""DIP's interleaver: against a slow reference on random actions, and against 1F1B."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from support.interleaver import Reference, in_order, random_actions, sequential_pipeline


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_actions_run_like_the_reference(seed: int) -> None:
    actions, lane_set, room = random_actions(np.random.default_rng(seed))
    slot, end, forced = in_order(actions, lane_set, room)
    expected = Reference(actions, lane_set, room)
    assert slot.tolist() == expected.slot.tolist()
    assert end.tolist() == expected.end.tolist()
    assert forced == expected.forced
    event("forced" if forced else "not forced")


def test_a_microbatch_that_never_fits_still_runs() -> None:
    lanes, _, forced = sequential_pipeline(2, 2, 1.0, 2.0, room=0)
    assert lanes == [["F0", "B0", "F1", "B1"]] * 2
    assert forced == 4


@pytest.mark.wide
@pytest.mark.parametrize("backward", [2, 3])
@pytest.mark.parametrize("stages", range(1, 9))
def test_uniform_microbatches_take_no_longer_than_1f1b(stages: int, backward: int) -> None:
    # Believed backwards take two forwards, or three with recomputation.
    forward = 1
    for count, room in product(range(1, 25), (stages, stages + 1, stages + 24)):
        _, end, forced = sequential_pipeline(stages, count, float(forward), float(backward), room)
        assert forced == 0
        assert end <= (count + stages - 1) * (forward + backward)
