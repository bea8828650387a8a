"""megatron-core on the CPU: the call sites that are redirected, and that the redirections are enough."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

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

REDIRECTED = {"torch.cuda.current_device", "torch.cuda.current_stream"}

# Where megatron-core 0.19.2 names CUDA in the redirected modules, by function. A release that moves one needs a look
# at ``platform.py``. Sites that the training runtime does not reach are listed all the same.
SITES = {
    "tensor_parallel.layers": {
        "__init__: torch.cuda.current_device",
        "backward: torch.cuda.current_device",
    },
    "tensor_parallel.mappings": {
        "_gather_along_first_dim: torch.cuda.current_device",
        "_gather_along_last_dim: torch.cuda.current_device",
        "_reduce_scatter_along_first_dim: torch.cuda.current_device",
        "forward: torch.cuda.current_device",
    },
    "distributed.param_and_grad_buffer": {
        "__init__: torch.cuda.current_device",
        "__init__: torch.zeros on cuda",
        "finish_grad_sync: torch.cuda.current_stream",
        "start_grad_sync: torch.cuda.current_stream",
    },
    "optimizer.optimizer": {
        "__init__: param.type()",
        "__init__: torch.tensor on cuda",
        "get_loss_scale: torch.cuda.current_device",
        "has_grad_norm_group: torch.tensor on cuda",
    },
    "optimizer.distrib_optimizer": {
        "__init__: param.type()",
        "_build_model_and_main_param_groups: model_param.type()",
        "get_parameter_state_dp_zero: torch.cuda.current_device",
        "load_state_dict: torch.cuda.current_device",
    },
    "optimizer.clip_grads": {
        "clip_grad_by_total_norm_fp32: param.grad.type()",
        "clip_grad_by_total_norm_fp32: torch.zeros on cuda",
        "count_zeros_fp32: torch.zeros on cuda",
        "get_grad_norm_fp32: torch.tensor on cuda",
        "get_grad_norm_fp32: torch.zeros on cuda",
    },
    "utils": {
        "_broadcast_cu_seqlens: torch.cuda.current_device",
        "configure: torch.cuda.current_device",
        "get_batch_on_this_tp_rank: torch.cuda.current_device",
        "get_tensor: torch.cuda.current_device",
        "local_multi_tensor_l2_norm: torch.tensor on cuda",
    },
}


def test_the_redirected_modules_are_listed() -> None:
    assert {f"megatron.core.{name}" for name in SITES} == set(MODULES)


@pytest.mark.wide
@pytest.mark.parametrize("name", SITES)
def test_megatron_names_cuda_where_expected(name: str) -> None:
    module = importlib.import_module(f"megatron.core.{name}")
    assert hasattr(module, "torch")
    source = Path(str(module.__file__)).read_text()
    assert set(cuda_sites(ast.parse(source), "")) == SITES[name]


def cuda_sites(node: ast.AST, function: str) -> Iterator[str]:
    """``function: what`` for every redirected name, literal CUDA device and query of a tensor's type."""
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Attribute) and ast.unparse(child) in REDIRECTED:
            yield f"{inside}: {ast.unparse(child)}"
        if isinstance(child, ast.Call):
            if any(k.arg == "device" and "'cuda'" in ast.unparse(k.value) for k in child.keywords):
                yield f"{inside}: {ast.unparse(child.func)} on cuda"
            if ast.unparse(child).endswith(".type()"):
                yield f"{inside}: {ast.unparse(child)}"
        yield from cuda_sites(child, inside)


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
    run_ranks(_check_platform, 2)
