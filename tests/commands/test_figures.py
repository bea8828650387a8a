"""A figure over a job of the user's: what takes the place of what, what is refused, and what is written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.cli import run_command
from entrain_bench.commands import outputs
from entrain_bench.config.compose import Composer
from entrain_bench.config.figures import rows_of, sweeps_of

TINY = ("model=tiny", "cluster=tiny", "layout.tp=1", "layout.dp=1", "global_batch=8", "microbatch_size=2")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    sides = [[56 * (row % 4)] * (row % 4 > 0) for row in range(12)]
    trace = {"text_tokens": range(10, 22), "image_widths": sides, "image_heights": sides}
    pd.DataFrame(trace).to_parquet("mine.parquet")
    return ["workload=trace", "workload.path=mine.parquet"]


def test_what_is_given_takes_the_place_of_the_figures_own() -> None:
    given = ["workload=trace", "workload.path=a.parquet,b.parquet", "cluster=h100x64", "layout.dp=2"]
    (sweep,) = sweeps_of("systems", overrides=given).values()
    cells = Composer().sweep(sweep).cells
    usual = Composer().sweep(["figure=systems"]).cells
    for key, values in {"workload": ["trace"], "workload.path": ["a.parquet", "b.parquet"], "layout.dp": ["2"]}.items():
        assert [*dict.fromkeys(values_of(cells, key))] == values
    for key in ("strategy", "seed", "model"):
        assert {*values_of(cells, key)} == {*values_of(usual, key)}


def test_values_of_a_figures_own_narrow_it() -> None:
    given = ["strategy=megatron,entrain", "workload=chartqa", "seed=0,1"]
    (sweep,) = sweeps_of("iteration_time", overrides=given).values()
    cells = Composer().sweep(sweep).cells
    # Two strategies and seeds on the two jobs of this workload, whose other keys come along.
    assert len(cells) == 8
    job = {"workload": "chartqa", "cluster": "h100x64", "global_batch": "512"}
    assert {key: {*values_of(cells, key)} for key in job} == {key: {value} for key, value in job.items()}
    assert {*values_of(cells, "model")} == {"qwen25vl_llama3_8b", "llavaov_qwen25_72b"}
    # Keys inside of a choice keep their values; rows of other strategies and jobs are left out.
    (sweep,) = sweeps_of("sensitivity", overrides=["strategy=entrain", "seed=0"]).values()
    assert len({*values_of(Composer().sweep(sweep).cells, "strategy.planner.encoder_stages")}) == 7
    assert [*sweeps_of("memory_over_time", overrides=["strategy=megatron,disttrain"])] == ["as in all figures"]
    jobs = {label.partition(";")[0] for label in sweeps_of("mechanisms", overrides=["workload=nextqa"])}
    assert jobs == {"3B video, 64 A100"}


def values_of(cells: Sequence[Sequence[str]], key: str) -> list[str]:
    """The last value of a key in every cell."""
    return [[text.partition("=")[2] for text in cell if text.partition("=")[0] == key][-1] for cell in cells]


def test_every_row_of_a_figure_has_the_users_job() -> None:
    sweeps = sweeps_of("robustness", overrides=["workload=coco"])
    assert [*sweeps] == [*rows_of("robustness")]
    # What a row chooses is not swept as well.
    sweeps = sweeps_of("memory_over_time", overrides=["workload=coco"])
    usual, alone = (Composer().sweep(sweep).cells for sweep in sweeps.values())
    assert {*values_of(usual, "strategy")} == {"megatron", "disttrain", "optimus", "entrain"}
    assert {*values_of(alone, "strategy")} == {"entrain"}
    assert {*values_of([*usual, *alone], "workload")} == {"coco"}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "iteration_tme",
            "figure=iteration_tme: unknown (did you mean iteration_time?); choices: allocations, calibration",
        ),
        ("claims workload=coco", "figure=claims: unknown (did you mean mechanisms?); choices: "),
        ("workload=coco", "workload=coco: needs the name of a figure; choices: allocations, "),
        ("sensitivity strategy=dip", "strategy: figure sensitivity already compares values of strategy.planner.enc"),
        ("mechanisms workload=coco", "workload: figure mechanisms already compares values of workload (in its rows)"),
        (
            "context_length workload=coco",
            "workload: figure context_length already compares values of workload.sequence_tokens",
        ),
        ("robustness speed.gemm=0.5", "figure robustness already compares values of speed.gemm (in its rows). Leave"),
        (
            "quick global_batch=8,16",
            "global_batch: must be one value; only strategy, workload, model, cluster, seed take several in a",
        ),
        ("quick figure=twins", "figure: is not a key of a run. Leave it out"),
        ("quick workload=coco workload.max_image_tokens=99,100", "workload: two entries share the name coco. Give"),
        ("quick workload=trace workload.path=no.parquet", "workload.path=no.parquet: does not exist"),
        ("quick workload=coco model.modules.llm.context_tokens=500", "LLM tokens, but the model takes at most 500;"),
        ("quick results_dir=/dev/null/x workload=coco", "must be a writable folder"),
    ],
)
def test_what_is_refused_is_one_line_and_nothing_is_written(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["figures", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
    assert not [*tmp_path.iterdir()]


@pytest.mark.wide
def test_the_users_job_is_run_once_and_drawn(
    mine: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "num_processes", lambda: 1)
    job = ["figures", "quick", *mine, *TINY, "iterations=1", "mlflow=false", "results_dir=out"]
    assert run_command(job) == 0
    shown = capsys.readouterr()
    assert "4 runs)" in shown.err
    assert " the fastest, or at most 5% slower, on this job, with a speedup of " in shown.out
    files = r"written: out/figures/quick_mine_[0-9a-f]{8}\.\{pdf,png,csv,json\}"
    assert re.search(rf"\n{files}\n\nyour job: +entrain-bench recommend ", shown.out)
    table = pd.read_csv(next(Path("out/figures").glob("quick_mine_*.csv")))
    assert table[["workload", "model"]].drop_duplicates().values.tolist() == [["mine", "tiny"]]
    assert len(table) == 4
    stated = json.loads(next(Path("out/figures").glob("*.json")).read_text())
    assert stated["command"] == f"entrain-bench figures quick {' '.join([*mine, *TINY])} iterations=1"
    assert run_command(job) == 0
    assert ", 0 runs)" in capsys.readouterr().err
    assert len([*Path("out/figures").iterdir()]) == 4
