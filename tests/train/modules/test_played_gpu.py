"""Stages never stop the host nor mix devices, on a GPU played by the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.modules import blocks, ends, packing, stage
from entrain_bench.train.modules.blocks import AttentionKernel
from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.packing import Pack, StageGroups, rotary_angles
from entrain_bench.train.modules.stage import Stage
from entrain_bench.train.running.data import Inputs
from support.builders import TOKENS
from support.train.modules import module_config, pass_through
from support.train.played_gpu import GPU, played_gpu


def model_of(**llm_changes: Any) -> ModelSpec:
    """Heads of 80 (rotary on a grid, windows and full attention), 64 (convolutions) and 128 (tied embedding)."""
    modules = {
        "vision": module_config("qwen25vl_vision", llm_width=3072, num_layers=3, full_attention_layers=[1]),
        "audio": module_config("whisper_large_encoder", llm_width=3072, num_layers=2),
        "llm": module_config("llama32_3b", num_layers=2, **llm_changes),
    }
    return ModelSpec.from_config({"name": "m", "modules": modules, "tokens": TOKENS})


MODEL = model_of()
ENCODER_PACK = Pack((4000, 1, 3999, 13), (1000, 1, 1000, 3))
# Pictures of known sizes, and text among them in three dimensions (both halves of a head's 64 pairs of features).
GRIDS = Pack((4000, 16, 96), (1000, 4, 24), grids=((80, 50), (4, 4), (8, 12)))
IN_THREE_DIMENSIONS = model_of(mrope_sections=[16, 24, 24], mrope_frame_step=2)


@contextmanager
def ranks(tp: int, cp: int) -> Iterator[StageGroups]:
    """Groups of the last of ``tp * cp`` ranks, whose collectives send nothing."""
    prepare_platform()
    size = tp * cp
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    try:
        alone, every = dist.new_group([size - 1]), dist.new_group(list(range(size)))
        yield StageGroups(every if tp > 1 else alone, every if cp > 1 else alone, every)
    finally:
        dist.destroy_process_group()


def llm_pack(*, text_only: bool = False) -> Pack:
    ids = torch.arange(8191)
    if not text_only:
        ids[100:700] = -1
        ids[5000:7000] = -1
    return Pack((5000, 3190, 1), (), ids, ids.roll(-1))


def run_stages(
    module: ModuleSpec,
    groups: StageGroups,
    *cuts: int,
    recompute: bool = False,
    text_only: bool = False,
    splits_backward: bool = False,
    kernel: AttentionKernel = AttentionKernel.FLASH2,
    encoder_pack: Pack = ENCODER_PACK,
) -> None:
    """Forward and backward, whole or in two passes, of a module cut into stages."""
    options = {"dtype": torch.bfloat16, "recompute": recompute, "attention": kernel}
    with torch.device(GPU):
        stages = [Stage(module, range(*held), groups, **options) for held in pairwise([0, *cuts, len(module.layers)])]
    pack = encoder_pack if module.is_encoder else llm_pack(text_only=text_only)
    if module.config.mrope_sections:
        pack = replace(pack, positions=torch.arange(3 * sum(pack.lengths)).view(3, -1))
    pack = replace(pack, splits_backward=splits_backward)
    first: Tensor | None = None
    if module.is_encoder:
        first = torch.empty(sum(pack.lengths), input_width(module), device=GPU)
    elif not text_only:
        first = torch.empty(2600, module.config.hidden_size, dtype=torch.bfloat16, device=GPU, requires_grad=True)
    with played_gpu():
        pass_through(stages, first, pack)
    if first is not None and first.requires_grad:
        assert first.grad is not None
    for part in stages:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.dtype is torch.bfloat16


@pytest.mark.wide
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(("recompute", "splits"), [(False, False), (True, False), (True, True)])
def test_stages_never_stop_the_host(tp: int, cp: int, recompute: bool, splits: bool) -> None:
    with ranks(tp, cp) as groups:
        own = replace(groups, sequence_parallel=splits)
        for module in MODEL.modules:
            run_stages(module, own, 2, len(module.layers) - 1, recompute=recompute, splits_backward=splits)


@pytest.mark.wide
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_positions_of_pictures_never_stop_the_host(tp: int, cp: int) -> None:
    with ranks(tp, cp) as groups:
        for name in ("vision", "llm"):
            run_stages(IN_THREE_DIMENSIONS.module(name), groups, 2, encoder_pack=GRIDS)


def test_a_whole_llm_on_text_alone_never_stops_the_host() -> None:
    with ranks(1, 1) as groups:
        run_stages(MODEL.llm, groups, text_only=True)


@pytest.mark.wide
@pytest.mark.parametrize("cp", [1, 2])
def test_attention_by_length_never_stops_the_host(cp: int) -> None:
    with ranks(1, cp) as groups:
        for module in MODEL.modules:
            run_stages(module, groups, kernel=AttentionKernel.SDPA)


def test_features_never_stop_the_host() -> None:
    with played_gpu():
        features = Inputs(ENCODER_PACK, torch.zeros(9, 4)).features_on(GPU)
    assert features is not None
    assert features.is_meta


def left_on_the_cpu(host: Tensor, _: torch.device) -> Tensor:
    return host


def copied_from_pageable_memory(host: Tensor, device: torch.device) -> Tensor:
    return host.to(device, non_blocking=True)


def made_from_a_list(host: Tensor, device: torch.device) -> Tensor:
    return torch.tensor(host.tolist(), device=device)


def counted(query: Tensor, *_: Any, **__: Any) -> Tensor:
    return query[: int((query > 0).sum())]


def chosen_by_mask(positions: Tensor, head_dim: int) -> Tensor:
    return rotary_angles(positions[positions >= 0], head_dim)


def scattered_by_mask(hidden: Tensor, _: int, rows: Tensor, values: Tensor) -> Tensor:
    mask = torch.zeros(len(hidden), 1, dtype=torch.bool, device=hidden.device).index_fill(0, rows, True)
    return hidden.masked_scatter(mask, values)


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "fault", "message"),
    [
        ("llm", ends, "to_device", left_on_the_cpu, "CPU and GPU"),
        ("llm", packing, "to_device", left_on_the_cpu, "CPU and GPU"),
        ("llm", ends, "to_device", copied_from_pageable_memory, "waits for it"),
        ("llm", ends, "to_device", made_from_a_list, "numbers of the host"),
        ("llm", blocks, "packed_attention", counted, "item"),
        ("llm", stage, "rotary_angles", chosen_by_mask, "nonzero"),
        ("llm", Tensor, "index_copy", scattered_by_mask, "masked_scatter_backward"),
    ],
)
def test_planted_stops_show(name: str, owner: Any, attribute: str, fault: Callable[..., Tensor], message: str) -> None:
    with (
        ranks(1, 1) as groups,
        mock.patch.object(owner, attribute, fault),
        pytest.raises(RuntimeError, match=message),
    ):
        run_stages(MODEL.module(name), groups)
