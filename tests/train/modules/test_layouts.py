"""Stages against themselves under tensor and context parallelism, on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.specs.framework import PACK, SAMPLE
from entrain_bench.specs.model import SELECTIVE, ModuleSpec
from entrain_bench.train.modules import NamedParameter, StageGroups, attention
from entrain_bench.train.modules import split as splitting
from entrain_bench.train.platform import prepare_platform
from support.train import modules
from support.train.modules import Grads, differences, run_module, small_model
from support.train.ranks import run_ranks

FAULTS = ("gated slice", "key gradients", "norm gradients", "tokens of one rank")
LAYOUTS = [(2, 1, ()), (1, 2, ()), (2, 2, (1, 3))]


def groups_by_degrees() -> dict[tuple[int, int], StageGroups]:
    """Groups of four ranks by (tp, cp), TP innermost; ranks beyond tp * cp form further replicas of their own."""
    rank = dist.get_rank()
    known = {}
    for ranks in ([0], [1], [2], [3], [0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3]):
        if rank in ranks:
            known[len(ranks), ranks[-1] - ranks[0]] = dist.new_group(ranks)
        else:
            dist.new_group(ranks)
    one, near, far, every = known[1, 0], known[2, 1], known[2, 2], known[4, 3]
    return {
        (1, 1): StageGroups(one, one, one),
        (2, 1): StageGroups(near, one, one),
        (1, 2): StageGroups(one, near, near),
        (2, 2): StageGroups(near, far, far),
        (1, 4): StageGroups(one, every, every),
        (4, 1): StageGroups(every, one, one),
    }


def layout_differences(_rank: int) -> dict[str, list[str]]:
    """What layouts get wrong on this rank, against the module in one stage on one rank; by planted fault."""
    prepare_platform()
    groups = groups_by_degrees()
    model = small_model()
    whole: dict[tuple[str, bool], Grads] = {}

    def compare(
        module: ModuleSpec,
        tp: int,
        cp: int,
        cuts: tuple[int, ...] = (),
        *,
        short: bool = False,
        split: bool = False,
        two_passes: bool = False,
        recompute: bool = False,
        whole_pack: bool = False,
        chunk: int = 0,
    ) -> list[str]:
        key = module.name, short
        if key not in whole:
            whole[key] = run_module(model, module, groups[1, 1], short=short)
        own = replace(groups[tp, cp], sequence_parallel=split, cp_split=PACK if whole_pack else SAMPLE)
        options = {"recompute": recompute, "logit_chunk_tokens": chunk}
        actual = run_module(model, module, own, cuts, short=short, splits_backward=two_passes, **options)
        wrong = differences(actual, whole[key], tolerance=1e-5)
        return [f"{module.name} tp{tp} cp{cp} {cuts} {split} {two_passes}: {line}" for line in wrong]

    found: dict[str, list[str]] = {name: [] for name in ("none", "short", *FAULTS)}
    for module in model.modules:
        for tp, cp, cuts in LAYOUTS:
            found["none"] += compare(module, tp, cp, cuts)
            found["none"] += compare(module, tp, cp, cuts, split=True)
        for tp, cp in ((1, 2), (2, 2), (1, 4)):
            found["none"] += compare(module, tp, cp, split=True, whole_pack=True)
            found["none"] += compare(module, tp, cp, (1, 3), chunk=3, recompute=True)
        for split in (False, True):
            found["none"] += compare(module, 2, 2, (1, 3), split=split, two_passes=True)
        selective = model.with_recomputation(SELECTIVE).module(module.name)
        for split in (False, True):
            found["none"] += compare(selective, 2, 1, split=split, recompute=True)
        # Five tokens on four ranks: the last rank has nothing but padding.
        found["short"] += compare(module, 1, 4, short=True)
        found["short"] += compare(module, 2, 2, short=True, split=True)
        found["short"] += compare(module, 4, 1, short=True, split=True)
    with mock.patch.object(NamedParameter, "shard", _shard_without_stride):
        found["gated slice"] += compare(model.llm, 2, 1)
    with mock.patch.object(modules, "sum_partial_gradients", return_value=None):
        found["norm gradients"] += compare(model.llm, 2, 1, split=True)
    unreduced = partial(_gather_without_reduction, attention.gather_from_sequence_parallel_region)
    with mock.patch.object(attention, "gather_from_sequence_parallel_region", unreduced):
        found["key gradients"] += compare(model.llm, 1, 2)
    with mock.patch.object(splitting, "_gather", _repeat):
        found["tokens of one rank"] += compare(model.llm, 2, 1, split=True, two_passes=True)
    return found


def _shard_without_stride(named: NamedParameter, full: Tensor) -> Tensor:
    return full if named.dim < 0 else full.chunk(named.tp, named.dim)[named.tp_rank]


def _gather_without_reduction(gather: Callable[..., Tensor], rows: Tensor, **options: Any) -> Tensor:
    return gather(rows, **options | {"tensor_parallel_output_grad": False})


def _repeat(rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, None]:
    return torch.cat([rows] * group.size()), None


@pytest.mark.wide
def test_every_layout_equals_one_rank_and_planted_faults_show() -> None:
    for found in run_ranks(layout_differences, 4):
        assert found["none"] == []
        assert found["short"] == []
        assert any("output" in line for line in found["gated slice"])
        assert any("linear_qkv" in line for line in found["key gradients"])
        assert not any("output" in line for line in found["key gradients"])
        assert any("layernorm" in line for line in found["norm gradients"])
        assert not any("linear" in line and "weight" in line for line in found["norm gradients"])
        assert any("linear" in line and "weight" in line for line in found["tokens of one rank"])
        assert not any("norm" in line for line in found["tokens of one rank"])
