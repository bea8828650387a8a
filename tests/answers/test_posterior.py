"""P(fastest) and intervals of leads over draws: by hand, and what they keep whatever the times are."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.answers.posterior import (
    ChanceSummary,
    Spread,
    chances,
    contenders,
    rank_chances,
    share_ahead,
    times_of,
)

TIMES = {"a": {1: 1.0, 2: 2.0, 3: 1.0, 4: 1.5}, "b": {1: 2.0, 2: 1.0, 3: 1.5, 4: None}, "c": {1: 3.0}}


def test_chances_by_hand() -> None:
    found = chances(TIMES)
    assert [*found] == ["a", "b", "c"]
    assert [(each.num_fastest, each.num_draws) for each in found.values()] == [(3, 4), (1, 4), (0, 4)]
    # In draw 4 no other strategy has a result, so there is no lead.
    assert found["a"].leads == {1: 2.0, 2: 0.5, 3: 1.5}
    assert found["b"].leads == {1: 0.5, 2: 2.0, 3: pytest.approx(2 / 3)}
    assert found["c"].leads == {1: pytest.approx(1 / 3)}
    assert found["a"].probability == 0.75
    assert found["a"].lead == Spread(1.5, 0.5, 2.0)


def test_spread_cuts_a_twentieth_at_each_end() -> None:
    assert Spread.of([float(value) for value in range(20, 0, -1)]) == Spread(10.0, 1.0, 19.0)
    assert Spread.of([float(value) for value in range(100)]) == Spread(49.0, 4.0, 94.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.dictionaries(st.integers(1, 6), st.none() | st.floats(0.1, 10.0), min_size=1),
        min_size=1,
    )
)
def test_chances_add_up_and_the_fastest_leads(times: dict[str, dict[int, float | None]]) -> None:
    found = chances(times)
    if found:
        assert sum(each.num_fastest for each in found.values()) == next(iter(found.values())).num_draws
    for each in found.values():
        leading = sum(lead >= 1 - 1e-8 for lead in each.leads.values())
        alone = each.num_draws - len(each.leads)
        assert leading <= each.num_draws
        assert each.num_fastest <= leading + alone
        if each.lead:
            assert each.lead.low <= each.lead.median <= each.lead.high


def test_only_those_far_behind_in_every_draw_stop() -> None:
    assert contenders({"a": {1: 1.0, 2: 1.0}, "b": {1: 1.3, 2: 1.05}, "c": {1: 1.3, 2: 1.2}}, 1.1) == ["a", "b"]
    assert contenders({"a": {1: 1.0}, "b": {1: 1.1}, "c": {1: None}}, 1.1) == ["a", "b"]
    # The fastest keeps a rival.
    assert contenders({"a": {1: 1.5, 2: 3.0}, "b": {1: 1.0, 2: 1.0}, "c": {1: 2.0, 2: 1.4}}, 1.1) == ["b", "c"]


def test_a_summary_of_several_jobs_has_the_geometric_mean_by_draw() -> None:
    one = chances({"a": {1: 1.0, 2: 1.0}, "b": {1: 4.0, 2: 1.44}})
    other = chances({"a": {1: 1.0, 2: 1.0}, "b": {1: 1.0 / 0.25, 2: 0.25}})
    # 2 of 2 and 1 of 2 draws; leads 4 and 4, 1.44 and 0.25.
    found = ChanceSummary.of([one, other], "a")
    assert found
    assert (found.probability, found.num_draws, found.num_jobs, found.num_leads, found.num_sure) == (0.75, 2, 2, 2, 1)
    assert (found.lead.low, found.lead.high) == (pytest.approx(0.6), pytest.approx(4.0))
    assert ChanceSummary.of([{}], "a") is None
    # A job without a rival counts for P(fastest) alone.
    alone = ChanceSummary.of([one, other, chances({"a": {1: 1.0, 2: 1.0}})], "a")
    assert alone
    assert (alone.probability, alone.num_jobs, alone.num_leads, alone.num_sure) == (pytest.approx(2.5 / 3), 3, 2, 2)
    assert alone.lead == found.lead
    assert rank_chances([one, other]) == ["a", "b"]


def test_tables_are_split_by_draw() -> None:
    row = {"model": "m", "workload": "w", "strategy": "a", "status": "ok", "iteration_time_s": 2.0, "constants": 0}
    data = pd.DataFrame([row, row | {"constants": 3}, row | {"constants": 4, "status": "failed"}])
    assert times_of(data) == {("m", "w"): {"a": {3: 2.0, 4: None}}}
    assert times_of(data.drop(columns="constants")) == {}


def test_the_share_of_draws_in_which_one_is_ahead() -> None:
    one, other = {1: 1.0, 2: 1.0, 3: None, 4: 1.0}, {1: 2.0, 2: 1.0, 3: 2.0, 5: 0.1}
    # Draws 1 and 2 are shared; equal times are no lead.
    assert share_ahead(one, other) == 0.5
    assert share_ahead(other, one) == 0.0
    assert share_ahead(one, {}) is None
