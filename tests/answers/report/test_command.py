"""``entrain-bench report`` on real runs: commands that run the same again, other folders, bad input."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.report.commands import setting_overrides
from entrain_bench.answers.report.parameters import parameters, suffixes
from entrain_bench.answers.report.read import read_runs
from entrain_bench.answers.report.words import TIMES
from entrain_bench.cli import run_command
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells
from support.report import runs

SMALL = ["model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1"]
SWEEPS = [
    ["strategy=megatron,entrain", "seed=0,1"],
    ["strategy=megatron,disttrain", "speed.gemm=0.5", "layout.recompute=[vision]", "seed=0"],
    ["strategy=entrain", "strategy/planner=megatron", "strategy.planner.profile_samples=8", "seed=0,1"],
    [
        "strategy=megatron",
        "workload=synthetic",
        "workload.modalities.image.llm_tokens.sigma=0.25",
        "cluster.num_nodes=3",
    ],
    ["strategy=megatron", "workload=synthetic", "cluster.num_nodes=5", "cluster.name=odd", "layout.dp=null"],
]


def written(folder: Path) -> str:
    return (folder / "report.md").read_text()


@pytest.mark.wide
def test_every_run_is_composed_again_by_a_command_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for sweep in SWEEPS:
        run_command([*SMALL, f"results_dir={tmp_path}", "mlflow=false", "--multirun", *sweep])
    assert run_command(["report", f"results_dir={tmp_path}"]) == 0
    assert "report.html" in capsys.readouterr().err
    commands = re.findall(r"^    entrain-bench ((?:--multirun )?strategy=.*)$", written(tmp_path), re.M)
    cells = [
        cell
        for line in commands
        for cell in compose_cells([*shlex.split(line.replace("--multirun ", ""))], multirun=True)
    ]
    records = Results(tmp_path).records()
    assert len(records) == 10
    assert {cell.key for cell in cells} == {record.key for record in records}
    assert run_command(["report", f"results_dir={tmp_path}"]) == 0


@pytest.mark.wide
def test_a_file_of_the_users_is_named_by_its_path_and_a_name_that_is_not_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"text_tokens": [50] * 40}).to_parquet("mine.parquet")
    mine = [*SMALL, "mlflow=false", "workload=trace", "workload.path=mine.parquet", "seed=3", "strategy=megatron"]
    for more in ([], ["workload.name=other"]):
        assert run_command([*mine, *more]) == 0
    assert run_command(["report"]) == 0
    lines = re.findall(r"^    entrain-bench (strategy=.*)$", written(tmp_path / "results"), re.M)
    workloads = [[text for text in shlex.split(line) if "workload" in text] for line in lines]
    assert sorted(workloads) == [
        ["workload=trace", 'workload.path="mine.parquet"'],
        ["workload=trace", 'workload.path="mine.parquet"', 'workload.name="other"'],
    ]
    keys = {cell.key for line in lines for cell in compose_cells(shlex.split(line))}
    assert keys == {record.key for record in Results(Path("results")).records()}


@pytest.mark.wide
def test_a_table_without_records_is_enough(tmp_path: Path) -> None:
    runs({"megatron": [2.0, 2.1], "entrain": [1.0, 1.0]}, workload="coco").to_csv(tmp_path / "table.csv", index=False)
    assert run_command(["report", f"results_dir={tmp_path}"]) == 0
    assert f"**Entrain** is the fastest for Tiny on COCO (2.05{TIMES} (" in written(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "must hold a run with a result"),
        (["seed=0"], "seed=0: unknown key; choices: results_dir"),
        (["--config-dir", "nowhere"], "--config-dir=nowhere: must be a folder"),
    ],
)
def test_nothing_to_say_and_bad_input_are_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["report", f"results_dir={tmp_path}", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_runs_without_any_result_and_a_damaged_table_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs({"megatron": [None]}).to_csv(tmp_path / "table.csv", index=False)
    assert run_command(["report", f"results_dir={tmp_path}"]) == 2
    (tmp_path / "table.csv").write_text("strategy,seed\nmegatron,zero\n")
    assert run_command(["report", f"results_dir={tmp_path}"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "must hold a run with a result" in first
    assert "is no table of runs" in second


@pytest.mark.wide
def test_records_of_older_code_are_left_out_while_there_are_others(tmp_path: Path) -> None:
    arguments = [*SMALL, f"results_dir={tmp_path}", "mlflow=false"]
    run_command([*arguments, "--multirun", "strategy=megatron", "seed=0,1"])
    first, _ = sorted((tmp_path / "runs").rglob("*.json"))
    first.write_text(re.sub(r'"code_version": "[^"]*"', '"code_version": "older"', first.read_text()))
    rows, num_older, _ = read_runs(Results(tmp_path))
    assert (len(rows), num_older) == (1, 1)
    first.rename(tmp_path / "kept")
    (last,) = (tmp_path / "runs").rglob("*.json")
    last.unlink()
    (tmp_path / "kept").rename(first)
    rows, num_older, _ = read_runs(Results(tmp_path))
    assert (len(rows), num_older) == (1, 0)


@pytest.mark.parametrize(
    ("column", "text", "overrides"),
    [
        ("layout_tp", "", ["layout.tp=null"]),
        ("layout_recompute", "none", ["layout.recompute=[]"]),
        ("layout_recompute", "vision+llm", ["layout.recompute=[vision,llm]"]),
        ("freeze", "", ["freeze=[]"]),
        ("speed", "gemm=0.7 network=2.0", ["speed.gemm=0.7", "speed.network=2.0"]),
        ("overlap_grad_reduce", "False", ["overlap_grad_reduce=false"]),
        ("microbatch_size", "", ["microbatch_size=null"]),
        # A run that is older than a setting.
        ("tp_overlap", "", []),
    ],
)
def test_settings_of_the_table_are_overrides(column: str, text: str, overrides: list[str]) -> None:
    assert setting_overrides(column, text) == overrides


def test_parameters_are_read_as_they_are_written() -> None:
    text = 'a.b=1 path="my file.parquet" c=["x", "y"] d=null e="a \\" b=2"'
    assert parameters(text) == {
        "a.b": "1",
        "path": '"my file.parquet"',
        "c": '["x", "y"]',
        "d": "null",
        "e": '"a \\" b=2"',
    }


def test_names_say_what_differs_from_what_is_most_frequent() -> None:
    details = pd.Series(["p.a=1 p.b=1", "p.a=1 p.b=1", "p.a=2 p.b=1", "p.a=9"])
    assert suffixes(pd.Series(["x", "x", "x", "y"]), details).tolist() == ["", "", " (a=2)", ""]
    assert suffixes(pd.Series(["x", "x", "y", "y"]), pd.Series(["a=1", "a=2", "a=1", "a=1"])).tolist() == [
        " (a=1)",
        " (a=2)",
        "",
        "",
    ]
