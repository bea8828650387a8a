"""Training from published weights: losses and the weights written are those of ``transformers`` with torch's AdamW."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from entrain_bench.run.experiment import prepare
from entrain_bench.train.platform import prepare_platform
from entrain_bench.train.running.data import MadeUp, SampleData
from entrain_bench.train.weights import Checkpoint
from support.train.handover import config_from_json
from support.train.published_tiny import TinyPublished
from support.train.ranks import run_ranks
from support.train.runs import ONE_RANK, batch, configuration, train_here

STEPS = 3
SETTINGS = ("model=tiny", f"iterations={STEPS}", "harness.warmup_iterations=2", "harness.learning_rate_decay=linear")
LAYOUTS = {
    "tp2_pp2": ("strategy=megatron", "layout.tp=2", "layout.pp=2", "layout.dp=1", "layout.recompute=[llm]"),
    "dp2_pp2": ("strategy=megatron", "layout.tp=1", "layout.pp=2", "layout.dp=2", "distributed_optimizer=true"),
    "fsdp": ("strategy=fsdp", "layout.tp=1", "layout.dp=4"),
}


def pictures(path: Path) -> tuple[str, str]:
    """A workload of pictures of known sizes."""
    rng = np.random.default_rng(0)
    sizes = [rng.integers(56, 200, size=(int(count), 2)).tolist() for count in rng.integers(0, 3, size=24)]
    frame = pd.DataFrame(
        {
            "text_tokens": rng.integers(2, 12, size=24),
            "image_widths": [[width for width, _ in each] for each in sizes],
            "image_heights": [[height for _, height in each] for each in sizes],
        }
    )
    frame.to_parquet(path)
    return "workload=trace", f"workload.path={path}"


def reference(config: str, published: TinyPublished) -> list[float]:
    """Losses of the published model, which is trained."""
    setting = prepare(config_from_json(config))
    settings, vision = setting.executor, setting.job.model.module("vision")
    parameters = [*published.vision.parameters(), *published.llm.parameters()]
    adam = torch.optim.AdamW(parameters, lr=0.0, eps=settings.epsilon, weight_decay=0.0, betas=settings.betas)
    losses = []
    for iteration in range(STEPS):
        data = SampleData(batch(setting, iteration), MadeUp(0, 1024))
        adam.zero_grad()
        loss = published.loss(data, vision)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
        adam.param_groups[0]["lr"] = settings.rate_at(iteration, STEPS)
        adam.step()
        losses.append(float(loss.detach()))
    return losses


def worst_error(folder: Path, published: TinyPublished, start: dict[str, torch.Tensor]) -> float:
    """Of the weights written, in units of the largest step that training has taken."""
    checkpoint, tensors = Checkpoint.open(folder), published.tensors()
    assert checkpoint.files.keys() == tensors.keys()
    found = []
    for name, value in tensors.items():
        written = checkpoint.tensor(name)
        moved = float((value - start[name]).abs().max())
        found.append(float((written - value).abs().max()) / max(moved, 1e-6))
    return max(found)


def on_ranks(_: int, config: str) -> list[float]:
    prepare_platform()
    return [row["loss"] for row in train_here(config)]


def check(tmp_path: Path, num_ranks: int, *layout: str) -> None:
    published, given, written = TinyPublished.make(), tmp_path / "given", tmp_path / "written"
    published.save(given)
    start = published.tensors()
    folders = (f"harness.weights={given}", f"harness.save_weights={written}")
    config = configuration(*pictures(tmp_path / "pictures.parquet"), *SETTINGS, *layout, *folders)
    losses = run_ranks(on_ranks, num_ranks, config, stay=False)[0]
    assert losses == pytest.approx(reference(config, published), rel=1e-5)
    assert worst_error(written, published, start) < 1e-2


@pytest.mark.wide
def test_one_rank_trains_as_the_published_model(tmp_path: Path) -> None:
    check(tmp_path, 1, *ONE_RANK)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_train_as_the_published_model(tmp_path: Path, layout: str) -> None:
    check(tmp_path, 4, *LAYOUTS[layout])
