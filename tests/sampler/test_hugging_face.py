"""The sampler in loops of accelerate, transformers and torchdata, where they are installed."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from entrain_bench.base.errors import UserError
from entrain_bench.sampler import BalancedBatchSampler, own_loader
from support.builders import random_samples
from support.train.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "hugging_face_sampler"
SHAPES = random_samples(np.random.default_rng(0), 40)
BATCH, COUNT, EPOCHS = 16, 4, 2
LEARNING_RATE, LENGTH = 0.1, 6


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences that begin with their index; of each, another number of tokens counts."""

    def __len__(self) -> int:
        return len(SHAPES)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.randint(len(SHAPES), (LENGTH - 1,), generator=torch.Generator().manual_seed(index))
        ids = torch.cat([torch.tensor([index]), drawn])
        return {"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < 2 + index % 5, ids, -100)}


class Small(nn.Module):
    """Returns the loss of every sample, and notes which samples it has seen; fails on a call where that is asked."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.fails_at = fails_at
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(len(SHAPES), 8), nn.Linear(8, len(SHAPES))
        self.seen: list[list[int]] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if len(self.seen) == self.fails_at:
            raise KeyboardInterrupt
        ids = batch["input_ids"]
        self.seen.append(ids[:, 0].tolist())
        return functional.cross_entropy(self.head(self.embedding(ids[:, 0])), ids[:, 1], reduction="none")


def sampler(rank: int | None = 0, **more: Any) -> BalancedBatchSampler:
    given = {"strategy": "entrain", "model": "tiny", "cluster": "tiny", "rank": rank, "world_size": 2} | more
    return BalancedBatchSampler(SHAPES, global_batch=BATCH, microbatch_size=2, **given)


def stacked(indices: Sequence[int]) -> dict[str, Tensor]:
    rows = [Tokens()[index] for index in indices]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def global_batches() -> list[list[int]]:
    """Samples of every iteration of all epochs, both ranks."""
    one = sampler()
    ranks = [one.microbatches(i, epoch, rank) for epoch in range(EPOCHS) for i in range(2) for rank in (0, 1)]
    return [[index for rows in ranks[i : i + 2] for row in rows for index in row] for i in range(0, len(ranks), 2)]


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: weight.detach().numpy().copy() for name, weight in model.named_parameters()}


def error(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def join(rank: int) -> None:
    """The environment that torchrun gives to processes."""
    sys.path.insert(0, str(FOLDER))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_loader_goes_on_where_it_was(num_workers: int) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return loaders.StatefulDataLoader(Tokens(), batch_sampler=sampler(), num_workers=num_workers)

    whole = [batch["input_ids"].tolist() for batch in loader()]
    first = loader()
    taken = [batch["input_ids"].tolist() for batch in islice(first, 3)]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert taken + [batch["input_ids"].tolist() for batch in second] == whole


def with_accelerate(rank: int, folder: str) -> dict[str, Any]:
    join(rank)
    from accelerate import Accelerator
    from with_accelerate import train

    found: dict[str, Any] = {}
    # All; until the middle of the second iteration; and on from the checkpoint behind the first.
    for name, fails_at in (("whole", -1), ("first", COUNT + 2), ("rest", -1)):
        one, model = sampler(None, world_size=None), Small(fails_at)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=COUNT)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        where = f"{folder}/{name == 'whole'}"
        with suppress(KeyboardInterrupt):
            train(model, optimizer, Tokens(), one, accelerator, EPOCHS, where, where if name == "rest" else None)
        found[name] = model.seen, weights_of(model)
    prepared = accelerator.prepare(DataLoader(Tokens(), batch_sampler=sampler(None, world_size=None)))
    found["prepared"] = [batch["input_ids"][:, 0].tolist() for batch in prepared]
    return found


@pytest.mark.wide
def test_accelerate_trains_as_one_process_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for indices in global_batches():
        optimizer.zero_grad()
        model(stacked(indices)).mean().backward()
        optimizer.step()
    ranks = run_ranks(with_accelerate, 2, str(tmp_path), stay=False)
    for rank, found in enumerate(ranks):
        one = sampler(rank)
        wanted = [*one, *one]
        (seen, trained), (first, _), (rest, resumed) = found["whole"], found["first"], found["rest"]
        assert seen == wanted
        assert first == wanted[: COUNT + 2]
        assert rest == wanted[COUNT:]
        assert error(trained, weights_of(model)) < 1e-6
        assert error(resumed, trained) == 0
        # What own_loader is for: prepared, half of the microbatches would be lost.
        assert len(found["prepared"]) == len(wanted) // EPOCHS // 2


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": len(SHAPES), "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1))


def noted(seen: list[list[int]], _model: nn.Module, _args: object, given: dict[str, Tensor]) -> None:
    seen.append(given["input_ids"][:, 0].tolist())


def with_trainer(rank: int, folder: str) -> dict[str, Any]:
    join(rank)
    from transformers import TrainingArguments
    from with_trainer import BalancedTrainer

    found: dict[str, Any] = {}
    # All; on from the end of the first epoch, and from behind the first iteration of the second.
    for name, resume in (("whole", None), ("boundary", "checkpoint-2"), ("within", "checkpoint-3")):
        model = llama()
        seen: list[list[int]] = []
        model.register_forward_pre_hook(partial(noted, seen), with_kwargs=True)
        first = weights_of(model)
        arguments = TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            save_steps=1,
            gradient_accumulation_steps=COUNT,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        one = sampler(None, world_size=None)
        trainer = BalancedTrainer(sampler=one, model=model, args=arguments, train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=resume and f"{folder}/{resume}")
        found[name] = seen, first, weights_of(model)
    return found


@pytest.mark.slow
def test_a_trainer_trains_as_one_process_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for indices in global_batches():
        optimizer.zero_grad()
        # The mean over tokens that count.
        model(**stacked(indices)).loss.backward()
        optimizer.step()
    for rank, found in enumerate(run_ranks(with_trainer, 2, str(tmp_path), stay=False)):
        one = sampler(rank)
        wanted = [*one, *one]
        seen, first, trained = found["whole"]
        assert seen == wanted
        assert found["boundary"][0] == wanted[2 * COUNT :]
        assert found["within"][0] == wanted[3 * COUNT :]
        assert error(trained, weights_of(model)) < 1e-6 < 1e-3 < error(first, trained)
        assert error(found["boundary"][2], trained) == 0 == error(found["within"][2], trained)


@pytest.mark.parametrize(
    ("batch_sampler", "steps", "message"),
    [
        (sampler(), 3, "gradient_accumulation_steps=3: must be 4, the microbatches of an iteration"),
        (sampler(counts="assigned"), 4, "gradient_accumulation_steps=4: must be None"),
        ([[0], [1]], 1, "gradient_accumulation_steps=1: must be None"),
    ],
)
def test_what_these_loops_cannot_do_is_refused(batch_sampler: Any, steps: int, message: str) -> None:
    pytest.importorskip("accelerate")
    loader = DataLoader(Tokens(), batch_sampler=batch_sampler)
    with pytest.raises(UserError, match=message):
        own_loader(loader, torch.device("cpu"), steps)
