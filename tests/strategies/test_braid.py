"""Braid's layouts: what competes, and that every one of them gives programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.interleaved import find_turns
from entrain_bench.balancing.planning import average_layer_s
from entrain_bench.balancing.rounds import layouts_with_widths
from entrain_bench.program.validate import check_program
from entrain_bench_strategies.braid import Split, chains, list_splits
from support.braid import BRAID, MODEL, profile_for
from support.builders import random_samples

SHAPES = random_samples(np.random.default_rng(1), 32, longest=500)


@pytest.mark.parametrize("turns", [1, 2])
def test_chains_go_round_their_ranks_and_are_rated_by_what_they_leave_idle(turns: int) -> None:
    profile = profile_for(tp=1, cp=1, dp=4)

    def splits(tp: int, cp: int, *how: Any) -> list[Split]:
        return list_splits(MODEL, average_layer_s(profile, SHAPES, tp, cp), *how)

    drafts = [*chains(profile, splits, turns, later=True)]
    assert drafts
    for draft in drafts:
        candidate = draft.place()
        assert candidate.estimated_s >= draft.least_s
        found = find_turns(MODEL, candidate.layout)
        assert (found.turns if found else 1) == turns
        check_program(BRAID.program(SHAPES, candidate.layout, profile))


def test_modules_choose_widths_of_their_own_inside_their_pack() -> None:
    profile = profile_for()
    for layout in layouts_with_widths(profile.job):
        check_program(BRAID.program(SHAPES, layout, profile))
