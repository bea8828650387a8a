"""The written script trains an unmodified model from a plan file, and a killed run resumes with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

import entrain_bench as eb
from entrain_bench.answers.recommend.script import train_script
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan, plan_text
from entrain_bench.specs.cluster import ClusterSpec
from support.train.hub import conversations, save_config, tiny_model, tiny_processor

RANKS = 2
MOST_LINES = 40
OVERRIDES = ("layout.tp=1", "layout.pp=2", "layout.dp=1", "tuning=own")


def plan_and_script(folder: Path) -> tuple[Path, str]:
    """A plan of two ranks for a tiny model, and its script."""
    save_config("qwen2_5_vl", folder)
    job = PlannedJob(f"hf:{folder}", "synthetic", "2xa40", 4, 2, 0, OVERRIDES)
    config = eb.compose(
        "strategy=megatron",
        f"model={job.model}",
        "workload=synthetic",
        "cluster=2xa40",
        "global_batch=4",
        "microbatch_size=2",
        *OVERRIDES,
    )
    layout = eb.prepare(config).plan()
    path = folder / "plan.yaml"
    plan = TrainingPlan("megatron", (), job, layout, Expected(1.0, 1.0, 1.0, 1))
    path.write_text(plan_text(plan))
    return path, train_script(plan, path, ClusterSpec.from_config(config.cluster))


def test_the_script_is_short_and_uses_public_names_only(tmp_path: Path) -> None:
    _, script = plan_and_script(tmp_path)
    assert len(script.splitlines()) <= MOST_LINES
    assert "torchrun --nproc-per-node 2 THIS_FILE" in script
    names = [line for line in script.splitlines() if line.startswith(("import", "from"))]
    assert [line for line in names if "entrain" in line] == [
        "import entrain_bench",
        "from entrain_bench.train import Chats, ProgramRunner, ranks, resume, save_checkpoint",
    ]


def run(script: Path, data: Path, until: int | None = None) -> list[dict[str, float]]:
    """Lines that the script prints; it is killed after some of them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), script.name, str(data)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, cwd=script.parent, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            if line.startswith('{"iteration"'):
                lines.append(json.loads(line))
            if until is not None and len(lines) == until:
                # The checkpoint of the iteration before is complete.
                os.killpg(process.pid, signal.SIGKILL)
                break
        process.wait()
    assert until is not None or process.returncode == 0
    return lines


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_losses(tmp_path: Path) -> None:
    _, script = plan_and_script(tmp_path)
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    rows = datasets.Dataset.from_list(conversations(30, bad=(3,))).cast_column(
        "images", datasets.List(datasets.Image())
    )
    (tmp_path / "data").mkdir()
    rows.to_parquet(tmp_path / "data" / "rows.parquet")
    script = script.replace('"checkpoints", 100, 1000, 1e-5', '"checkpoints", 1, 6, 1e-3')
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
    whole = run(tmp_path / "whole" / "train.py", tmp_path / "data")
    assert [line["iteration"] for line in whole] == [*range(6)]
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert whole[-1]["skip"] == 1
    before = run(tmp_path / "killed" / "train.py", tmp_path / "data", until=3)
    time.sleep(1)
    after = run(tmp_path / "killed" / "train.py", tmp_path / "data")
    assert before == whole[:3]
    start = after[0]["iteration"]
    assert 2 <= start <= 3
    # Bits, not tolerances; counts begin again.
    kept = ("iteration", "loss", "grad_norm")
    assert [[line[key] for key in kept] for line in after] == [[line[key] for key in kept] for line in whole[start:]]
