"""P(fastest) and intervals of leads over draws: by hand, and what they keep whatever the times are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.posterior import ChanceSummary, Spread, chances, contenders, rank_chances, times_of
from entrain_bench.config import constants
from entrain_bench.config.constants import draws_text, read_draws
from entrain_bench.records.records import Record, new_record
from entrain_bench.run.cells import compose_cells
from entrain_bench.specs.cluster import Speed

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


def records_of(*overrides: str) -> list[Record]:
    """Records of a sweep on a tiny job; a run's time is 2 s, and 1 s for megatron in even draws."""
    cells = compose_cells(["model=tiny", "cluster=tiny", "strategy=megatron,entrain", *overrides], multirun=True)
    found = []
    for cell in cells:
        fast = cell.config.strategy["name"] == "megatron" and cell.config.constants % 2 == 0
        found.append(replace(new_record(cell, "ok"), metrics={"iteration_time_s": 1.0 if fast else 2.0}))
    return found


@pytest.fixture
def draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of four draws in place of the suite's."""
    monkeypatch.setattr(constants, "config_tree", lambda: tmp_path)
    read_draws.cache_clear()
    (tmp_path / "posterior.csv").write_text(draws_text({"A40": {draw: Speed(gemm=0.9) for draw in range(1, 5)}}))


@pytest.mark.usefixtures("draws")
def test_an_answer_takes_draws_out_of_its_cases() -> None:
    drawn = records_of("constants=1,2,3,4", "action_noise=0.02", "seed=7")
    answer = Answer.of([*records_of("seed=0,1"), *drawn])
    (case,) = answer.cases
    assert case.comparison.seeds == [0, 1]
    assert len(answer.draws) == 8
    found = {one.name: one.chance for one in case.results if one.chance}
    # In odd draws both take as long, and the first counts.
    assert {name: each.num_fastest for name, each in found.items()} == {"megatron": 4, "entrain": 0}
    assert answer.to_dict()["chances"]["megatron"]["probability"] == 1.0
    (values,) = answer.case_dicts("results")
    assert values["strategies"][0]["posterior"] == {
        "p_fastest": 1.0,
        "num_draws": 4,
        "lead": {"median": 1.0, "low": 1.0, "high": 2.0},
    }
