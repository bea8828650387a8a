"""Braid's shares of encoder work and splits of chains: by hand and by brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench_strategies.braid.work import cuts, level_shares, split_evenly


def test_encoder_work_fills_up_what_the_llm_leaves() -> None:
    # Three copies of one stage on lanes with 0, 2 and 9 seconds; 6 seconds of work: to a level of 4 on the first two.
    shares, level = level_shares(np.array([[[0.0], [2.0], [9.0]]]), np.array([[6.0]]))
    assert shares[0] == pytest.approx([4 / 6, 2 / 6, 0.0])
    assert level[0] == pytest.approx(4.0)


def test_the_slower_stage_of_a_copy_limits_it() -> None:
    # Work of 4 and 1 seconds on two stages; lanes of the first copy have 0 and 0, of the second 1 and 3.5.
    shares, level = level_shares(np.array([[[0.0, 0.0], [1.0, 3.5]]]), np.array([[4.0, 1.0]]))
    busy = np.array([[0.0, 0.0], [1.0, 3.5]]) + shares[0][:, None] * [4.0, 1.0]
    assert level[0] == pytest.approx(busy.max())
    assert shares.sum() == pytest.approx(1.0)


def test_no_work_is_shared_out_evenly_or_not_at_all() -> None:
    shares, level = level_shares(np.array([[[1.0], [1.0]]]), np.array([[0.0]]))
    assert shares[0] == pytest.approx([0.5, 0.5])
    assert level[0] == 1.0


@settings(deadline=None)  # compiles
@given(st.integers(0, 2**32 - 1))
def test_moving_work_between_copies_never_lowers_the_busiest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    base, cost = rng.random((1, 4, 2)) * 5, rng.random((1, 2)) * 10 + 0.1
    shares, level = level_shares(base, cost)
    busy = (base + shares[:, :, None] * cost[:, None])[0]
    assert shares.sum() == pytest.approx(1.0)
    assert np.all(shares >= 0)
    taking = shares[0] > 1e-6
    # All that take some are at the level on one of their lanes, so that whatever one gives up lifts another.
    assert busy[taking].max(axis=1) == pytest.approx(np.full(taking.sum(), level[0]))
    assert np.all(base[0][~taking].max(axis=1) >= level[0] - 1e-6)


@settings(deadline=None)  # compiles
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_splits_are_as_good_as_brute_force(seed: int, lanes: int) -> None:
    rng = np.random.default_rng(seed)
    layers = rng.integers(1, 9, 7).astype(np.float64)

    def busiest(split: tuple[int, ...]) -> float:
        return float((np.add.reduceat(layers, np.cumsum([0, *split[:-1]]))).max())

    every_cut = ([0, *inner, 7] for inner in combinations(range(1, 7), lanes - 1))
    best = min(busiest(tuple(np.diff(cut).tolist())) for cut in every_cut)
    split = tuple(np.diff(cuts(layers, lanes)).tolist())
    assert sum(split) == 7
    assert len(split) == lanes
    assert min(split) >= 1
    assert busiest(split) == best


def test_encoders_are_split_evenly_and_level_the_lanes() -> None:
    # LLM layers of 4, 2, 2 and 4 s on lanes 0, 1 and 2 of four: 4, 4 and 4 s. An encoder of 1, 1 and 2 s in two copies
    # of two stages, 2 s on each: the second copy shares lane 2 with the LLM, so it is as busy as the first.
    llm, encoder = np.array([4.0, 2.0, 2.0, 4.0]), np.array([1.0, 1.0, 2.0])
    bounds, own, busiest_s = split_evenly(llm, encoder, np.array([0, 3]), np.arange(3), (2, 2, 1), 1)
    assert ([*bounds], own.tolist(), busiest_s) == ([0, 1, 3, 4], [[0, 2, 3]], pytest.approx(5.0))
    # On lanes 0 and 1 the LLM has 6 s each, so the first copy gets nothing.
    bounds, own, busiest_s = split_evenly(llm, encoder, np.array([0, 3]), np.arange(2), (2, 2, 1), 1)
    assert ([*bounds], busiest_s) == ([0, 2, 4], pytest.approx(6.0))
