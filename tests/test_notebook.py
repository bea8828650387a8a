"""Results in a notebook: what it shows of runs, a run and a timeline, and the page of docs whose code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import entrain_bench as eb
from entrain_bench import notebook
from entrain_bench.base.errors import UserError
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells
from support.records import runs

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "notebook.md"
JOB = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.dp=1", "iterations=1")


def test_runs_show_the_answer_and_a_table_with_the_best_in_bold() -> None:
    records = runs({"base": [2.0, 2.2, 2.1], "<best>": [1.0, 1.0, 1.1]})
    view = notebook.show(records)
    shown = view._repr_html_()
    assert "<p>&lt;best&gt; is the fastest" in shown
    assert "<strong>&lt;best&gt;</strong>" in shown
    assert "<best>" not in shown
    assert "<strong>base</strong>" not in shown
    assert repr(view).startswith("<best> is the fastest")
    table = view.to_pandas()
    assert table["iteration_time_s"].tolist() == [record.metrics["iteration_time_s"] for record in records]
    table["strategy"] = ""
    assert set(view.to_pandas()["strategy"]) == {"base", "<best>"}, "a table of its own"
    assert view.plot().axes[0].get_xlabel() == "iteration time / fastest"


@pytest.mark.wide
def test_a_sweep_runs_what_is_missing_and_has_the_keys_of_the_command(tmp_path: Path) -> None:
    sweep = (*JOB, f"results_dir={tmp_path}", "strategy=megatron,entrain", "seed=0")
    first = notebook.sweep(*sweep).to_pandas()
    assert first["key"].tolist() == [cell.key for cell in compose_cells(sweep, multirun=True)]
    made = [record.made_at for record in Results(tmp_path).records()]
    again = notebook.sweep(*sweep).to_pandas()
    assert [record.made_at for record in Results(tmp_path).records()] == made
    assert again.equals(first)
    assert {*notebook.load(str(tmp_path)).to_pandas()["key"]} == {*first["key"]}


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"results_dir={tmp_path}: holds no run"):
        notebook.load(str(tmp_path))


def test_a_run_and_a_timeline_are_shown_and_drawn() -> None:
    config = eb.compose("strategy=entrain", *JOB)
    outcome = eb.run_experiment(config)
    view = notebook.show(outcome)
    assert f"<td>{outcome.metrics['iteration_time_s']:.4g}</td>" in view.html
    assert view.to_pandas()["iteration_time_s"].tolist() == [outcome.metrics["iteration_time_s"]]
    widths = [bar.get_width() for bar in view.plot().axes[0].patches]
    assert sum(widths) == pytest.approx(1.0)

    setting = eb.prepare(config)
    shapes = setting.source.batch(iteration=0, num_samples=setting.job.global_batch, seed=0)
    program = setting.strategy.program(shapes, setting.plan(), setting.profile)
    timeline = setting.executor.execute(program)  # type: ignore[union-attr]
    shown = notebook.show(timeline)
    assert shown.to_pandas()["end_s"].max() == timeline.iteration_time_s
    assert shown.plot().axes[0].get_xlabel().startswith("time (")


@pytest.mark.wide
def test_the_code_of_the_page_of_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)  # noqa: S102
    assert names["table"]["strategy"].nunique() == 3
