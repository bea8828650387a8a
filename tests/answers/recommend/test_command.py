"""``entrain-bench recommend`` on a tiny job: three answers, their plans, that they are kept, and bad input."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import entrain_bench as eb
from entrain_bench import BalancedBatchSampler, notebook
from entrain_bench.answers.console_table import make_console
from entrain_bench.answers.recommend import strategy_race
from entrain_bench.answers.recommend.recommendation import NUM_DRAWS
from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.commands import recommend
from entrain_bench.config import constants
from entrain_bench.config.compose import compose
from entrain_bench.config.constants import draws_text, read_draws
from entrain_bench.program.layout import layout_to_json
from entrain_bench.program.plan_file import plan_text, read_plan
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import plan_key
from entrain_bench.records.records import Results, new_record
from entrain_bench.records.sealed import CachedLayouts
from entrain_bench.run import cells as cells_module
from entrain_bench.run.cells import Done, compose_cells, run_cells, run_one
from entrain_bench.specs.cluster import Speed
from entrain_bench.specs.shapes import shapes_from_lists

JOB = ["model=tiny", "cluster=tiny", "workload=synthetic", "layout.tp=1", "global_batch=16", "microbatch_size=2"]
FREE = [*JOB[:3], "global_batch=16", "iterations=1", "mlflow=false", "seed=4"]
NULLS = ["layout.tp=null", "layout.cp=null", "layout.dp=null", "microbatch_size=null"]
TINY = [*JOB, "layout.dp=2", "iterations=1", "mlflow=false", "seed=4"]

MINE = """
defaults: [{planner: megatron}, {assigner: token_budget}, {scheduler: megatron}]
name: mine
switch_on: {megatron: [strategy.planner.placement=first_stage, strategy.planner.split=ends]}
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
def test_three_answers_their_plans_and_that_they_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = said(capsys, *FREE, "strategy=megatron,entrain,lpt")
    assert re.search(r"^\[ +\d+\.\d s\] \d+ ways to run tiny on tiny; planning each$", err, re.MULTILINE)
    framework, loop, suite = (
        re.search(rf"^{re.escape(title)}: (.+)\n  [0-9.]+ s per iteration \(95% CI .*\n", out, re.MULTILINE)
        for title in (
            "In a framework, unmodified",
            "Your framework, fed by this suite's sampler",
            "With this suite's runtime (tested on CPUs)",
        )
    )
    assert framework
    assert loop
    assert suite
    assert framework.group(1) == "megatron in Megatron-LM"
    assert loop.group(1) == "lpt in your loop"
    # Four ranks have no room for the encoder's own stage that rules of thumb want.
    assert re.search(r"No result: a layout by rules of thumb: .* cannot be spread", " ".join(out.split()))
    assert "faster than megatron in Megatron-LM" in " ".join(out.split())
    for part in (
        "    --tensor-model-parallel-size 2 ",
        "    # Megatron-LM; the same for within=bridge (Megatron-Bridge)",
        "BalancedBatchSampler.from_plan('mine.parquet', 'results/recommended/tiny-synthetic-tiny-loop.yaml'",
        "    entrain-bench plan=results/recommended/tiny-synthetic-tiny-suite.yaml harness=train",
        "Model error: median 3.7% over 1,118",
        "Times are means over seeds 9 to 20",
        "Layout\n  megatron in Megatron-LM: vision: TP 2, CP 1, PP 1, DP 2",
        "ideal work  ",
        "Lower bound for any layout and schedule",
    ):
        assert part in out
    folder = tmp_path / "results" / "recommended"
    assert (folder / "tiny-synthetic-tiny.txt").read_text().splitlines() == [
        line.rstrip("\n") for line in out.splitlines()
    ]
    plan = read_plan(folder / "tiny-synthetic-tiny-suite.yaml")
    assert (plan.strategy, plan.job.model, plan.job.seed) == (suite.group(1), "tiny", 4)
    # Everything is free unless it is given.
    assert {*plan.job.overrides} == {"iterations=1", "layout.tp=null", "layout.cp=null", "layout.dp=null"}
    assert f"{plan.expected.iteration_time_s:.3f} s per iteration" in suite.group(0)
    # The plan's layout is the one that its runs had, and running the plan takes as long.
    own = compose(f"strategy={plan.strategy}", *FREE, *NULLS)
    cached = CachedLayouts(tmp_path / "results").read(plan_key(own))
    assert cached
    assert layout_to_json(plan.layout) == layout_to_json(cached.layout)
    usual = Results(tmp_path / "results").read(Cell.of([], own).key)
    assert usual
    text = f"plan={folder / 'tiny-synthetic-tiny-suite.yaml'}"
    again = run_one(Cell.of([text], compose(text)), Results(tmp_path / "again"))
    assert again.metrics["iteration_time_s"] == usual.metrics["iteration_time_s"]
    # The expected time is the mean over the fresh seeds of the command, which has nothing left to run.
    judged = Results(tmp_path / "results" / "judged")
    command = next(line for line in out.splitlines() if line.startswith("  entrain-bench --multirun"))
    cells = compose_cells(shlex.split(command)[2:], multirun=True)
    assert [cell.config.seed for cell in cells] == [*range(9, 21)]
    fresh = [record.metrics["iteration_time_s"] for cell in cells if (record := judged.read(cell.key))]
    assert len(fresh) == 12
    assert plan.expected.iteration_time_s == pytest.approx(math.fsum(fresh) / 12, rel=1e-12)
    # The sampler takes the plan of the loop: every sample of an iteration once, over all ranks.
    shapes = shapes_from_lists(["image"], [(20 + index, []) for index in range(16)])
    samplers = [
        BalancedBatchSampler.from_plan(
            shapes, folder / "tiny-synthetic-tiny-loop.yaml", counts="assigned", rank=rank, world_size=4
        )
        for rank in range(4)
    ]
    dealt = [index for one in samplers for batch in one.microbatches(0, 0) for index in batch]
    assert sorted(dealt) == [*range(16)]

    attempt = cells_module.attempt

    def failed_only(cell: Cell, results: Results) -> Done:
        assert cell.config.strategy["name"] == "megatron_rigid", "only the run that failed is left to run"
        return attempt(cell, results)

    monkeypatch.setattr(cells_module, "attempt", failed_only)
    assert said(capsys, *FREE, "strategy=megatron,entrain,lpt")[0] == out
    # Python has the same answer, with types.
    monkeypatch.setattr(notebook, "WIDTH", make_console().width)
    advice = eb.recommend(*FREE, "strategy=megatron,entrain,lpt")
    assert repr(advice).splitlines() == out.splitlines()
    assert advice.framework
    assert advice.framework.name == "megatron in Megatron-LM"
    assert advice.loop
    assert advice.loop.settings[0] == "from entrain_bench import BalancedBatchSampler"
    assert advice.suite
    assert advice.suite.path
    assert plan_text(advice.suite.plan) == advice.suite.path.read_text()
    assert advice.suite.time.mean == plan.expected.iteration_time_s
    # The same answer is the same file; another answer for the job is another file.
    assert len([*folder.iterdir()]) == 4
    (folder / "tiny-synthetic-tiny.txt").write_text("mine\n")
    said(capsys, *FREE, "strategy=megatron,entrain,lpt")
    assert (folder / "tiny-synthetic-tiny.txt").read_text() == "mine\n"
    assert (folder / "tiny-synthetic-tiny-2.txt").read_text().startswith("In a framework")


@pytest.mark.wide
def test_a_strategy_that_fails_at_a_fresh_seed_is_not_recommended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(out: str) -> str:
        (name,) = re.findall(r"^With this suite's runtime \(tested on CPUs\): (\w+)$", out, re.MULTILINE)
        return str(name)

    names = {"dynapipe", "entrain"}
    best = chosen(said(capsys, *FREE, "strategy=dynapipe,entrain")[0])
    (other,) = names - {best}

    def failing(cells: Iterable[Cell], results: Results, *rest: Any) -> Iterator[Done]:
        for cell in cells:
            if (cell.config.strategy["name"], cell.config.seed) == (best, 11):
                record = new_record(cell, "failed", "no memory", settled=True)
                yield Done(cell, results.write(record, None), "", 0.0)
            else:
                yield from run_cells([cell], results, *rest)

    monkeypatch.setattr(strategy_race, "run_cells", failing)
    out, _ = said(capsys, *FREE, "strategy=dynapipe,entrain", "results_dir=again")
    assert chosen(out) == other
    assert f"No result: {best}: at seed 11: no memory" in out


@pytest.mark.wide
def test_within_a_framework_only_what_it_runs_is_considered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"output={tmp_path / 'mine'}"
    (tmp_path / "own" / "strategy").mkdir(parents=True)
    (tmp_path / "own" / "strategy" / "mine.yaml").write_text(MINE)
    mine = ["--config-dir=own", "strategy=megatron,entrain,mine", "layout.recompute=[]", where]
    out, _ = said(capsys, *TINY, "within=megatron", "speed.network=2", *mine)
    # What is given is no assumption.
    assert "estimates off by up to 30%" in out
    assert "bandwidth:" not in out
    assert out.startswith("In a framework, unmodified: megatron in Megatron-LM\n")
    assert "With this suite's runtime (tested on CPUs): nothing that was considered" in out
    assert re.search(r"No result: mine in Megatron-LM: its microbatches have", out)
    assert "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 1" in out
    plan = read_plan(tmp_path / "mine" / "tiny-synthetic-tiny-framework.yaml")
    # What led to the layout is of no use beside it.
    assert not [text for text in plan.options if "planner" in text]
    assert {"encoder_sp=false", "encoder_cp=false"} < {*plan.job.overrides}
    assert [placed.pp for placed in plan.layout.modules] == [1, 2]


@pytest.mark.wide
def test_a_measured_time_is_first_put_beside_the_expected_one(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = said(capsys, *FREE, "strategy=fsdp", "layout.tp=2", "measured_s=9")
    assert re.match(r"As you run it, the model expects [0-9.]+ s per iteration \(95% ", out)
    assert "You measure 9 s" in out
    assert "imbalance does not explain the factor" in " ".join(out.split())
    assert "faster than as you run it" in " ".join(out.split())
    # The layout is that of the user's run; the answer may have another.
    assert "other values than" not in out
    assert "fsdp" in out.partition("In a framework, unmodified: ")[2].partition("\n")[0]


@pytest.mark.wide
def test_without_any_result_the_reason_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, err = said(capsys, *JOB, "layout.dp=8", "mlflow=false", "strategy=megatron,fsdp", code=2)
    assert err.splitlines()[-1].startswith("entrain-bench: no strategy has a result")
    assert not (tmp_path / "results" / "recommended").exists()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["strategy=megatrn"],
            "strategy=megatrn: unknown (did you mean megatron or megatron_rigid?). All: entrain-bench ls strategies",
        ),
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


@pytest.mark.parametrize(
    ("overrides", "keys", "says"),
    [
        ((), {"measured_s": 0.0}, "measured_s=0.0: must be above 0"),
        ((), {"within": "jax"}, "within=jax: unknown"),
        (("harness=train",), {}, "harness=train: must be simulate"),
    ],
)
def test_python_names_bad_input_as_the_command_does(
    overrides: tuple[str, ...], keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        eb.recommend(*overrides, **keys)


@pytest.mark.wide
def test_plans_run_under_posterior_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = {draw: Speed(gemm=1 - draw / 20, node=1 + draw / 10) for draw in range(1, NUM_DRAWS + 1)}
    (tmp_path / "posterior.csv").write_text(draws_text({"A40": draws}))
    monkeypatch.setattr(constants, "config_tree", lambda: tmp_path)
    read_draws.cache_clear()
    job = [*TINY, "strategy=megatron,bridge_reorder"]
    out = " ".join(said(capsys, *job)[0].split())
    assert "faster than a layout by rules of thumb" in out
    assert re.search(r"faster than megatron in Megatron-LM, ahead for \d+% of sampled", out)
    assert "above 0 in at least 95% of 6 draws of the hardware constants" in out
    drawn = [record for record in Results(tmp_path / "results" / "judged").records() if record.config["constants"]]
    # Each draw has a fresh seed of its own, at which every plan ran, unmodified.
    assert {(r.config["constants"], r.config["seed"]) for r in drawn} == {(draw, 8 + draw) for draw in draws}
    assert {r.config["action_noise"] for r in drawn} == {0.02}
    assert all(record.config["strategy"]["planner"].get("path") for record in drawn)
    # Nothing of it without time, without draws, or where the user chose a draw.
    read_draws.cache_clear()
    for more in (["seconds=0.001"], ["constants=1"]):
        assert "of sampled" not in said(capsys, *job, *more)[0]
    (tmp_path / "posterior.csv").unlink()
    read_draws.cache_clear()
    assert "of sampled" not in said(capsys, *job)[0]
