"""Bytes that layers keep for backward: counted on a stage of one layer, and as predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrain_bench.costs.memory import Memory
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.modules import Pack, Stage, StageGroups, build_stage, input_width, merge_tokens
from support.builders import TOKENS, placed
from support.train.allocations import allocated, num_bytes, saved_bytes
from support.train.modules import module_config

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


@dataclass(frozen=True, slots=True)
class OneLayer:
    """A stage of one layer under test, run once, so that buffers that stay are there."""

    model: ModelSpec
    module: ModuleSpec
    layer: int
    groups: StageGroups
    dtype: torch.dtype
    recompute: bool
    stage: Stage
    hidden: Tensor | None
    pack: Pack

    def forward(self) -> Any:
        return self.stage(self.hidden, self.pack)

    def forward_and_backward(self) -> None:
        output = self.forward()
        output.backward(torch.ones_like(output))

    def saved(self) -> int:
        """Bytes of the input, and of what forward saves and returns."""
        return num_bytes(self.hidden) + saved_bytes(self.forward, self.hidden, *self.stage.parameters())

    def counted(self) -> dict[str, int]:
        """Bytes of the input and of what a forward leaves, and at most while it and its backward run."""
        before = num_bytes(self.hidden)
        ahead, both = allocated(self.forward), allocated(self.forward_and_backward)
        return {
            "kept": before + ahead.left_bytes,
            "forward": before + ahead.peak_bytes,
            "backward": before + both.peak_bytes,
        }

    def predicted(self) -> tuple[float, float]:
        """Bytes of what the layer keeps and of its output, and at most while it runs."""
        tp, cp = self.groups.tp.size(), self.groups.cp.size()
        place = placed(self.module, np.arange(tp * cp).reshape(1, 1, -1), tp=tp, cp=cp, recompute=self.recompute)
        memory = Memory(self.model, FrameworkOptions(sequence_parallel=self.groups.splits_tokens), self.dtype.itemsize)
        kind = self.module.layer_kind[self.layer]
        kept, working = (float(each[kind]) * sum(LENGTHS) for each in memory.layer_bytes(self.module, place))
        with torch.no_grad():
            kept += num_bytes(self.forward())
        return kept, kept + working


def one_layer(
    model: ModelSpec, module: ModuleSpec, layer: int, groups: StageGroups, dtype: torch.dtype, recompute: bool
) -> OneLayer:
    """A stage of one layer, and its input."""
    held = range(layer, layer + 1)
    stage = build_stage(model, module, held, groups, dtype=dtype, recompute=recompute)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs = input_of(module, layer, groups, dtype)
    ready = OneLayer(model, module, layer, groups, dtype, recompute, stage, *inputs)
    ready.forward_and_backward()
    return ready
