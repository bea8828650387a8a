"""Stages built with their first weights, and their parameters by layout-independent names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import check_tensor_parallel
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.modules.grids import check_windows
from entrain_bench.train.modules.kernels import Kernels, find_kernels
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.positions import on_grid
from entrain_bench.train.modules.stage import Stage

_WEIGHT_STD = 0.02  # GPT-2's, and megatron-core's default init_method_std


def build_stage(
    model: ModelSpec,
    module: ModuleSpec,
    layers: range,
    groups: StageGroups,
    *,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    recompute: bool,
    logit_chunk_tokens: int = 0,
    kernels: Kernels | None = None,
) -> Stage:
    """Build and initialise a stage; call ``prepare_platform`` before.

    ``layers`` are indices into the module's: the embedding, the blocks, the head. Weights follow from the seed, not
    from the layout. With ``recompute`` each block keeps its input only. ``logit_chunk_tokens`` logits exist at a time;
    0: all.

    Raises:
        IncompatibleError: for an architecture that cannot be built.
        UserError: if tensor parallelism does not divide a width.
    """
    check_tensor_parallel(module, groups.tp.size())
    config = module.config
    where = f"model.modules.{module.name}"
    llm_size = model.llm.config.hidden_size
    if module.is_encoder and module.layers[-1].gemms[-1].n != llm_size:
        raise IncompatibleError(f"{where}.head_gemms: the last must give the LLM's hidden_size={llm_size}")
    if on_grid(module):
        check_windows(module)
    unit = 4 if on_grid(module) else 2
    if config.rotary and config.head_dim % unit:
        raise IncompatibleError(f"{where}.head_dim={config.head_dim}: rotary positions need a multiple of {unit}")
    kernels = kernels or find_kernels("auto", [module], dtype, device)
    with torch.device(device):
        stage = Stage(
            module,
            layers,
            groups,
            dtype=dtype,
            recompute=recompute,
            attention=kernels.attention[module.name],
            logit_chunk_tokens=logit_chunk_tokens,
        )
    initialise(stage, seed)
    return stage


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of a stage.

    Attributes:
        key: ``module.layer.parameter``; both copies of a tied embedding have the input embedding's.
        parameter: this rank's shard.
        dim: the dimension that tensor parallelism splits; -1 for none.
        stride: pieces of each shard; pieces of all ranks interleave (2 for gate and up of a gated MLP).
    """

    key: str
    parameter: Parameter
    dim: int
    stride: int
    tp: int
    tp_rank: int

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(size * self.tp if dim == self.dim else size for dim, size in enumerate(self.parameter.shape))

    def shard(self, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor."""
        if self.dim < 0:
            return full
        pieces = full.chunk(self.stride * self.tp, self.dim)[self.tp_rank :: self.tp]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor, from the shards of all tensor parallel ranks in order."""
        if self.dim < 0:
            return shards[0]
        pieces = [shard.chunk(self.stride, self.dim) for shard in shards]
        return torch.cat([piece for row in zip(*pieces, strict=True) for piece in row], self.dim)


def named_parameters(stage: Stage) -> Iterator[NamedParameter]:
    """The parameters of a stage by key."""
    tied = stage.tied_embedding()
    tp = stage.groups.tp.size()
    tp_rank = stage.groups.tp.rank()
    for name, parameter in stage.named_parameters():
        key = "0.words.weight" if parameter is tied else name.removeprefix("layers.")
        # megatron-core marks the parameters that it splits, and they alone have these attributes.
        dim = getattr(parameter, "partition_dim", -1)
        stride = getattr(parameter, "partition_stride", 1)
        yield NamedParameter(f"{stage.module.name}.{key}", parameter, dim, stride, tp, tp_rank)


@torch.no_grad()
def initialise(stage: Stage, seed: int) -> None:
    """Set weights to normal numbers, norms to 1 and biases to 0, whatever the layout.

    Each parameter is drawn in full from a generator seeded by ``(seed, key)``, then sliced. CPUs and GPUs draw
    different numbers.
    """
    for named in named_parameters(stage):
        parameter = named.parameter
        if parameter.dim() == 1:
            parameter.fill_(0.0 if named.key.endswith("bias") else 1.0)
            continue
        digest = hashlib.sha256(f"{seed}/{named.key}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7]))
        full = torch.empty(named.full_shape, device=parameter.device).normal_(0.0, _WEIGHT_STD, generator=generator)
        parameter.copy_(named.shard(full))
