"""Layers whose bytes are counted, and their inputs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.packing import Pack, StageGroups, merge_tokens
from support.builders import TOKENS
from support.train.modules import module_config

LENGTHS = (96, 40, 120, 64, 40, 24)


def one_of_each_kind(model: ModelSpec) -> list[tuple[str, int]]:
    """Module and index of a layer of every kind."""
    return [
        (module.name, layer)
        for module in model.modules
        for layer in np.unique(module.layer_kind, return_index=True)[1].tolist()
    ]


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
    vision = {"num_layers": 2, "window_tokens": 16, "full_attention_layers": [1]}
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
