"""One run a case and strategy: seeds are steps, the mean is last, parameters are what was changed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.sentences import sentences
from entrain_bench.answers.tracking.entries import BASELINE_TAG, NOTE_TAG, Entry, entries_of, parameters
from entrain_bench.answers.tracking.log import sweep_name
from entrain_bench.records.records import Record, Results
from support.records import record

TIMES = {"first": (4.0, 8.0), "second": (2.0, 1.0)}


def shown(records: Sequence[Record], name: str = "mine") -> tuple[Entry, dict[str, Entry]]:
    """The parent of a sweep, and its cases by name."""
    parent, *cases = entries_of(Results(Path("nowhere")), records, name)
    named = {case.name: case for case in cases}
    assert len(named) == len(cases) == len({case.case for case in cases})
    return parent, named


def contest(**config: object) -> list[Record]:
    return [record(name, time_s, seed, **config) for name, own in TIMES.items() for seed, time_s in enumerate(own)]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "defaults"),
        (["results_dir=/x", "mlflow=false", "mlflow_uri=http://h", "hydra/launcher=joblib"], "defaults"),
        (["figure=robustness", "results_dir=/x"], "robustness"),
        (["figure=robustness", "seed=0"], "figure=robustness seed=0"),
        (["strategy=a,b", "seed=0,1"], "strategy=a,b seed=0,1"),
    ],
)
def test_a_sweep_is_called_after_its_figure_or_its_overrides(overrides: list[str], name: str) -> None:
    assert sweep_name(overrides) == name


def test_seeds_are_steps_and_the_mean_is_last() -> None:
    parent, cases = shown(contest())
    assert cases["first"].metrics["iteration_time_s"] == {0: 4.0, 1: 8.0, 2: 6.0}
    assert cases["second"].metrics["speedup_over_first"] == pytest.approx({0: 2.0, 1: 8.0, 2: 4.0})
    assert parent.metrics["speedup/second"][0] == parent.metrics["best_speedup"][0] == pytest.approx(4.0)
    assert (parent.metrics["num_runs"][0], parent.metrics["num_ok"][0]) == (4, 4)
    assert (parent.tags["best_strategy"], parent.tags[BASELINE_TAG]) == ("second", "first")
    assert parent.tags[NOTE_TAG].startswith(" ".join(sentences(Answer.of(contest()))))
    (single,) = entries_of(Results(Path("nowhere")), contest()[:1], "one")
    assert single.metrics["iteration_time_s"] == {0: 4.0}, "one value is its own mean"


def test_a_failed_seed_is_no_step_and_is_named() -> None:
    records = [*contest(), record("second", None, 2), record("first", 3.0, 2)]
    _, cases = shown(records)
    case = cases["second"]
    assert case.failed
    assert case.metrics["iteration_time_s"] == {0: 2.0, 1: 1.0, 2: 1.5}
    assert case.tags["status"] == "2 ok, 1 failed"
    assert case.tags["reason"] == "out of luck"
    assert not cases["first"].failed


def test_parameters_are_names_degrees_and_what_differs_from_a_default() -> None:
    config = {"global_batch": 16, "iterations": 4, "layout": {"tp": 2, "cp": 1, "pp": None, "dp": None}}
    one, two = (record("first", 1.0, seed, **config, own={"trials": 8}) for seed in (0, 1))
    overrides = (*one.overrides, "strategy.trials=8", "strategy/planner=mine", "results_dir=x", "layout.dp=null")
    degrees = {"llm": {"tp": 2, "cp": 1, "pp": 4, "dp": 8}}
    one = replace(one, overrides=overrides, degrees=degrees)
    two = replace(two, overrides=overrides, degrees={"llm": {**degrees["llm"], "pp": 2}})
    names = {"Strategy": "first", "Workload": "text", "model": "m", "cluster": "c", "harness": "h"}
    chosen = {"chosen.llm.tp": "2", "chosen.llm.cp": "1", "chosen.llm.pp": "4", "chosen.llm.dp": "8"}
    given = {"layout.tp": 2, "layout.cp": 1, "layout.dp": "null", "global_batch": 16}
    given |= {"strategy.trials": 8, "strategy/planner": "mine"}
    # The default of iterations is 4.
    assert {**parameters([one]), "layout": 0} == {**names, **given, **chosen, "layout": 0}
    assert parameters([one, two])["chosen.llm.pp"] == "2, 4", "two plans"


def test_the_answer_is_an_artifact_as_page_and_values(tmp_path: Path) -> None:
    figure = tmp_path / "contest.png"
    figure.write_bytes(b"drawn")
    before, *_ = entries_of(Results(tmp_path), contest(), "mine", [figure])
    assert {*before.artifacts} == {"answer.html", "answer.md", "answer.json", "figures/contest.png"}
    assert before.table is not None
    assert fmean(before.table()["iteration_time_s"]) == 3.75
    figure.write_bytes(b"drawn again")
    after, *_ = entries_of(Results(tmp_path), contest(), "mine", [figure])
    assert after.digest != before.digest
