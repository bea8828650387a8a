"""The list scheduler, on actions worked by hand."""

from __future__ import annotations

from support.braid import Row, actions_of, scheduled


def test_a_backward_follows_the_first_forward() -> None:
    # Two pairs on one lane, in turn from the first action on.
    rows: list[Row] = [((0,), False, 1.0), ((0,), True, 1.0), ((0,), False, 1.0), ((0,), True, 1.0)]
    actions = actions_of(rows, [(0, 1, 0.0), (2, 3, 0.0)])
    place, end_s, forced = scheduled(actions, [0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0])
    assert (place.tolist(), end_s, forced) == ([0, 1, 2, 3], 4.0, 0)
