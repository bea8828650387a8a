"""Simulated error rates of comparisons and intervals: what docs/statistics.md says of them, and quick bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from entrain_bench.answers.recommend.strategy_race import ROUNDS, going_on
from entrain_bench.answers.statistics import LEVEL, mean_interval, not_worse, ratio_interval
from entrain_bench.base.arrays import FloatArray

ROOT = Path(__file__).parents[2]
# Standard deviation of a strategy's times at a seed, beside what all strategies share.
DEVIATION = 0.02
SHARED_DEVIATION = 0.05
# What one batch in ten takes, times the others.
LONG = 3.0


def logs_of(
    rng: np.random.Generator, shape: tuple[int, int, int], spread: float = 1.0, deviation: float = DEVIATION
) -> FloatArray:
    """Logarithms of the times of equal strategies, normal.

    Args:
        rng: generator.
        shape: rows, strategies, seeds.
        spread: the noisiest strategy's deviation over the steadiest's, in random order.
        deviation: the geometric mean of the strategies' deviations.
    """
    rows, names, seeds = shape
    deviations = rng.permuted(np.tile(np.geomspace(spread**-0.5, spread**0.5, names), (rows, 1)), axis=1)
    shared = SHARED_DEVIATION * rng.standard_normal((rows, 1, seeds))
    return deviation * deviations[..., None] * rng.standard_normal(shape) + shared


def found(logs: FloatArray, slower: FloatArray) -> tuple[float, float]:
    """How often an equally best strategy is excluded, and which share of the slower ones is.

    Args:
        logs: ``[rows, strategies, seeds]``, of equal strategies.
        slower: relative, of each strategy ``[strategies]``; 0 for the equally best.
    """
    times = np.exp(logs) * (1 + slower)[:, None]
    rows = [not_worse(dict(enumerate(row))) for row in times.tolist()]
    out = np.array([[name not in best for name in range(len(slower))] for best in rows])
    return float(out[:, slower == 0].any(axis=1).mean()), float(out[:, slower > 0].mean()) if slower.any() else 0.0


def covered(rng: np.random.Generator, rows: int, seeds: int, batches: int) -> float:
    """How often intervals of some rows cover the mean, with one batch in ten long."""
    normal = 1 + DEVIATION * rng.standard_normal((rows, seeds, batches))
    long = np.where(rng.random(normal.shape) < 0.1, LONG, 1.0)
    intervals = [mean_interval(row) for row in (normal * long).mean(axis=2).tolist()]
    return float(np.mean([not each.excludes(0.9 + 0.1 * LONG) for each in intervals]))


def lost(rng: np.random.Generator, races: int, names: int, deviation: float) -> float:
    """How often at least one of some equal strategies drops out of a race."""
    logs = logs_of(rng, (races, names, ROUNDS[-1]), deviation=deviation)
    num_lost = 0
    for row in np.exp(logs).tolist():
        left = [str(name) for name in range(names)]
        for seeds in ROUNDS:
            left = going_on({name: dict(enumerate(row[int(name)][:seeds])) for name in left})
        num_lost += len(left) < names
    return num_lost / races


@pytest.mark.parametrize(("names", "seeds", "spread"), [(2, 4, 1), (5, 4, 1), (5, 8, 16), (12, 4, 16), (12, 8, 1)])
def test_an_equally_best_strategy_is_seldom_excluded(names: int, seeds: int, spread: float) -> None:
    # Of 300 rows at most 5% in truth, 9% by chance (p < 0.003). Tests against the least mean exclude in 9% to 24%.
    rate, _ = found(logs_of(np.random.default_rng([names, seeds]), (300, names, seeds), spread), np.zeros(names))
    assert rate < 0.09


def test_ratios_cover_at_their_level() -> None:
    logs = logs_of(np.random.default_rng(4), (1000, 2, 5))
    misses = sum(ratio_interval(*row).excludes(1.0) for row in np.exp(logs).tolist())
    assert 0.03 < misses / 1000 < 0.07


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "word"), [(1, "equal"), (16, "16x apart")])
@pytest.mark.parametrize("names", [2, 5, 12, 22])
def test_documented_error_rates(names: int, spread: float, word: str) -> None:
    rng = np.random.default_rng([names, int(spread)])
    rows = 4000 if names > 5 else 16000
    rates = [found(logs_of(rng, (rows, names, seeds), spread), np.zeros(names))[0] for seeds in (3, 4, 5, 8)]
    # Three standard errors.
    assert max(rates) < LEVEL + 3 * (LEVEL * (1 - LEVEL) / rows) ** 0.5
    assert_documented(f"| {names} | {word} | {' | '.join(f'{rate:.1%}' for rate in rates)} |")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 4, 8])
@pytest.mark.parametrize("names", [2, 5, 22])
def test_documented_powers(names: int, seeds: int) -> None:
    rng = np.random.default_rng([names, seeds])
    others = [np.array([0.0, *[each] * (names - 1)]) for each in (0.02, 0.05, 0.2)]
    powers = [found(logs_of(rng, (400, names, seeds)), slower)[1] for slower in others]
    assert_documented(f"| {names} | {seeds} | {' | '.join(f'{power:.0%}' for power in powers)} |")


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "batches"), [(3, 4), (4, 4), (6, 4), (8, 1), (8, 4), (40, 1)])
def test_documented_coverages(seeds: int, batches: int) -> None:
    share = covered(np.random.default_rng([seeds, batches]), 4000, seeds, batches)
    assert_documented(f"| {seeds} | {batches} | {share:.0%} |")


def assert_documented(row: str) -> None:
    """docs/statistics.md has a row of a table."""
    assert row in (ROOT / "docs/statistics.md").read_text().splitlines(), row


@pytest.mark.slow
@pytest.mark.parametrize("names", [2, 5, 12, 22])
@pytest.mark.parametrize("deviation", [0.02, 0.1])
def test_a_race_loses_an_equal_strategy_in_5_percent_at_most(names: int, deviation: float) -> None:
    assert lost(np.random.default_rng(names), 1000, names, deviation) < LEVEL + 0.02
