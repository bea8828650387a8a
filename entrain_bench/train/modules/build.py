"""Stages built, checked and with their first weights."""

from __future__ import annotations

import torch

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import check_tensor_parallel
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.modules.grids import check_windows
from entrain_bench.train.modules.kernels import Kernels, find_kernels
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.parameters import initialise
from entrain_bench.train.modules.positions import on_grid
from entrain_bench.train.modules.stage import Stage


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
    loss_chunk_tokens: int = 0,
    kernels: Kernels | None = None,
) -> Stage:
    """Build and initialise a stage; call ``prepare_platform`` before.

    ``layers`` are indices into the module's: the embedding, the blocks, the head. Weights follow from the seed, not
    from the layout. With ``recompute`` each block keeps its input only. ``loss_chunk_tokens`` logits exist at a time;
    0: all.

    Raises:
        IncompatibleError: for an architecture that cannot be built.
        UserError: if tensor parallelism does not divide a width.
    """
    _check(model, module, groups.tp.size())
    kernels = kernels or find_kernels("auto", [module], dtype, device)
    with torch.device(device):
        stage = Stage(
            module,
            layers,
            groups,
            dtype=dtype,
            recompute=recompute,
            attention=kernels.attention[module.name],
            loss_chunk_tokens=loss_chunk_tokens,
        )
    initialise(stage, seed)
    return stage


def _check(model: ModelSpec, module: ModuleSpec, tp: int) -> None:
    check_tensor_parallel(module, tp)
    config, where = module.config, f"model.modules.{module.name}"
    llm_size = model.llm.config.hidden_size
    if module.is_encoder and module.layers[-1].gemms[-1].n != llm_size:
        raise IncompatibleError(f"{where}.head_gemms: the last must give the LLM's hidden_size={llm_size}")
    if on_grid(module):
        check_windows(module)
    unit = 4 if on_grid(module) else 2
    if config.rotary and config.head_dim % unit:
        raise IncompatibleError(f"{where}.head_dim={config.head_dim}: rotary positions need a multiple of {unit}")
