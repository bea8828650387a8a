"""The report on real runs: one's own strategy, a quick look and more seeds, lost cells; the same answer everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.console_table import summary
from entrain_bench.answers.report.build import page_of, report_json
from entrain_bench.answers.report.page import html, markdown
from entrain_bench.answers.report.read import Material, _csv
from entrain_bench.answers.sentences import sentences
from entrain_bench.answers.tracking.entries import content_of, entries_of
from entrain_bench.answers.tracking.pages import ANSWER_PAGE, NOTE_TAG
from entrain_bench.cli import run_command
from entrain_bench.records.records import Record, Results
from entrain_bench.run.stamps import Stamp, write_stamp
from support.records import at_seeds, runs
from support.sweeps import pasted

SMALL = ["model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1"]
MINE = """
defaults: [{planner: megatron}, {assigner: token_budget}, {scheduler: megatron}]
name: mine
planner: {profile_samples: 8}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "strategy").mkdir(parents=True)
    (tmp_path / "own" / "strategy" / "mine.yaml").write_text(MINE)
    return tmp_path


def sweep(*overrides: str) -> None:
    assert run_command([*SMALL, "mlflow=false", "--multirun", *overrides]) == 0


def written(suffix: str = "md") -> str:
    return Path(f"results/report.{suffix}").read_text()


def pasted_keys() -> set[str]:
    """Keys of the cells of all commands on the page."""
    return {cell.key for line in re.findall(r"^    (entrain-bench .*)$", written(), re.M) for cell in pasted(line)}


@pytest.mark.wide
@pytest.mark.parametrize("told", [[], ["--config-dir", "own"]])
def test_ones_own_strategy_on_another_device_is_reported_with_and_without_its_folder(told: list[str]) -> None:
    sweep("--config-dir", "own", "strategy=mine,megatron", "seed=0,1", "cluster/device=h100")
    assert run_command(["report", *told]) == 0
    keys = {record.key for record in Results(Path("results")).records()}
    assert len(keys) == 4
    assert pasted_keys() == keys
    (line,) = re.findall(r"^    (entrain-bench .*)$", written(), re.M)
    assert "--config-dir own" in line
    assert "cluster/device=h100" in line
    assert len(line) < 300
    assert "older code" not in written()
    assert " of 2 of 23 strategies" in written()


@pytest.mark.wide
def test_a_quick_look_and_then_three_seeds_are_both_in_the_answer() -> None:
    sweep("strategy=megatron,entrain,disttrain", "seed=0")
    sweep("strategy=megatron,entrain", "seed=0,1,2")
    assert run_command(["report", "share=true"]) == 0
    assert Path("results/report.png").read_bytes().startswith(b"\x89PNG")
    text = written()
    assert re.search(r"(\w+ is the fastest of|Not decided: .* of) 3 of 22 strategies|Not decided: ", text)
    assert "Fewer seeds than others: disttrain at seed 0." in text
    assert re.search(r"Not run: braid, .*omnibal, ", text.replace("\\", ""))
    assert "| 0 to 2 | [7](#runs-1) |" in text
    assert pasted_keys() == {record.key for record in Results(Path("results")).records()}


@pytest.mark.wide
def test_lost_cells_turn_no_winner() -> None:
    sweep("strategy=megatron,entrain", "seed=0,1,2")
    results = Results(Path("results"))
    records = results.records()
    first = next(iter(sentences(Answer.of(records))))
    assert first.startswith("entrain is the fastest of 2 of 22")
    for record in records:
        if record.labels["strategy"] == "entrain" and record.labels["seed"]:
            results.record_path(record.key).unlink()
    left = results.records()
    lost = ["strategy=entrain seed=1", "strategy=entrain seed=2"]
    (parent, *_) = entries_of(results, left, "mine", lost=lost)
    table = " ".join(line.plain for line in summary(left, 300, lost))
    assert run_command(["report"]) == 0
    words = parent.tags[NOTE_TAG]
    for text in (table, words, written()):
        assert "entrain is the fastest of 2 of 22" in text
        assert "Fewer seeds than others: entrain at seed 0." in text
        assert "Only one seed was run, so differences may be noise." in text
    assert parent.tags["best_strategy"] == "entrain"
    for text in (table, words):
        assert "2 of 6 planned runs left no record: strategy=entrain seed=1 and strategy=entrain seed=2." in text


FIXTURES = {
    "decided": runs({"base": [2.0, 2.2, 2.1], "best": [1.0, 1.0, 1.1], "near": [1.01, 1.0, 1.1], "odd": [3.0, None]}),
    "lost and close": at_seeds(runs({"base": [2.0, 2.2, 2.1], "best": [1.0, 1.0, 1.1], "near": [0.99] * 3}), "near", 0),
    "far": at_seeds(runs({"base": [2.0, 2.2, 2.1], "best": [1.0] * 3, "far": [4.0] * 3}), "far", 2),
    "one seed": runs({"base": [2.0], "best": [1.0]}),
    "several cases": [
        *runs({"base": [2.0, 2.1], "best": [1.0] * 2}),
        *runs({"base": [1.0] * 2, "best": [3.0] * 2}, "x"),
    ],
}


@pytest.mark.parametrize("records", FIXTURES.values(), ids=FIXTURES)
def test_one_answer_in_all_renderers(records: list[Record]) -> None:
    answer = Answer.of(records)
    said = sentences(answer)
    assert said
    material = Material(answer, "1.0", "results")
    page = page_of(material)
    found = json.loads(report_json(material))
    parent, *_ = entries_of(Results(Path("results")), records, "mine")
    shown = {
        "terminal": " ".join(line.plain for line in summary(records, 100)),
        "Markdown": markdown(page).replace("\\", ""),
        "HTML": html(page),
        "MLflow": parent.tags[NOTE_TAG],
        "MLflow's page": content_of(parent.artifacts[ANSWER_PAGE]).decode(),
        "JSON": " ".join(found["sentences"]),
    }
    for where, text in shown.items():
        for sentence in said:
            assert sentence in text, where
    assert parent.tags.get("best_strategy", "") == answer.fastest
    bold = [line.plain.split()[0] for line in summary(records, 100) if line.style == "bold"]
    best = [answer.variant(case.groups[own]) for case in answer.cases for own in case.best]
    assert sorted(bold) == sorted(best)
    for case, values in zip(answer.cases, found["cases"], strict=True):
        assert [*values["fastest"], *values["as_good"]][: len(case.best)] == [
            answer.variant(case.groups[own]) for own in case.best
        ]
        for own, each in zip(case.groups, values["strategies"], strict=True):
            standing = case.comparison.standings[own]
            assert each["verdict"] == standing.verdict
            assert (each["speedup"] or {}).get("mean") == (standing.speedup.mean if standing.speedup else None)
        assert values["commands"] == commands_of(case.records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "must hold a run with a result"),
        (["seed=0"], "seed=0: unknown key; choices: results_dir"),
        (["--config-dir", "nowhere"], "--config-dir=nowhere: must be a folder"),
    ],
)
def test_nothing_to_say_and_bad_input_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["report", "results_dir=none", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("none").exists()


def test_a_table_that_was_edited_is_named_and_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results, table = Results(tmp_path), tmp_path / "claims.csv"
    table.write_text("name,ratio\none,1.5\n")
    write_stamp(results, "claims", Stamp.of("x", ["claims.csv"], tmp_path))
    shown = _csv(results, "claims", text=True)
    assert shown is not None
    assert shown["ratio"].tolist() == ["1.5"]
    for content in (b"name,ratio\none,2.5\n", b"\xff"):
        table.write_bytes(content)
        assert _csv(results, "claims", text=True) is None
    assert f"{table}: not shown (it was edited since); make it again" in caplog.text
