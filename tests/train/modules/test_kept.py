"""What layers keep for backward on the CPU is what the simulator predicts."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from entrain_bench.costs.memory import Memory
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import FULL, SELECTIVE
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.stage import build_stage
from support.builders import placed
from support.train.allocations import num_bytes, peak_bytes, saved_bytes
from support.train.kept import LENGTHS, input_of, one_of_each_kind, wide_model
from support.train.ranks import run_ranks

MODEL = wide_model()
TOLERANCE = 0.1
LAYERS = one_of_each_kind(MODEL)


class OneLayer:
    """A stage of one layer, run once, so that buffers that stay are there."""

    def __init__(self, name: str, layer: int, groups: StageGroups, dtype: torch.dtype, recompute: str) -> None:
        self.model = MODEL.with_recomputation(recompute or FULL)
        self.module = self.model.module(name)
        self.kind = self.module.layer_kind[layer]
        self.groups = groups
        self.recompute = bool(recompute)
        held = range(layer, layer + 1)
        self.stage = build_stage(self.model, self.module, held, groups, dtype=dtype, recompute=self.recompute)
        self.hidden, self.pack = input_of(self.module, layer, groups, dtype)
        self.forward_and_backward()

    def forward(self) -> Any:
        return self.stage(self.hidden, self.pack)

    def forward_and_backward(self) -> None:
        output = self.forward()
        output.backward(torch.ones_like(output))

    def saved(self) -> int:
        """Bytes of the input, and of what forward saves and returns."""
        return num_bytes(self.hidden) + saved_bytes(self.forward, self.hidden, *self.stage.parameters())

    def predicted(self) -> tuple[float, float]:
        """Bytes of what the layer keeps and of its output, and at most while it runs."""
        tp = self.groups.tp.size()
        cp = self.groups.cp.size()
        place = placed(self.module, np.arange(tp * cp).reshape(1, 1, -1), tp=tp, cp=cp, recompute=self.recompute)
        framework = FrameworkOptions(sequence_parallel=self.groups.splits_tokens)
        memory = Memory(self.model, framework, self.stage.config.params_dtype.itemsize)
        kept, working = (bytes_[self.kind] * sum(LENGTHS) for bytes_ in memory.layer_bytes(self.module, place))
        with torch.no_grad():
            kept += num_bytes(self.forward())
        return kept, kept + working


RECOMPUTE = pytest.mark.parametrize("recompute", ["", FULL, SELECTIVE], ids=["kept", "recomputed", "selectively"])


@pytest.mark.wide
@pytest.mark.parametrize(("module", "layer"), LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@RECOMPUTE
def test_a_layer_keeps_what_is_predicted(
    alone: StageGroups, module: str, layer: int, dtype: torch.dtype, recompute: str
) -> None:
    ready = OneLayer(module, layer, alone, dtype, recompute)
    assert ready.saved() == pytest.approx(ready.predicted()[0], rel=TOLERANCE)


def test_the_language_head_needs_what_is_predicted_while_it_runs(alone: StageGroups) -> None:
    ready = OneLayer("llm", len(MODEL.llm.layers) - 1, alone, torch.bfloat16, "")
    for call in (ready.forward, ready.forward_and_backward):
        assert num_bytes(ready.hidden) + peak_bytes(call) == pytest.approx(ready.predicted()[1], rel=TOLERANCE)


@pytest.mark.wide
@RECOMPUTE
def test_the_backward_of_a_block_needs_what_is_predicted(alone: StageGroups, recompute: str) -> None:
    """But for gradients of weights, which a GPU's fused kernels add to the buffer at once."""
    ready = OneLayer("llm", 1, alone, torch.bfloat16, recompute)
    peak = num_bytes(ready.hidden) + peak_bytes(ready.forward_and_backward)
    assert peak == pytest.approx(ready.predicted()[1], rel=0.2)


def kept_on_ranks(rank: int, parallel: str, layers: list[tuple[str, int]]) -> dict[str, tuple[float, float]]:
    """Counted and predicted bytes on this rank, by case; ``parallel``: tensors, tokens between products too, or CP."""
    prepare_platform()
    every = dist.group.WORLD
    own = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    tp, cp = (own, every) if parallel == "cp" else (every, own)
    groups = StageGroups(tp, cp, own, sequence_parallel=parallel == "sp")
    kept = {}
    for (module, layer), recompute in product(layers, ("", FULL, SELECTIVE)):
        ready = OneLayer(module, layer, groups, torch.float32, recompute)
        kept[f"{module} {layer} {recompute}"] = ready.saved(), ready.predicted()[0]
    return kept


@pytest.mark.parametrize(
    ("parallel", "ranks", "layers"),
    [
        # Keys and values of the other ranks are gathered again.
        pytest.param("cp", 4, [("llm", 1)], marks=pytest.mark.wide),
        *(
            pytest.param(parallel, ranks, LAYERS, marks=pytest.mark.slow)
            for parallel in ("tp", "sp")
            for ranks in (2, 4)
        ),
    ],
)
def test_parallel_ranks_keep_what_is_predicted(parallel: str, ranks: int, layers: list[tuple[str, int]]) -> None:
    for kept in run_ranks(kept_on_ranks, ranks, parallel, layers):
        assert not {case: both for case, both in kept.items() if abs(both[0] / both[1] - 1) > TOLERANCE}
