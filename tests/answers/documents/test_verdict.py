"""How numbers come out of runs, and the rule that judges them."""

from __future__ import annotations

import pandas as pd
import pytest

from entrain_bench.answers.documents.claim import Claim
from entrain_bench.answers.documents.verdict import measured
from entrain_bench.base.errors import UserError
from support.claims import ALONE, VALUES, cases, claim_with, runs, text_on, verdict_on


def numbers(claim: Claim, pairs: list[list[pd.DataFrame]]) -> pd.DataFrame:
    return measured(claim, claim.published.measure, pairs)


def test_seeds_are_paired_configurations_picked_and_cases_combined() -> None:
    of = runs(
        *(("w", name, value) for name, value in [("a", 3.0), ("a", 8.0), ("b", 9.0), ("b", 4.0)]), ("v", "a", 6.0)
    )
    of = pd.concat([of, runs(("v", "a", 0.0), ("v", "a", 6.0))[1:]])
    to = runs(
        *(("w", name, value) for name, value in [("c", 1.0), ("c", 2.0), ("d", 5.0), ("d", 4.0)]),
        *(("v", "c", value) for value in (6.0, 3.0)),
        ("u", "c", 1.0),
    )
    # Workload w: 6 against 3 at both seeds; workload v: 6 against 6, then against 3.
    measure = VALUES["measure"]
    mean = claim_with()
    found = numbers(mean, [[of, to]])
    assert found.loc[("w", "m")].tolist() == [2.0, 2.0]
    assert found.loc[("v", "m")].tolist() == [1.0, 2.0]
    # Means of the two are 1.5 and 2, their geometric mean is 1.732.
    assert text_on(mean, found).startswith("1.73x (")
    # Of a and b the second is greater on average, of c and d the first is less, whatever is at a single seed.
    extreme = claim_with(measure=measure | {"pick_of": "max", "pick_to": "min", "over": "max"})
    assert numbers(extreme, [[of, to]]).loc[("w", "m")].tolist() == [9.0, 2.0]
    assert text_on(extreme, numbers(extreme, [[of, to]])).startswith("4.24x (")
    change = claim_with(unit="%", measure=measure | {"over": "min"})
    assert text_on(change, numbers(change, [[of, to]])).startswith("+41.4% (")
    share = claim_with(**ALONE, unit="%", measure=measure | {"over": "max"})
    assert text_on(share, numbers(share, [[of[of["seed"] == 0]]])) == "600.0%"
    with pytest.raises(UserError, match="no workload, model and seed in common"):
        numbers(mean, [[of, to[to["workload"] == "u"]]])
    with pytest.raises(UserError, match=r"measure.metric=iteration_time_s: must be positive"):
        numbers(mean, [[of, to.assign(iteration_time_s=-1.0)]])


def test_a_metric_is_compared_in_two_situations_without_a_second_side() -> None:
    two = claim_with(**ALONE, at=["model=m"], against={"at": ["model=n"]})
    assert [len(pair) for pair in two.published.pairs] == [1, 1]
    assert two.fair is None, "there is no baseline to tune"
    found = numbers(two, [[runs(("w", "a", 10.0))], [runs(("w", "a", 4.0)).assign(model="n")]])
    assert text_on(two, found) == "2.50x"
    assert verdict_on(two, found) == "exceeds"


@pytest.mark.parametrize(
    ("ratios", "text", "expected"),
    [
        ([1.2, 1.03], "1.03 to 1.20x (2 of 2)", "reproduced"),
        ([0.5, 1.5, 0.9], "0.50 to 1.50x (1 of 3)", "partly"),
        ([0.5, 1.01, 0.9, 1.2], "0.50 to 1.20x (1 of 4)", "not reproduced"),
    ],
)
def test_an_order_is_judged_by_the_cases_in_which_it_holds(ratios: list[float], text: str, expected: str) -> None:
    order = claim_with(value=None)
    assert order.format(order.value) == "> 1"
    found = cases(*([ratio] for ratio in ratios))
    assert (text_on(order, found), verdict_on(order, found)) == (text, expected)


@pytest.mark.parametrize(
    ("sure", "expected"),
    [
        # One case of three is unclear: all may hold, or two.
        ([1.2, 1.2], "undecided"),
        # A third holds either way.
        ([1.2, 0.9], "partly"),
        # None may hold, or one.
        ([0.9, 0.9], "undecided"),
        ([0.9, 0.9, 0.9], "not reproduced"),
    ],
)
def test_an_order_is_undecided_if_it_depends_on_cases_that_are(sure: list[float], expected: str) -> None:
    order = claim_with(value=None)
    found = cases(*([ratio, ratio * 1.001] for ratio in sure), [0.9, 1.3])
    assert verdict_on(order, found) == expected
    assert ", 1 unclear)" in text_on(order, found)


@pytest.mark.parametrize(
    ("value", "unit", "measured_value", "expected"),
    [
        (1.40, "x", 1.40, "reproduced"),
        (1.40, "x", 1.49, "reproduced"),
        # Far more than the paper's gain is no reproduction of it.
        (1.40, "x", 1.51, "exceeds"),
        # Where the paper gains nothing, nothing is to be gained.
        (1.01, "x", 1.02, "reproduced"),
        (1.01, "x", 0.97, "partly"),
        (1.01, "x", 1.2, "not reproduced"),
        (1.40, "x", 1.31, "partly"),
        (1.40, "x", 1.12, "not reproduced"),
        (-82.0, "%", -70.0, "reproduced"),
        ([15.6, 76.2], "%", 95.0, "reproduced"),
        ([15.6, 76.2], "%", 96.0, "exceeds"),
        ([-8.0, -5.0], "%", -11.0, "exceeds"),
    ],
)
def test_the_verdict_is_the_share_of_the_papers_gain(
    value: float | list[float], unit: str, measured_value: float, expected: str
) -> None:
    ratio = measured_value if unit == "x" else 1 + measured_value / 100
    assert verdict_on(claim_with(value=value, unit=unit), cases([ratio])) == expected


@pytest.mark.parametrize(
    ("kind", "value", "ratio", "expected"),
    [
        # A paper's 0.97 says that nothing was gained: a great loss does not confirm it, nor does a gain.
        ("level", 0.97, 1.2, "reproduced"),
        ("level", 0.97, 1.25, "partly"),
        ("level", 0.97, 1.95, "not reproduced"),
        ("gain", 0.97, 0.4, "exceeds"),
        ("level", 1.0, 1.0, "reproduced"),
        ("level", [2.0, 4.0], 3.0, "reproduced"),
        ("level", [2.0, 4.0], 1.5, "partly"),
        ("limit", 2.0, 2.0, "reproduced"),
        ("limit", 2.0, 2.4, "partly"),
        ("limit", 2.0, 2.6, "not reproduced"),
    ],
)
def test_a_level_is_judged_by_its_distance(kind: str, value: float | list[float], ratio: float, expected: str) -> None:
    assert verdict_on(claim_with(value=value, kind=kind), cases([ratio])) == expected


def test_seconds_and_milliseconds_are_levels() -> None:
    claim = claim_with(**ALONE, unit="ms", value=7570.0)
    assert (claim.kind, text_on(claim, cases([7.0]))) == ("level", "7000.0 ms")
    assert verdict_on(claim, cases([9.4])) == "reproduced"
    assert verdict_on(claim, cases([9.6])) == "partly"
    assert verdict_on(claim, cases([6.1])) == "reproduced"
    assert verdict_on(claim, cases([6.0])) == "partly"
    std = claim_with(**ALONE, unit="ms", value=20.0, measure="llm_forward_std_ms")
    assert text_on(std, cases([21.0])) == "21.0 ms"


@pytest.mark.parametrize(
    ("ratios", "text", "expected"),
    [
        # 2.262 standard errors for ten seeds; 80% of the gain is 1.32, a third 1.133.
        ([1.39, 1.41] * 5, "1.40x (1.39 to 1.41x)", "reproduced"),
        ([1.25, 1.35] * 5, "1.30x (1.26 to 1.34x)", "undecided"),
        ([1.24, 1.26] * 5, "1.25x (1.24 to 1.26x)", "partly"),
        ([1.1, 1.2] * 5, "1.15x (1.11 to 1.19x)", "undecided"),
        ([0.85, 1.15] * 5, "0.99x (0.88 to 1.11x)", "not reproduced"),
    ],
)
def test_a_verdict_does_not_flip_within_the_interval(ratios: list[float], text: str, expected: str) -> None:
    claim = claim_with(value=1.40)
    assert (text_on(claim, cases(ratios)), verdict_on(claim, cases(ratios))) == (text, expected)
