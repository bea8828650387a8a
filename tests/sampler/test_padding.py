"""Padded loops: what microbatches cost there, how they are balanced, and what the sampler says and streams."""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import UserError
from entrain_bench.sampler import BalancedBatchSampler, BalancedStream
from entrain_bench.sampler.padding import LONGEST, NONE, deal_padded, seconds_of
from entrain_bench.specs.shapes import SampleShapes
from support.builders import samples
from support.train.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "ddp_sampler"
BATCH = 8


def test_a_padded_microbatch_costs_samples_times_the_longest() -> None:
    encoder_s, llm_s = np.array([1.0, 0.0, 2.0]), np.array([3.0, 5.0, 1.0])
    assert seconds_of([(0, 1), (2,)], encoder_s, llm_s, NONE) == (1 + 0 + 3 + 5) + (2 + 1)
    assert seconds_of([(0, 1), (2,)], encoder_s, llm_s, LONGEST) == (1 + 0 + 2 * 5) + (2 + 1)


def best_s(llm_s: np.ndarray, ranks: int, count: int) -> float:
    """The shortest possible iteration, by trying all assignments."""
    zeros, best = np.zeros(len(llm_s)), np.inf
    for labels in itertools.product(range(ranks * count), repeat=len(llm_s)):
        rows = [[i for i, label in enumerate(labels) if label == group] for group in range(ranks * count)]
        if all(rows):
            own = [seconds_of(rows[rank * count : (rank + 1) * count], zeros, llm_s, LONGEST) for rank in range(ranks)]
            best = min(best, max(own))
    return best


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=4, max_size=6))
def test_the_deal_is_near_the_best_of_all(lengths: list[int]) -> None:
    llm_s = np.array(lengths, float)
    dealt = deal_padded(np.zeros(len(lengths)), llm_s, 2, 1)
    own = max(seconds_of(rows, np.zeros(len(lengths)), llm_s, LONGEST) for rows in dealt)
    assert own <= 1.25 * best_s(llm_s, 2, 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 50), min_size=6, max_size=24), st.integers(1, 3), st.integers(1, 2))
def test_every_sample_is_dealt_once_and_no_microbatch_is_empty(llm: list[float], ranks: int, count: int) -> None:
    dealt = deal_padded(np.ones(len(llm)), np.array(llm), ranks, count)
    assert [len(rows) for rows in dealt] == [count] * ranks
    assert all(row for rows in dealt for row in rows)
    assert sorted(sample for rows in dealt for row in rows for sample in row) == [*range(len(llm))]


def uneven() -> SampleShapes:
    rng = np.random.default_rng(1)
    return samples(*[(int(rng.integers(4, 30)), [4 * int(rng.integers(1, 200))]) for _ in range(32)])


def sampler(strategy: str | None, padding: str, rank: int = 0, **options: Any) -> BalancedBatchSampler:
    return BalancedBatchSampler(
        uneven(),
        **{"model": "small_vlm", "cluster": "hostx2", "global_batch": BATCH, "microbatch_size": 2} | options,
        strategy=strategy,
        padding=padding,
        rank=rank,
        world_size=2,
        config_dir=str(FOLDER),
    )


def test_the_default_balances_what_the_loop_pays() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = sampler(None, LONGEST)
    packed = sampler(None, NONE)
    assert best._plan.setting.strategy.name == packed._plan.setting.strategy.name == "lpt"
    padded_s = [best.believed_s(i).max() for i in range(best.num_iterations)]
    zeros_padded = [
        best._plan.ranks_s(packed._deal(0, i), best._plan.shapes.take(best._samples(0)[i])).max()
        for i in range(best.num_iterations)
    ]
    assert sum(padded_s) < 0.95 * sum(zeros_padded)


def test_a_strategy_that_gains_nothing_is_named_and_a_bad_padding_refused() -> None:
    with pytest.warns(UserWarning, match=r"strategy=megatron: its estimated speedup over arrival order is 1.00x"):
        sampler("megatron", LONGEST)
    with pytest.raises(UserError, match=r"padding=half: unknown|padding=half"):
        sampler(None, "half")
    with pytest.raises(UserError, match=r"^counts, layout=assigned, data_parallel: must be fixed, data_parallel"):
        sampler(None, LONGEST, counts="assigned")


def test_a_stream_deals_every_buffer_once_over_ranks_and_resumes() -> None:
    shapes = uneven()

    def size(index: int) -> tuple[int, list[tuple[str, int, int]]]:
        item = int(shapes.item_offsets[index])
        return int(shapes.text_tokens[index]), [
            ("image", int(shapes.item_encoder_tokens[item]), int(shapes.item_llm_tokens[item]))
        ]

    def stream(rank: int, start: int = 0) -> list[list[int]]:
        made = BalancedStream(
            (index for index in range(30)),
            size,
            model="small_vlm",
            cluster="hostx2",
            global_batch=BATCH,
            microbatch_size=2,
            padding=LONGEST,
            rank=rank,
            world_size=2,
            config_dir=str(FOLDER),
        )
        made.start = start
        return [*torch.utils.data.DataLoader(made, batch_size=None)]

    both = [stream(rank) for rank in range(2)]
    assert [len(rows) for rows in both] == [3 * 2, 3 * 2]
    for iteration in range(3):
        found = [sample for rows in both for row in rows[2 * iteration : 2 * iteration + 2] for sample in row]
        assert sorted(found) == [*range(BATCH * iteration, BATCH * (iteration + 1))]
    assert stream(1, start=2) == both[1][4:]


def padded_gradients(_: int, strategy: str | None) -> dict[str, np.ndarray]:
    sys.path.insert(0, str(FOLDER))
    from small_vlm import RandomContent, SmallVlm
    from torch.nn.parallel import DistributedDataParallel
    from train import train_iteration

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallVlm(padded=True).double())
    one = sampler(strategy, LONGEST, rank=torch.distributed.get_rank())
    content = RandomContent(uneven())
    batches = [[content[index] for index in row] for row in one.microbatches(0, epoch=0)]
    for batch in batches:
        for sample in batch:
            object.__setattr__(sample, "images", tuple(image.double() for image in sample.images))
    train_iteration(model, torch.optim.SGD(model.parameters(), lr=0.0), batches, 2 / BATCH)
    return {name: weight.grad.numpy().copy() for name, weight in model.module.named_parameters()}


@pytest.mark.wide
def test_a_padded_ddp_loop_has_the_gradients_of_arrival_order() -> None:
    balanced, *_ = run_ranks(padded_gradients, 2, None)
    arrival, *_ = run_ranks(padded_gradients, 2, "megatron")
    for name, gradient in balanced.items():
        np.testing.assert_allclose(gradient, arrival[name], atol=1e-6, err_msg=name)
        assert np.abs(gradient).max() > 1e-6
