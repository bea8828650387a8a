"""megatron-core on the CPU: redirections are enough for its buffers and optimizers, and others do not see them."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from entrain_bench.train.modules.blocks import transformer_config
from entrain_bench.train.platform import MODULES, prepare_platform
from support.builders import tiny_model
from support.train.ranks import run_ranks


def _redirect_twice(_rank: int) -> None:
    plain = torch.zeros(1).type()
    prepare_platform()
    modules = [importlib.import_module(name) for name in MODULES]
    first = [module.torch for module in modules]
    prepare_platform()
    assert all(module.torch is seen for module, seen in zip(modules, first, strict=True))
    # Everyone else sees torch as it is.
    assert plain == torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64


def _step(rank: int, half: bool, distributed: bool) -> None:
    """One clipped step of Adam on two replicas, against the formula."""
    prepare_platform()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    groups = ProcessGroupCollection()
    for name in ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt"):
        setattr(groups, name, dist.group.WORLD)
    for name in ("tp", "pp", "mp", "ep", "expt_dp", "intra_expt_dp", "tp_ep_pp"):
        setattr(groups, name, alone)
    dtype = torch.bfloat16 if half else torch.float32
    layer = torch.nn.Linear(5, 3, bias=False, dtype=dtype)
    before = torch.linspace(-1, 1, 15).view(3, 5).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(before)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed
    )
    config = transformer_config(tiny_model().llm, 1, dtype)
    replica = DistributedDataParallel(config, settings, layer, pg_collection=groups)
    rate, clip = 0.5, 0.75
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            adam_eps=1.0,
            lr=rate,
            min_lr=rate,
            weight_decay=0.0,
            clip_grad=clip,
            bf16=half,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        ),
        [replica],
        use_gloo_process_groups=False,
        pg_collection=groups,
    )
    inputs = [torch.arange(5.0) - other for other in range(2)]
    replica(inputs[rank].to(dtype)).sum().backward()
    replica.finish_grad_sync()
    worked, norm, _ = optimizer.step()
    gradient = (sum(inputs) / 2).expand(3, 5)
    expected_norm = float(torch.linalg.vector_norm(gradient))
    clipped = gradient * clip / expected_norm
    # Adam's first step: its averages are the gradient and its square.
    after = before.float() - rate * clipped / (clipped.abs() + 1.0)
    assert worked
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    torch.testing.assert_close(layer.weight.detach(), after.to(dtype), rtol=1e-5, atol=1e-5)


class _OtherAdam(torch.optim.SGD):
    """Another package's, which counts its steps elsewhere."""


def _check_platform(rank: int) -> None:
    optimizers = importlib.import_module("megatron.core.optimizer")
    shards = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam = False, _OtherAdam  # type: ignore[attr-defined]
    shards.USING_TE_OPTIMIZER, shards.Adam = True, _OtherAdam  # type: ignore[attr-defined]
    _redirect_twice(rank)
    assert not shards.USING_TE_OPTIMIZER
    for half in (False, True):
        for distributed in (False, True):
            _step(rank, half, distributed)


def test_buffers_and_optimizers_run_on_the_cpu() -> None:
    # Its changes to megatron-core end with the processes.
    run_ranks(_check_platform, 2, stay=False)
