"""``entrain-bench recommend`` on a tiny job: the answer, its plan, that it is kept and repeatable, and bad input."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.recommend import strategy_race
from entrain_bench.answers.recommend.recommendation import NUM_DRAWS
from entrain_bench.cli import run_command
from entrain_bench.commands import recommend
from entrain_bench.config import constants
from entrain_bench.config.compose import compose
from entrain_bench.config.constants import draws_text, read_draws
from entrain_bench.program.layout import layout_to_json
from entrain_bench.program.plan_file import read_plan
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import plan_key
from entrain_bench.records.records import Results, new_record
from entrain_bench.records.sealed import CachedLayouts
from entrain_bench.run import cells as cells_module
from entrain_bench.run.cells import Done, compose_cells, run_cells, run_one
from entrain_bench.specs.cluster import Speed

JOB = ["model=tiny", "cluster=tiny", "workload=synthetic", "layout.tp=1", "global_batch=16", "microbatch_size=2"]
FREE = [*JOB[:3], "global_batch=16", "iterations=1", "mlflow=false", "seed=4"]
NULLS = ["layout.tp=null", "layout.cp=null", "layout.dp=null", "microbatch_size=null"]
TINY = [*JOB, "layout.dp=2", "iterations=1", "mlflow=false", "seed=4"]

MINE = """
defaults: [{planner: megatron}, {assigner: token_budget}, {scheduler: megatron}]
name: mine
within_megatron: [strategy.planner.placement=first_stage, strategy.planner.split=ends]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs happen in this process, and write to a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(recommend, "num_processes", lambda: 0)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert run_command(["recommend", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.wide
def test_an_answer_its_plan_and_that_it_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = said(capsys, *FREE, "strategy=megatron,entrain")
    best = re.search(r"^Run strategy=(\w+): [0-9.]+ s \(95% ", out, re.MULTILINE)
    assert best
    assert "Job: model tiny, workload synthetic, cluster tiny (4 GPUs), global batch 16." in out
    for part in (
        "Layout\n  vision: tp",
        "Memory\n",
        "ideal work  ",
        "% of " + best.group(1) + "'s GPU time is ideal work; the largest part of the rest is ",
        "Lower bound for any layout and schedule",
        "Robustness",
        "judged on seeds 9 to 20",
    ):
        assert part in out
    assert "written: results/recommendation.yaml" in err
    plan = read_plan(tmp_path / "results" / "recommendation.yaml")
    assert (plan.strategy, plan.job.model, plan.job.seed) == (best.group(1), "tiny", 4)
    # Everything is free unless it is given.
    assert plan.job.overrides == ("iterations=1", "layout.tp=null", "layout.cp=null", "layout.dp=null")
    assert f"{plan.expected.iteration_time_s:.3g}"[:4] in out
    # The plan's layout is the one that its runs had, and running the plan takes as long.
    own = compose(f"strategy={plan.strategy}", *FREE, *NULLS)
    cached = CachedLayouts(tmp_path / "results").read(plan_key(own))
    assert cached
    assert layout_to_json(plan.layout) == layout_to_json(cached.layout)
    usual = Results(tmp_path / "results").read(Cell.of([], own).key)
    assert usual
    config = compose("plan=results/recommendation.yaml")
    again = run_one(Cell.of(["plan=results/recommendation.yaml"], config), Results(tmp_path / "again"))
    assert again.metrics["iteration_time_s"] == usual.metrics["iteration_time_s"]
    # The expected time is the mean over the fresh seeds of the command, which has nothing left to run.
    judged = Results(tmp_path / "results" / "judged")
    command = next(line for line in out.splitlines() if line.startswith("  entrain-bench --multirun"))
    cells = compose_cells(shlex.split(command)[2:], multirun=True)
    assert [cell.config.seed for cell in cells] == [*range(9, 21)]
    fresh = [record.metrics["iteration_time_s"] for cell in cells if (record := judged.read(cell.key))]
    assert len(fresh) == 12
    assert plan.expected.iteration_time_s == pytest.approx(math.fsum(fresh) / 12, rel=1e-12)

    # Under each changed assumption the two frozen plans run, at the first three fresh seeds.
    changed = [
        (one.config["belief_error"], one.config["belief_bias"], one.config["speed"]["network"], one.config["seed"])
        for one in judged.records()
        if one.config["strategy"]["planner"].get("path")
    ]
    assumptions = [(0.3, 0.0, 1.0), (0.0, 0.3, 1.0), (0.0, 0.0, 0.5), (0.0, 0.0, 2.0)]
    assert sorted(changed) == sorted((*one, seed) for one in assumptions for seed in (9, 10, 11) for _ in range(2))

    def none(_: object, tasks: Iterable[Cell], *__: object) -> Iterator[tuple[Cell, Done]]:
        assert [*tasks] == [], "nothing is left to run"
        return iter(())

    monkeypatch.setattr(cells_module, "run_parallel", none)
    monkeypatch.setattr(cells_module, "attempt", none)
    assert said(capsys, *FREE, "strategy=megatron,entrain")[0] == out


@pytest.mark.wide
def test_a_strategy_that_fails_at_a_fresh_seed_is_not_recommended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"megatron", "entrain"}
    (best,) = re.findall(r"^Run strategy=(\w+): ", said(capsys, *FREE, "strategy=megatron,entrain")[0])
    (other,) = names - {best}

    def failing(cells: Iterable[Cell], results: Results, *rest: Any) -> Iterator[Done]:
        for cell in cells:
            if (cell.config.strategy["name"], cell.config.seed) == (best, 11):
                record = new_record(cell, "failed", "no memory", settled=True)
                yield Done(cell, results.write(record, None), "", 0.0)
            else:
                yield from run_cells([cell], results, *rest)

    monkeypatch.setattr(strategy_race, "run_cells", failing)
    out, _ = said(capsys, *FREE, "strategy=megatron,entrain", "results_dir=again")
    assert out.startswith(f"Run strategy={other}: ")
    assert f"No result: {best}: at seed 11: no memory" in out
    # The failure is a record of the folder, so a report names the same strategy.
    assert Answer.of(Results(tmp_path / "again").records()).cases[0].comparison.ranked[0] == other


@pytest.mark.wide
def test_within_a_framework_only_what_it_runs_is_considered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"output={tmp_path / 'mine.yaml'}"
    (tmp_path / "own" / "strategy").mkdir(parents=True)
    (tmp_path / "own" / "strategy" / "mine.yaml").write_text(MINE)
    mine = ["--config-dir=own", "strategy=megatron,entrain,mine", "layout.recompute=[]", where]
    out, _ = said(capsys, *TINY, "within=megatron", "speed.network=2", *mine)
    # What is given is no assumption.
    assert "estimates off by up to 30%" in out
    assert "bandwidth:" not in out
    assert re.search("^Run strategy=megatron strategy.planner.placement=first_stage", out, re.MULTILINE)
    assert re.search(r"Not considered: [^;]*entrain\s+and\s+\d+\s+more;", out)
    assert "entrain" not in out.partition("\n\n")[2].replace("entrain-bench", "")
    assert re.search(r"No result: mine: Megatron-LM does not run it: its\s+microbatches have", out)
    assert "  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 1" in out
    assert "Samples as they arrive." in out
    plan = read_plan(tmp_path / "mine.yaml")
    # What led to the layout is of no use beside it.
    assert plan.options == ()
    assert {"encoder_sp=false", "encoder_cp=false"} < {*plan.job.overrides}
    assert "recomputing" not in out
    assert [placed.pp for placed in plan.layout.modules] == [1, 2]


@pytest.mark.wide
def test_without_any_result_the_reasons_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, err = said(capsys, *JOB, "layout.dp=8", "mlflow=false", "strategy=megatron,fsdp", code=2)
    reasons = dict(reversed(line.split(": ", 1)) for line in out.splitlines())
    assert {*reasons.values()} == {"megatron", "fsdp"}
    assert err.splitlines()[-1] == f"entrain-bench: no strategy has a result, of 1 of 2: {next(iter(reasons))}"
    # All for one reason: it is said once.
    out, err = said(capsys, *JOB, "layout.dp=3", "mlflow=false", "strategy=megatron,disttrain", code=2)
    assert out == ""
    assert "entrain-bench: no strategy has a result: " in err
    assert not (tmp_path / "results" / "recommendation.yaml").exists()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["strategy=megatrn"], "strategy=megatrn: unknown (did you mean megatron?); choices: "),
        (["model=tiny,qwen25vl_llama3_1b"], "model=tiny,qwen25vl_llama3_1b: must be one value"),
        (["harness=train"], "harness=train: must be simulate"),
        (["plan=a.yaml"], "plan=a.yaml: is the output of recommend"),
        (["figure=quick"], "figure=quick: is not a key of a training job"),
        (["strategy.assigner.defer=false"], "strategy.assigner.defer=false: would change every strategy"),
        (["within=megatron", "strategy=entrain"], "strategy=entrain: Megatron-LM runs none of these"),
        (["workload=trace", "workload.path=none.parquet"], "workload.path=none.parquet: "),
        (["results_dir=taken/by", "strategy=megatron"], "results_dir=taken/by: must be a writable folder, but "),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, *arguments, code=2)
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith(f"entrain-bench: {says}")


@pytest.mark.wide
def test_posterior_draws_of_the_best_give_a_probability(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = {draw: Speed(gemm=1 - draw / 20, node=1 + draw / 10) for draw in range(1, NUM_DRAWS + 1)}
    (tmp_path / "posterior.csv").write_text(draws_text({"A40": draws}))
    monkeypatch.setattr(constants, "config_tree", lambda: tmp_path)
    read_draws.cache_clear()
    job = [*TINY, "strategy=megatron,bridge_reorder"]
    out = " ".join(said(capsys, *job)[0].split())
    found = re.search(r"Over 6 posterior draws of the hardware constants, (\w+) has P\(fastest\) [01]\.\d\d", out)
    assert found
    assert f"Run strategy={found.group(1)}: " in out
    drawn = [record for record in Results(tmp_path / "results" / "judged").records() if record.config["constants"]]
    assert len(drawn) == 2 * NUM_DRAWS
    # Each draw has a fresh seed of its own, and both strategies ran at it.
    assert {(r.config["constants"], r.config["seed"]) for r in drawn} == {(draw, 8 + draw) for draw in draws}
    assert {r.config["action_noise"] for r in drawn} == {0.02}
    # Nothing of it without time, without draws, or where the user chose a draw.
    read_draws.cache_clear()
    for more in (["seconds=0.001"], ["constants=1"]):
        assert "P(fastest)" not in said(capsys, *job, *more)[0]
    (tmp_path / "posterior.csv").unlink()
    read_draws.cache_clear()
    assert "P(fastest)" not in said(capsys, *job)[0]
