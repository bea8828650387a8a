"""Bytes that layers keep for backward: counted on a stage of one layer, and as predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrain_bench.costs.memory import Memory
from entrain_bench.specs.framework import Framework
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.modules import Pack, StageGroups, build_stage, input_width
from entrain_bench.train.modules.ends import merge_tokens
from support.builders import TOKENS, placed
from support.train.allocations import allocated, num_bytes, saved_bytes
from support.train.modules import CPU, module_config

LENGTHS = (96, 40, 120, 64, 40, 24)


def input_of(module: ModuleSpec, layer: int, groups: StageGroups, dtype: torch.dtype) -> tuple[Tensor | None, Pack]:
    """Input and pack of a stage that begins with the given layer."""
    tokens, rng = sum(LENGTHS), np.random.default_rng(0)
    if module.is_encoder:
        pack = Pack(LENGTHS, tuple(length // merge_tokens(module) for length in LENGTHS))
    else:
        ids = torch.from_numpy(rng.integers(module.config.vocab_size, size=tokens))
        pack = Pack(LENGTHS, (), ids, ids.roll(-1))
    if layer:
        own = tokens // groups.cp.size() // (groups.tp.size() if groups.splits_tokens else 1)
        return torch.randn(own, module.config.hidden_size, dtype=dtype, requires_grad=True), pack
    return (torch.randn(tokens, input_width(module)).to(dtype) if module.is_encoder else None), pack


def wide_model() -> ModelSpec:
    """The tiny modules with two blocks each, whose hidden states are wide: what is kept besides is little."""
    vision = {"num_layers": 2, "window_tokens": 8, "full_attention_layers": [1]}
    gemms = [{"k": 1024, "n": 256, "rows_per_token": 0.25}, {"k": 256, "n": 256, "rows_per_token": 0.25}]
    wide = {"hidden_size": 256, "ffn_hidden_size": 512}
    modules = {
        "vision": module_config(
            "tiny_vision", 256, **vision, **wide, embed_gemms=[{"k": 1176, "n": 256}], head_gemms=gemms
        ),
        "audio": module_config(
            "tiny_audio",
            256,
            num_layers=2,
            **wide,
            embed_gemms=[{"k": 384, "n": 256, "rows_per_token": 2.0}, {"k": 768, "n": 256}],
            head_gemms=[{"k": 256, "n": 256, "rows_per_token": 0.5}],
        ),
        "llm": module_config("tiny_llm", num_layers=2, tied_embeddings=False, **wide),
    }
    return ModelSpec.from_config({"name": "wide", "modules": modules, "tokens": TOKENS})


def kept_and_predicted(
    model: ModelSpec, module: ModuleSpec, layer: int, groups: StageGroups, dtype: torch.dtype, recompute: bool
) -> dict[str, tuple[float, float]]:
    """Bytes a layer keeps, its input and its output included, and its peaks: counted, and predicted."""
    held = range(layer, layer + 1)
    stage = build_stage(model, module, held, groups, dtype=dtype, seed=0, device=CPU, recompute=recompute)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def forward() -> Any:
        return stage(hidden, pack)

    def forward_and_backward() -> None:
        output = forward()
        output.backward(torch.ones_like(output))

    tp, cp = groups.tp.size(), groups.cp.size()

    # Buffers that stay are there after the first time.
    hidden, pack = input_of(module, layer, groups, dtype)
    forward_and_backward()
    before = num_bytes(hidden)
    saved = before + saved_bytes(forward, hidden, *stage.parameters())
    ahead, both = allocated(forward), allocated(forward_and_backward)
    handed = num_bytes(ahead.result)
    place = placed(module, np.arange(tp * cp).reshape(1, 1, -1), tp=tp, cp=cp, recompute=recompute)
    memory = Memory(model, Framework(sequence_parallel=groups.sequence_parallel), dtype.itemsize)
    kind = module.layer_kind[layer]
    kept, working = (float(values[kind]) * sum(LENGTHS) for values in memory.layer_bytes(module, place))
    return {
        "saved": (saved, kept + handed),
        "kept": (before + ahead.left_bytes, kept + handed),
        "forward": (before + ahead.peak_bytes, kept + handed + working),
        "backward": (before + both.peak_bytes, kept + handed + working),
    }
