"""The sampler in loops of accelerate, transformers and torchdata, where they are installed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from entrain_bench.sampler import BalancedBatchSampler
from support.builders import random_samples

SHAPES = random_samples(np.random.default_rng(0), 40)
COUNT = 4


class Indices(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(SHAPES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index)}


def sampler(**more: Any) -> BalancedBatchSampler:
    given = {"strategy": "entrain", "model": "tiny", "cluster": "tiny", "rank": 0, "world_size": 2} | more
    return BalancedBatchSampler(SHAPES, global_batch=16, microbatch_size=2, **given)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_loader_goes_on_where_it_was(num_workers: int) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return loaders.StatefulDataLoader(Indices(), batch_sampler=sampler(), num_workers=num_workers)

    whole = [batch["index"].tolist() for batch in loader()]
    first = loader()
    taken = [batch["index"].tolist() for batch in islice(first, 3)]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert taken + [batch["index"].tolist() for batch in second] == whole


def test_accelerate_accumulates_over_an_iteration() -> None:
    accelerate = pytest.importorskip("accelerate")
    one = sampler()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=one.num_microbatches)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # The loader is left as it is: accelerate would deal its batches out once more.
    stepped = []
    for batch in DataLoader(Indices(), batch_sampler=one):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["index"].float()[:, None]).sum())
            stepped.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    assert stepped == [False, False, False, True] * one.num_iterations


def test_a_trainer_steps_once_an_iteration_and_resumes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    seen: list[list[int]] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, index: Tensor) -> dict[str, Tensor]:
            seen.append(index.tolist())
            return {"loss": self.weight * index.float().mean()}

    class Balanced(transformers.Trainer):  # type: ignore[misc,name-defined]
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_sampler=self.balanced)

    def train(max_steps: int, resume: str | None) -> Any:
        one = sampler()
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=max_steps,
            save_steps=3,
            gradient_accumulation_steps=one.num_microbatches,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Balanced(Model(), arguments, train_dataset=Indices())
        trainer.balanced = one
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step

    one = sampler()
    wanted = [*one, *one]
    assert len(wanted) == 4 * COUNT
    assert train(4, resume=None) == 4
    assert seen == wanted
    seen.clear()
    # Behind the first iteration of the second epoch.
    assert train(4, resume=str(tmp_path / "checkpoint-3")) == 4
    assert seen == wanted[3 * COUNT :]
