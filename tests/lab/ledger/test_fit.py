"""The fit of a ledger by source: it finds the constants that made the data, and says how sure it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.fit import (
    Constant,
    Interval,
    Ledger,
    Point,
    fit_ledger,
    fit_points,
    left_out_fits,
    linearize,
    solve,
    with_constants,
)
from entrain_bench.lab.ledger.page import constants_table, model_error
from entrain_bench.specs.cluster import ClusterSpec
from support.ledger import CONSTANTS, DEVICE, made_up_ledger


def unknown(name: str, spread: float, shared: float = 0.0) -> Constant:
    return Constant("device", name, 1.0, spread, shared, "")


KNOBS = (unknown("gemm", 0.5), unknown("memory", 0.5))
TRUE = np.array([0.7, 1.2])


def times(work: tuple[float, float]) -> Callable[[FloatArray], Interval]:
    """Seconds of arithmetic and memory traffic at the rates given by factors."""

    def predict(factors: FloatArray) -> Interval:
        seconds = work[0] / factors[0] + work[1] / factors[1]
        return seconds, seconds

    return predict


def point(source: str, work: tuple[float, float], off: float = 1.0, device: str = "a") -> Point:
    seconds = times(work)(TRUE)[0] * off
    return Point(source, device, seconds, times(work))


def rows(source: str, count: int, off: float = 1.0) -> list[Point]:
    return [point(source, (1.0 + index % 5, 3.0), off) for index in range(count)]


def test_the_constants_that_made_the_data_are_found() -> None:
    found = fit_points([*rows("one", 10), *rows("two", 10)], KNOBS, iterations=4)
    assert found.factors("a") == pytest.approx(TRUE, rel=0.01)
    assert np.abs(found.problem.linear(found.problem.at)[0]).max() < 0.01


def test_a_source_of_many_rows_counts_as_one_source() -> None:
    """Hand-worked: one knob, two sources 10% off either way; the level lies in the middle, however many rows."""

    def alone(factors: FloatArray) -> Interval:
        return 1.0 / factors[0], 1.0 / factors[0]

    def level(many: int) -> float:
        high = [Point("high", "a", float(np.exp(0.1)), alone)] * many
        low = [Point("low", "a", float(np.exp(-0.1)), alone)] * 20
        problem = linearize([*high, *low], (unknown("gemm", 10.0),))
        return float(solve(problem, 0.02).at[0, 0])

    assert level(20) == pytest.approx(0.0, abs=1e-4)
    assert level(400) == pytest.approx(0.0, abs=1e-3)


def test_without_information_the_prior_stays_and_other_devices_inform_a_shared_knob() -> None:
    knobs = (unknown("gemm", 0.5), unknown("overlap", 0.5, shared=0.9))

    def only(index: int, off: float) -> Callable[[FloatArray], Interval]:
        return lambda factors: (off / factors[index],) * 2

    points = [Point(f"s{n}", "a", 2.0, only(1, 1.0)) for n in range(8)]
    points += [Point("t", "b", 1.0, lambda _: (0.1, 10.0))]
    found = fit_points(points, knobs)
    slow, other = found.at
    assert slow[1] < -0.5
    assert slow[0] == pytest.approx(0.0, abs=1e-9)
    # b has no row of its own: nine tenths of a's step, and its own spread in gemm.
    assert other[1] == pytest.approx(0.9 * slow[1], rel=0.02)
    assert found.covariance[2, 2] == pytest.approx(0.25)
    assert found.covariance[3, 3] > found.covariance[1, 1]


def test_a_source_left_out_does_not_change_its_own_fit() -> None:
    usual = [*rows("one", 5), *rows("two", 5)]
    error = 0.05

    def without_bad(off: float) -> FloatArray:
        return left_out_fits(linearize([*usual, *rows("bad", 5, off)], KNOBS), error)["bad"].at

    assert np.array_equal(without_bad(1.0), without_bad(3.0))
    whole = [solve(linearize([*usual, *rows("bad", 5, off)], KNOBS), error).at for off in (1.0, 3.0)]
    assert np.abs(whole[0] - whole[1]).max() > 0.05


def test_one_row_that_is_far_off_moves_little() -> None:
    usual = [*rows("one", 15), *rows("two", 15)]
    odd = point("one", (2.0, 3.0), 20.0)
    clean, dirty = (solve(linearize(each, KNOBS), 0.05) for each in (usual, [*usual, odd]))
    assert np.abs(clean.at - dirty.at).max() < 0.05


def test_the_error_is_that_of_sources_left_out() -> None:
    levels = dict(zip("abcdefgh", (1.1, 0.9, 1.08, 0.93, 1.12, 0.88, 1.0, 1.05), strict=True))
    points = [each for name, off in levels.items() for each in rows(name, 10, off)]
    found = fit_points(points, (unknown("gemm", 0.5), unknown("memory", 0.1)))
    # Of deviations of about 8%, a median distance and the level of the other seven make 1.5 times as much.
    expected = np.std([np.log(off) for off in levels.values()])
    assert expected < found.error < 2.2 * expected


@pytest.mark.parametrize(
    ("predicted", "published", "expected"),
    [
        ((2.0, 2.0), 1.0, np.log(2)),
        ((1.0, 2.0), 1.5, 0.0),
        ((1.0, 2.0), 4.0, np.log(0.5)),
    ],
)
def test_distance_of_an_interval(predicted: Interval, published: float, expected: float) -> None:
    problem = linearize([Point("one", "a", published, lambda _: predicted)], KNOBS)
    assert problem.linear(problem.at)[0].tolist() == pytest.approx([expected])


def test_a_range_gives_way_to_its_end_and_no_further() -> None:
    """Hand-worked: two sources ask for 1.5 times the seconds; a range that ends at 1.2 times permits that much."""

    def exact(factors: FloatArray) -> Interval:
        return 1.0 / factors[0], 1.0 / factors[0]

    def wide(factors: FloatArray) -> Interval:
        return 0.5 / factors[0], 1.0 / factors[0]

    asks = [Point(name, "a", 1.5, exact, 0.5) for name in ("one", "two")]
    ends = [Point("range", "a", 1.0, lambda factors: (1.0 / 1.2 / factors[0], 2.0 / factors[0]), 0.005)]
    open_end = [Point("range", "a", 1.0, wide, 0.005)]
    knobs = (unknown("gemm", 10.0),)
    assert fit_points(asks, knobs).at[0, 0] == pytest.approx(-np.log(1.5), abs=0.01)
    assert fit_points([*asks, *ends], knobs, iterations=4).at[0, 0] == pytest.approx(-np.log(1.2), abs=0.01)
    # A range that holds the measured time says nothing; more seconds bring the other end's row further inside.
    inside = solve(linearize([Point("range", "a", 0.9, wide)], (unknown("gemm", 0.5),)), 0.1)
    assert inside.at[0, 0] == 0.0
    assert inside.covariance[0, 0] == pytest.approx(0.25)
    assert fit_points([*asks, *open_end], knobs).at[0, 0] == pytest.approx(-np.log(1.5), abs=0.01)


def test_single_kernels_inform_constants_and_are_no_sources_left_out() -> None:
    kernels = [Point("kernels", "a", each.published_s, each.predict, 0.1) for each in rows("x", 10)]
    problem = linearize([*rows("one", 10, 1.3), *kernels], KNOBS)
    assert [*left_out_fits(problem, 0.05)] == ["one"]
    # Their level counts, which that of a source does not: alone they give the constants that made them.
    found = fit_points([*rows("one", 10, 1.3), *kernels], KNOBS, 0.3, iterations=4).factors("a")
    assert found == pytest.approx(TRUE, rel=0.1)


def test_nothing_to_fit_is_an_error() -> None:
    with pytest.raises(UserError):
        linearize([], KNOBS)


CLUSTER = ClusterSpec.from_config(Composer().run(("cluster=a40x64",)).cluster)
NAME = "device.sustained_fraction"


def test_a_constant_reaches_the_tiers_of_its_place() -> None:
    constants = (
        Constant("device", "sustained_fraction", 0.5, 1.0, 0.0, ""),
        Constant("node", "latency_s", 1e-6, 1.0, 0.0, ""),
        Constant("network", "latency_s", 3e-6, 1.0, 0.0, ""),
    )
    changed = with_constants(constants, np.array([0.5, 2.0, 1.0]))(CLUSTER)
    assert changed.device.sustained_fraction == 0.25
    # A share is at most one.
    assert constants[0].value(3.0) == 1.0
    assert [tier.latency_s for tier in changed.tiers] == [2e-6, 2e-6, 3e-6]


@pytest.fixture(scope="module")
def exact() -> Ledger:
    return made_up_ledger(1.0, 1.0)


def test_the_constant_that_made_the_times_is_found_and_printed(exact: Ledger) -> None:
    study = fit_ledger(exact, CONSTANTS)
    assert CONSTANTS[0].value(study.fit.factors(DEVICE)[0]) == pytest.approx(0.6, rel=0.03)
    title, table = constants_table(study)
    assert "error of a source left out: 2.0%" in title
    assert table["constant"].tolist() == [NAME]
    assert table[DEVICE][0].startswith("0.6 (")
    error = model_error(pd.DataFrame(study.left_out(exact)))
    assert (error.close, error.num_times) == (1.0, 4)


def test_a_source_is_predicted_without_itself() -> None:
    """The odd source pulls the whole fit towards itself, and is predicted by the constants of the others."""
    odd = made_up_ledger(1.0, 1.0, 2.0)
    study = fit_ledger(odd, CONSTANTS)
    ratios = [line["ratio"] for line in study.left_out(odd)]
    # Half, and a little less: two sources do not outweigh what is expected beforehand.
    assert ratios[-2:] == pytest.approx([0.47, 0.47], rel=0.08)
    assert study.fit.factors(DEVICE)[0] < study.without["lab2"].factors(DEVICE)[0]
