"""``entrain-bench plot``: any runs in the forms of the figures, what their values are over, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.plots import Plot, plotted
from entrain_bench.cli import run_command
from entrain_bench.notebook import show
from entrain_bench.records.records import Record, Results
from support.records import record


def runs() -> list[Record]:
    """``mine`` takes half the time of ``base`` on texts and a quarter on images; ``lost`` fails on images."""
    times = {
        "base": {"text": 4.0, "image": 8.0},
        "mine": {"text": 2.0, "image": 2.0},
        "lost": {"text": 3.0, "image": None},
    }
    return [
        record(name, time and time * (1 + 0.1 * seed), seed, workload)
        for name, of in times.items()
        for workload, time in of.items()
        for seed in range(2)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results = Results(tmp_path)
    results.prepare()
    for one in runs():
        results.write(one, None)
    return tmp_path


def test_values_are_over_the_fastest_or_a_strategy_and_means_geometric_over_the_cases_that_there_are() -> None:
    data = plotted(Answer.of(runs()), Plot())
    assert data.overall["value"].to_dict() == pytest.approx({"mine": 1.0, "lost": 1.5, "base": math.sqrt(2 * 4)})
    assert [*data.overall.index] == ["mine", "lost", "base"]
    assert data.strategies["lacks"].to_dict() == {"base": False, "mine": False, "lost": True}
    over = plotted(Answer.of(runs()), Plot(normalize="base"))
    assert over.overall["value"].to_dict() == pytest.approx({"base": 1.0, "mine": 1 / math.sqrt(8), "lost": 0.75})
    plain = plotted(Answer.of(runs()), Plot(normalize="none"))
    assert plain.overall["value"].to_dict() == pytest.approx({"mine": 2.1, "lost": 3.15, "base": 6.3})
    assert plain.cells.query("name == 'base' and column == 'image'")["value"].item() == pytest.approx(8.4)


@pytest.mark.parametrize("kind", ["dots", "heatmap", "lines"])
def test_a_plot_is_drawn_and_says_what_it_found(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"plot {kind} results_dir={folder} by=workload strategy=base,mine seed=0"
    assert run_command(line.split()) == 0
    caption, written = capsys.readouterr().out.splitlines()
    assert caption.startswith(
        "Iteration time / fastest, geometric mean over 2 values and 1 seed: Mine 1.00 to Base 2.83."
    )
    assert written.startswith(f"written: {folder}/figures/plot_{kind}_")
    (path,) = folder.glob("figures/*.json")
    stated = json.loads(path.read_text())
    assert stated["caption"].startswith(caption)
    assert stated[
        "command"
    ] == f"entrain-bench plot results_dir={folder} {kind} metric=iteration_time_s by=workload " + (
        "strategy=base,mine seed=0"
    )
    assert {*pd.read_csv(path.with_suffix(".csv"))["name"]} == {"base", "mine"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("dot", "plot=dot: unknown (did you mean dots?); choices: dots, heatmap, lines"),
        ("dots lines", "lines: plot draws one form; choices: dots, heatmap, lines"),
        ("metric=iteration_time", "metric=iteration_time: unknown (did you mean iteration_time_s?); choices: "),
        ("normalize=bas", "normalize=bas: unknown (did you mean base?); choices: base, fastest, lost, mine, none"),
        ("lines", "by: lines need the key along x, for example by=global_batch"),
        ("by=worklod", "by=worklod: unknown (did you mean workload or workload.name?); choices: "),
        ("strategy=yours", "strategy=yours: unknown; choices: base, lost, mine"),
        ("layout.tp=2", "layout.tp"),
    ],
)
def test_what_is_refused_is_one_line(
    arguments: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plot", *arguments.split(), f"results_dir={folder}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_a_notebook_draws_the_same_into_axes_of_its_own() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    view = show(runs())
    assert view.plot(strategies=["base", "mine"], normalize="base", ax=left) is figure
    assert [label.get_text() for label in left.get_yticklabels()] == ["Mine", "Base"]
    view.plot("heatmap", ax=right)
    assert len(right.texts) == 6
