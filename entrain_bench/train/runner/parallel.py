"""Weights that a group of ranks holds together: tensor parallel by transformers' plans, or sharded by FSDP2."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.train.runner.families import Family
from entrain_bench.train.runner.stages import Stage

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# Norms of a part of the heads: each rank has a part of the gradient.
PARTIAL = "replicated_with_grad_allreduce"


def split_weights(family: Family, stage: Stage, group: dist.ProcessGroup, device: str) -> list[str]:
    """Leave this rank its part of an LLM's blocks; returns whole parameters of which ranks have a part of the gradient.

    ``IncompatibleError`` for a plan of other styles, as those of experts.
    """
    plan: dict[str, str] = family.config.get_text_config().base_model_tp_plan or {}
    styles = {name.removeprefix("layers.*."): style for name, style in plan.items() if name.startswith("layers.*.")}
    if other := sorted({*styles.values()} - {*STYLES, PARTIAL}):
        raise IncompatibleError(
            f"layout.tp={group.size()}: the plan of model_type={family.config.model_type} has styles that "
            f"ProgramRunner does not support: {', '.join(other)}. Use layout.tp=1"
        )
    mesh = DeviceMesh.from_group(group, device)
    for block in stage.held_blocks():
        parallelize_module(block, mesh, {name: STYLES[style]() for name, style in styles.items() if style in STYLES})
    partial = tuple(f".{name}." for name, style in styles.items() if style == PARTIAL)
    return [name for name in stage.names if any(part in name for part in partial)]


def shard_weights(
    family: Family, stage: Stage, group: dist.ProcessGroup, device: str, *, regathers: bool
) -> list[FSDPModule]:
    """Leave this rank its part of blocks and words; each pass gathers them, or the first one of an iteration."""
    mesh = DeviceMesh.from_group(group, device)
    units: list[nn.Module] = [*stage.held_blocks()]
    if not stage.is_encoder:
        words, head = family.model.get_input_embeddings(), family.model.get_output_embeddings()
        # A weight of two modules stays whole: neither is the root of the other.
        units += [] if words.weight is head.weight else [words, head]
    parts: list[FSDPModule] = []
    for part in units:
        fully_shard(part, mesh=mesh, reshard_after_forward=regathers)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        part.set_reshard_after_backward(regathers, recurse=False)
        parts.append(part)
    return parts
