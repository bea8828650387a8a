"""The example's loop: DDP over the sampler's microbatches gives the gradients of one process over the same samples."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from entrain_bench.sampler import BalancedBatchSampler
from entrain_bench.specs.shapes import SampleShapes
from support.builders import samples
from support.train.ranks import run_ranks

pytestmark = pytest.mark.wide

FOLDER = Path(__file__).parents[2] / "examples" / "ddp_sampler"
BATCH, ITERATIONS = 8, 2


def shapes() -> SampleShapes:
    """Lengths that vary widely; some samples without an image, whose rank's encoder then has nothing to do."""
    rng = np.random.default_rng(0)
    rows = [(int(rng.integers(4, 80)), [4 * int(rng.integers(1, 40))] * int(rng.integers(0, 3))) for _ in range(24)]
    return samples(*rows)


def gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: weight.grad.numpy().copy() for name, weight in model.named_parameters() if weight.grad is not None}


def train(rank: int, strategy: str, counts: str, dropped: int) -> list[Any]:
    """Gradients of every iteration, and the samples that the rank trained on."""
    sys.path.insert(0, str(FOLDER))
    from small_vlm import RandomContent, SmallVlm
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from train import train_iteration

    torch.set_num_threads(1)
    one = BalancedBatchSampler(
        shapes(),
        strategy=strategy,
        model="small_vlm",
        cluster="hostx2",
        global_batch=BATCH,
        microbatch_size=2,
        counts=counts,
        config_dir=str(FOLDER),
    )
    assert (one.rank, one.world_size) == (rank, 2)
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallVlm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = iter(DataLoader(RandomContent(shapes()), batch_sampler=one, collate_fn=list))
    found = []
    for iteration in range(ITERATIONS):
        rows = one.microbatches(iteration, epoch=0)
        microbatches = [next(batches) for _ in rows]
        if rank == 0:
            microbatches[0] = microbatches[0][dropped:]
        train_iteration(model, optimizer, microbatches, one.world_size / BATCH)
        found.append((gradients(model.module), [index for row in rows for index in row]))
    return found


def reference(indices: list[int]) -> dict[str, np.ndarray]:
    """Gradients of the mean loss over samples, each by itself."""
    from small_vlm import RandomContent, SmallVlm

    torch.manual_seed(0)
    model, content = SmallVlm(), RandomContent(shapes())
    for index in sorted(indices):
        (model([content[index]]).sum() / len(indices)).backward()
    return gradients(model)


def error(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Largest difference of two gradients, relative to the largest entry of the weight's."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[n] - other[n]).max() / max(np.abs(other[n]).max(), 1e-6)) for n in one)


CASES = {"fixed": ("entrain", "fixed", 0), "assigned": ("token_budget", "assigned", 0), "lost": ("entrain", "fixed", 1)}


def train_all(rank: int) -> dict[str, list[Any]]:
    return {name: train(rank, *case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def trained() -> Iterator[list[dict[str, list[Any]]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield run_ranks(train_all, 2)


@pytest.mark.parametrize("case", ["fixed", "assigned"])
def test_gradients_equal_those_of_one_process(case: str, trained: list[dict[str, list[Any]]]) -> None:
    for (mine, own), (theirs, others) in zip(trained[0][case], trained[1][case], strict=True):
        assert len(own) + len(others) == BATCH
        wanted = reference([*own, *others])
        assert error(mine, wanted) < 1e-4
        assert error(theirs, wanted) < 1e-4


def test_a_lost_sample_is_noticed(trained: list[dict[str, list[Any]]]) -> None:
    (mine, own), (_, others) = trained[0]["lost"][0], trained[1]["lost"][0]
    assert error(mine, reference([*own, *others])) > 1e-2
