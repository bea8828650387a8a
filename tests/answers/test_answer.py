"""The values of an answer: winners, what to know of them, and the decision."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.answer import Answer, NextStep
from entrain_bench.answers.cases import Outcome
from entrain_bench.records.records import Record
from entrain_bench.records.time_shares import TIME_SHARES
from support.records import runs

SLOW = [2.0, 2.2, 2.1]
FAST = [1.0, 1.0, 1.1]
NEAR = [1.01, 1.0, 1.1]


def decided(records: Sequence[Record]) -> dict[str, Any]:
    return Answer.of(records).decision("results")


def test_an_answer_is_plain_values() -> None:
    records = [*runs({"base": SLOW, "best": FAST, "near": NEAR, "poor": [3.0, None, 3.2]}), *runs({"base": SLOW}, "x")]
    answer = Answer.of(records, ["strategy=a"])
    values = json.loads(json.dumps([answer.to_dict(), answer.decision("results"), answer.case_dicts("results")]))
    first, second = values[2]
    assert [first["outcome"], second["outcome"]] == [Outcome.DECIDED, Outcome.ALONE]
    assert (first["fastest"], first["as_good"], first["baseline_variant"]) == (["best"], ["near"], "base")
    assert [each["name"] for each in first["strategies"]] == ["best", "near", "base", "poor"]
    assert [each["is_best"] for each in first["strategies"]] == [True, True, False, False]
    assert first["strategies"][0]["speedup"]["mean"] == pytest.approx(2.03, abs=0.005)
    assert first["strategies"][3]["runs"][1]["reason"] == "out of luck"


def test_who_failed_cannot_win() -> None:
    assert Answer.of(runs({"base": SLOW, "broken": [0.5, None, 0.5], "good": FAST})).fastest == "good"


def test_means_over_cases_need_all_results() -> None:
    first = runs({"base": [2.0, 2.0], "best": [1.0, 1.0], "lacks": [1.0, 1.0]})
    second = runs({"base": [8.0, 8.0], "best": [1.0, 1.0], "lacks": [1.0, None]}, workload="chartqa")
    answer = Answer.of([*first, *second])
    assert {*answer.overall} == {"base", "best"}
    # The geometric mean of 2 and 8, the same at both seeds.
    assert answer.overall["best"].mean == pytest.approx(4.0)
    assert answer.gain == answer.overall["best"]


def test_the_decision_names_winner_gain_reason_and_next_step() -> None:
    trained = runs({"megatron": SLOW, "entrain": FAST, "near": NEAR})
    values = decided([replace(one, labels={**one.labels, "harness": "simulate"}) for one in trained])
    assert (values["winner"], values["as_good"], values["exceptions"]) == ("entrain", ["near"], {})
    assert values["gain"]["mean"] == pytest.approx(2.03, abs=0.005)
    assert (values["saving"]["before"], values["saving"]["parts"]) == (pytest.approx(2.1), {})
    assert values["runs_in"] == ()
    assert values["rivals"] == {"published": None, "today": None}
    assert values["next"] == {
        "kind": NextStep.RECOMMEND,
        "commands": ["entrain-bench recommend workload=coco"],
    }
    rerun = decided(trained)["next"]
    assert rerun["kind"] == NextStep.RERUN
    assert rerun["commands"][0].startswith("entrain-bench --multirun strategy=entrain workload=coco")


def test_the_decision_names_the_fastest_published_and_the_fastest_in_a_framework() -> None:
    strategies = {
        "base": {"family": "out_of_the_box", "switch_on": {"megatron": []}},
        "best": {"family": "ours"},
        "near": {"family": "published", "switch_on": {"loop": []}},
    }
    job = {"encoder_sp": False, "encoder_cp": False, "layout": {"recompute_rule": "with_llm"}}
    records = [
        replace(
            one,
            config=one.config
            | job
            | {"strategy": {**one.config["strategy"], **strategies[str(one.labels["strategy"])]}},
        )
        for one in runs({"base": SLOW, "best": FAST, "near": NEAR})
    ]
    rivals = decided(records)["rivals"]
    published, today = rivals["published"], rivals["today"]
    assert (published["name"], published["ties"], published["framework"]) == ("near", True, "")
    assert (today["name"], today["ties"], today["framework"]) == ("base", False, "Megatron-LM")
    assert today["time_s"] == pytest.approx(2.1)
    assert today["behind"] == pytest.approx(2.03, abs=0.005)


def test_after_a_recommendation_its_plan_is_the_next_step(tmp_path: Path) -> None:
    won = runs({"megatron": SLOW, "entrain": FAST})
    names = [str(won[0].labels[name]) for name in ("model", "workload", "cluster")]
    plan = tmp_path / "recommended" / f"{'-'.join(names)}-2-suite.yaml"
    plan.parent.mkdir()
    plan.write_text("")
    next_step = Answer.of(won).decision(str(tmp_path))["next"]
    assert next_step == {"kind": NextStep.PLAN, "commands": [f"entrain-bench plan={plan}"]}


def test_the_reason_names_the_classes_of_time_that_shrink() -> None:
    shares = {name: dict.fromkeys(TIME_SHARES, 0.0) for name in ("base", "best")}
    shares["base"] |= {"time_work_share": 0.5, "time_pipeline_share": 0.4, "time_comm_share": 0.1}
    shares["best"] |= {"time_work_share": 1.0}
    records = [
        replace(one, metrics={**one.metrics, **shares[str(one.labels["strategy"])]})
        for one in runs({"base": [2.0] * 3, "best": [1.0] * 3})
    ]
    # Work takes one second of both.
    parts = {"time_pipeline_share": pytest.approx(0.8), "time_comm_share": pytest.approx(0.2)}
    assert decided(records)["saving"] == {"case": "", "before": 2.0, "after": 1.0, "parts": parts}


def test_what_is_not_decided_is_run_at_more_seeds() -> None:
    values = decided(runs({"megatron": SLOW[:1], "entrain": FAST[:1]}))
    assert values["winner"] == "entrain"
    command = "entrain-bench --multirun strategy=entrain,megatron workload=coco seed=0,1,2,3,4"
    assert values["next"] == {"kind": NextStep.MORE_SEEDS, "seeds": [0], "commands": [command]}
    lost = decided(runs({"base": [None] * 3, "other": [None] * 3}))
    assert (lost["winner"], lost["has_result"]) == ("", False)
