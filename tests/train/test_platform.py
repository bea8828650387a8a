"""megatron-core on the CPU: others do not see its redirections."""

from __future__ import annotations

import importlib

import torch

from entrain_bench.train.platform import MODULES, prepare_platform
from support.train.ranks import run_ranks


def _redirect_twice() -> None:
    plain = torch.zeros(1).type()
    prepare_platform()
    modules = [importlib.import_module(name) for name in MODULES]
    first = [module.torch for module in modules]
    prepare_platform()
    assert all(module.torch is seen for module, seen in zip(modules, first, strict=True))
    # Everyone else sees torch as it is.
    assert plain == torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64


class _OtherAdam(torch.optim.SGD):
    """Another package's, which counts its steps elsewhere."""


def _check_platform(_: int) -> None:
    optimizers = importlib.import_module("megatron.core.optimizer")
    shards = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam = False, _OtherAdam  # type: ignore[attr-defined]
    shards.USING_TE_OPTIMIZER, shards.Adam = True, _OtherAdam  # type: ignore[attr-defined]
    _redirect_twice()
    assert not shards.USING_TE_OPTIMIZER


def test_redirections_are_seen_by_megatron_alone() -> None:
    # Its changes to megatron-core end with the processes.
    run_ranks(_check_platform, 1, stay=False)
