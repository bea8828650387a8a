"""DIP's interleaver: its rules by hand, against a slow reference on random actions, and against 1F1B."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.listing import BACKWARD, FORWARD
from support.builders import as_ints
from support.interleaver import Reference, in_order, linked, random_actions, sequential_pipeline

ROOM = 99


def order(
    rows: dict[str, tuple[int, float, float]], edges: list[str], room: int = ROOM, sizes: int = 1
) -> tuple[list[str], float, int]:
    """Lane 0's actions in their order, the makespan and the number of forced forwards.

    Args:
        rows: lane, duration and priority of each action; forwards begin with F, what ends with a digit names the group.
        edges: "A B" if B waits for A.
        room: of every lane.
        sizes: of every action.
    """
    names = list(rows)
    lane, duration, priority = (np.array(column) for column in zip(*rows.values(), strict=True))
    actions = linked(
        [(names.index(source), names.index(user)) for source, user in (edge.split() for edge in edges)],
        lane=lane,
        is_backward=as_ints(FORWARD if name.startswith("F") else BACKWARD for name in names),
        duration_s=duration.astype(np.float64),
        priority=priority.astype(np.float64),
        group=as_ints(int(name[-1]) for name in names),
        size_bytes=np.full(len(names), sizes),
    )
    num_lanes = 1 + int(lane.max())
    slot, end, forced = in_order(actions, np.zeros(num_lanes, np.int64), np.full(num_lanes, room))
    mine = np.flatnonzero(lane == 0)
    return [names[index] for index in mine[np.argsort(slot[mine])]], float(end.max()), forced


# Its rules by hand, on lane 0; other lanes only delay


def test_a_lane_takes_turns_between_what_could_have_begun() -> None:
    rows = {"F0": (0, 1, 0), "F1": (0, 1, 1), "F2": (0, 1, 2), "Ba0": (0, 1, 0), "Bb0": (0, 1, 1)}
    assert order(rows, []) == (["F0", "Ba0", "F1", "Bb0", "F2"], 5.0, 0)


@pytest.mark.parametrize(
    ("until_forward", "until_backward", "expected"),
    [(2, 3, ["F1", "B0"]), (3, 2, ["B0", "F1"]), (3, 3, ["B0", "F1"])],
)
def test_what_begins_first_fills_a_bubble(until_forward: int, until_backward: int, expected: list[str]) -> None:
    # The lane is free at 0, as after a backward: taking turns it would begin with the forward.
    rows = {"Fx1": (1, until_forward, 0), "Fy0": (2, until_backward, 0), "F1": (0, 1, 0), "B0": (0, 1, 0)}
    found, end, _ = order(rows, ["Fx1 F1", "Fy0 B0"])
    assert (found, end) == (expected, 4.0 if until_forward != until_backward else 5.0)


@pytest.mark.parametrize(("until_forward", "expected"), [(1, ["F0", "B0", "F1"]), (2, ["F0", "B0", "F1"])])
def test_taking_turns_is_for_actions_that_could_both_have_begun(until_forward: int, expected: list[str]) -> None:
    # B0 is there at 1, when F0 ends; F1 is there then, or a second later.
    rows = {"Fx1": (1, until_forward, 0), "F0": (0, 1, 0), "B0": (0, 1, 0), "F1": (0, 1, 0)}
    assert order(rows, ["Fx1 F1", "F0 B0"])[0] == expected


@pytest.mark.parametrize(("first_s", "expected"), [(1, ["F0", "F2", "F1"]), (3, ["F0", "F1", "F2"])])
def test_the_earlier_begin_comes_first_then_the_lower_priority(first_s: int, expected: list[str]) -> None:
    # F1 is there at 2: F2 begins before that, or both can begin when F0 ends.
    rows = {"Fx1": (1, 2, 0), "F0": (0, first_s, 1), "F2": (0, 2, 2), "F1": (0, 1, 0)}
    assert order(rows, ["Fx1 F1"])[0] == expected


def test_a_group_larger_than_the_room_runs_unforced_if_its_parts_fit_one_after_the_other() -> None:
    rows = {"Fa0": (0, 1, 0), "Ba0": (0, 1, 0), "Fb0": (0, 1, 1), "Bb0": (0, 1, 1)}
    assert order(rows, ["Fa0 Ba0", "Ba0 Fb0", "Fb0 Bb0"], room=1) == (["Fa0", "Ba0", "Fb0", "Bb0"], 4.0, 0)


def test_the_earliest_group_is_let_through_first_then_the_lower_priority() -> None:
    rows = {"F1": (0, 1, 0), "Fa0": (0, 1, 5), "Fb0": (0, 1, 4), "B1": (0, 1, 0), "Ba0": (0, 1, 0), "Bb0": (0, 1, 0)}
    edges = ["F1 B1", "Fa0 Ba0", "Fb0 Bb0"]
    assert order(rows, edges, room=0) == (["Fb0", "Bb0", "Fa0", "Ba0", "F1", "B1"], 6.0, 3)
    assert order(rows, edges, room=0, sizes=0)[2] == 0


def test_the_earliest_open_group_is_admitted_even_if_it_does_not_fit() -> None:
    # Both parts of group 0 need two bytes, and there is room for one.
    rows = {"Fa0": (0, 1, 0), "F1": (0, 1, 1), "Ba0": (0, 1, 0), "B1": (0, 1, 1), "Fb0": (0, 1, 2), "Bb0": (0, 1, 2)}
    found, _, forced = order(rows, ["Fa0 Ba0", "F1 B1", "Ba0 Fb0", "Fb0 Bb0"], room=1)
    assert (found, forced) == (["Fa0", "Ba0", "Fb0", "Bb0", "F1", "B1"], 0)


def test_a_late_microbatch_does_not_take_the_room_an_early_one_needs() -> None:
    # Encoder and LLM chunks E and L, one byte each, on a lane with room for two. By priority E1 would run first and E0
    # next: full, and no backward could ever run.
    forwards = {"FE0": (0, 1, 1), "FE1": (0, 1, 0), "FL0": (0, 1, 2), "FL1": (0, 1, 3)}
    backwards = {"BE0": (0, 1, 0), "BE1": (0, 1, 1), "BL0": (0, 1, 2), "BL1": (0, 1, 3)}
    edges = ["FE0 FL0", "FE1 FL1", "FL0 BL0", "FL1 BL1", "BL0 BE0", "BL1 BE1"]
    expected = ["FE0", "FL0", "BL0", "BE0", "FE1", "FL1", "BL1", "BE1"]
    assert order(forwards | backwards, edges, room=2) == (expected, 8.0, 0)


# All of it


@pytest.mark.wide
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_actions_run_like_the_reference(seed: int) -> None:
    actions, lane_set, room = random_actions(np.random.default_rng(seed))
    slot, end, forced = in_order(actions, lane_set, room)
    expected = Reference(actions, lane_set, room)
    assert slot.tolist() == expected.slot.tolist()
    assert end.tolist() == expected.end.tolist()
    assert forced == expected.forced
    event("forced" if forced else "not forced")


def test_two_lanes_and_two_microbatches_by_hand() -> None:
    lanes, end, forced = sequential_pipeline(2, 2, 1.0, 2.0, room=9)
    # Lane 1: F0 1-2; B0 and F1 could both start at 2, so a backward follows the forward: B0 2-4, F1 4-5, B1 5-7.
    # Lane 0: F0, F1 until 2, B0 4-6, B1 7-9.
    assert lanes == [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]
    assert (end, forced) == (9.0, 0)


def test_full_lanes_stop_forwards_by_hand() -> None:
    # Room for one microbatch: nothing overlaps, (1 + 1 + 2 + 2) each.
    lanes, end, forced = sequential_pipeline(2, 2, 1.0, 2.0, room=1)
    assert lanes == [["F0", "B0", "F1", "B1"]] * 2
    assert (end, forced) == (12.0, 0)


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
