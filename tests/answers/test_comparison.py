"""The one comparison behind tables, MLflow and the report: what must hold of it whatever the times are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.answers.comparison import Comparison, Times, Verdict, baseline_of, compare, overall, with_result
from entrain_bench.answers.statistics import ratio_interval
from entrain_bench.base.arithmetic import decisive

NAMES = ("megatron", "entrain", "dip", "dflop")
SEEDS = range(4)
# Few values make ties, many make none.
SECONDS = st.sampled_from([1.0, 1.5, 2.0, 3.0]) | st.floats(0.5, 5.0)
TIMES = st.fixed_dictionaries({seed: st.none() | SECONDS | SECONDS for seed in SEEDS})
CONTENDERS = st.dictionaries(st.sampled_from(NAMES), TIMES, min_size=1)
WHOLE = st.dictionaries(st.sampled_from(NAMES), st.fixed_dictionaries(dict.fromkeys(SEEDS, SECONDS)), min_size=1)


def beside(times: Mapping[str, Times], baseline: str) -> Comparison[str]:
    """All compared with one of them."""
    return compare(times, dict.fromkeys(times, baseline))


@pytest.mark.wide
@given(CONTENDERS)
def test_among_the_best_is_the_least_mean_of_those_with_all_results(times: dict[str, Times]) -> None:
    found = beside(times, next(iter(times)))
    means = {
        name: decisive(math.fsum(with_result(own).values())) for name, own in times.items() if None not in own.values()
    }
    assert {*found.best} <= {*means}
    assert bool(found.best) == bool(means)
    if means:
        assert means[found.best[0]] == min(means.values())


@pytest.mark.wide
@given(CONTENDERS, st.randoms())
def test_the_order_of_rows_changes_nothing(times: dict[str, Times], random: Random) -> None:
    baseline = min(times)
    names, seeds = random.sample([*times], len(times)), random.sample([*SEEDS], len(SEEDS))
    shuffled = {name: {seed: times[name][seed] for seed in seeds} for name in names}
    one, other = beside(times, baseline), beside(shuffled, baseline)
    assert {*one.best} == {*other.best}
    assert one.standings == other.standings
    assert overall([one]) == overall([other])
    assert baseline_of(dict.fromkeys(times)) == baseline_of(dict.fromkeys(names))


@pytest.mark.wide
@given(CONTENDERS)
def test_seeds_without_a_result_are_counted_and_never_averaged_away(times: dict[str, Times]) -> None:
    baseline = next(iter(times))
    found = beside(times, baseline)
    for name, own in times.items():
        standing, done = found.standings[name], [time for time in own.values() if time is not None]
        assert (standing.num_ok, len(standing.times)) == (len(done), len(SEEDS))
        assert (standing.time is None) == (not done)
        if standing.time:
            assert (standing.time.num_values, standing.time.mean) == (len(done), pytest.approx(sum(done) / len(done)))
        shared = [seed for seed in SEEDS if own[seed] is not None and times[baseline][seed] is not None]
        assert [*standing.gains] == shared
        if len(done) < len(SEEDS):
            assert name not in found.best
            assert name not in overall([found])


@pytest.mark.wide
@given(CONTENDERS)
def test_nobody_is_faster_than_itself(times: dict[str, Times]) -> None:
    for baseline in times:
        speedup = beside(times, baseline).standings[baseline].speedup
        done = len(with_result(times[baseline]))
        if done:
            assert speedup is not None
            assert (speedup.low, speedup.mean, speedup.high, speedup.num_values) == (1.0, 1.0, 1.0, done)
        else:
            assert speedup is None


@pytest.mark.wide
@given(st.lists(WHOLE, min_size=1, max_size=3))
def test_over_several_cases_a_speedup_is_the_geometric_mean_of_theirs(cases: list[dict[str, Times]]) -> None:
    found = overall([beside(case, min(case)) for case in cases])
    shared = set.intersection(*({*case} for case in cases))
    assert {*found} == shared
    for name, each in found.items():
        gains = [
            math.prod(with_result(case[min(case)])[seed] / with_result(case[name])[seed] for case in cases)
            ** (1 / len(cases))
            for seed in SEEDS
        ]
        expected = ratio_interval(gains, [1.0] * len(gains))
        assert (each.low, each.mean, each.high) == pytest.approx((expected.low, expected.mean, expected.high))
    means = [decisive(each.mean) for each in found.values()]
    assert means == sorted(means, reverse=True)


def test_a_seed_that_others_have_is_lacking() -> None:
    found = beside({"one": {0: 1.0}, "other": {0: 2.0, 1: 2.0}}, "other")
    # Twice as fast where both ran: the lost seed of the one does not make the other the fastest.
    assert found.best == ["one"]
    assert {*overall([found])} == {"other"}


def test_the_baseline_is_the_first_by_display_order_then_by_name() -> None:
    assert baseline_of({"b": None, "a": None, "c": 1, "d": 0}) == "d"
    assert baseline_of({"b": None, "a": None}) == "a"
    assert baseline_of({"b": 1, "a": 1}) == "a"


def verdicts(**times: Times) -> dict[str, str]:
    found = compare(times, {})
    return {name: found.standings[name].verdict for name in found.ranked}


def seeded(*seconds: float | None) -> Times:
    return dict(enumerate(seconds))


def test_nothing_more_than_five_percent_slower_is_as_good() -> None:
    noisy = seeded(1.0, 3.0, 1.0)
    assert verdicts(a=seeded(1.5, 1.5, 1.5), b=noisy) == {"a": Verdict.FASTEST, "b": Verdict.BEHIND}
    near = seeded(1.4, 1.7, 1.6)
    assert verdicts(a=seeded(1.5, 1.5, 1.5), b=near) == {"a": Verdict.FASTEST, "b": Verdict.AS_GOOD}


def test_every_pair_is_compared_at_the_seeds_that_both_ran() -> None:
    # A quick look at seed 0, then three seeds of two: nobody is left out, and more seeds do not win by themselves.
    found = verdicts(a=seeded(2.0, 2.1, 2.2), b=seeded(1.0, 1.1, 1.1), c=seeded(3.0), d=seeded(0.5))
    assert found == {"d": Verdict.FASTEST, "b": Verdict.BEHIND, "a": Verdict.BEHIND, "c": Verdict.BEHIND}
    assert verdicts(a=seeded(2.0, 2.1, 2.2), b=seeded(1.0, 1.1, 1.1), c=seeded(3.0))["c"] == Verdict.BEHIND


def test_who_lost_runs_and_might_win_leaves_it_open() -> None:
    whole = {seed: 1.0 + seed / 100 for seed in range(4)}
    found = compare({"a": whole, "b": {0: 0.99, 1: 1.02}}, {})
    assert (found.best, found.with_verdict(Verdict.OPEN)) == ([], ["b"] if found.ranked[0] == "a" else ["a"])
    # Lost runs decide nothing where it is far behind, or shares no seed.
    assert compare({"a": whole, "b": {0: 2.0, 1: 2.1}}, {}).best == ["a"]
    assert compare({"a": whole, "b": {9: 2.0}}, {}).best == []
