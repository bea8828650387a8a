"""Stages of one kind of layer on one process, as one of several tensor-parallel ranks holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import build_layers
from entrain_bench.train.device import to_device
from entrain_bench.train.modules import Pack, StageGroups, build_stage, input_width
from entrain_bench.train.modules.grids import merge_tokens
from entrain_bench.train.modules.packing import shares_of
from entrain_bench.train.profiling.packs import Target
from entrain_bench.train.running.alone import rank_of_many
from entrain_bench.train.running.step import OptimizerSettings, TrainedStage, train_stage


@dataclass(frozen=True, slots=True)
class Bench:
    """Where stages are built and run; ``groups`` are those of the first tensor-parallel rank, by degree."""

    model: ModelSpec
    groups: dict[int, StageGroups]
    alone: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device

    def build(self, target: Target, depth: int) -> TrainedStage:
        """A stage of ``depth`` layers of the target's kind, with gradient buffers and optimizer."""
        module, groups = target.module, self.groups[target.tp]
        full = tuple(range(depth)) if target.kind == "block" and module.config.window_tokens else ()
        layers = build_layers(config := replace(module.config, num_layers=depth, full_attention_layers=full))
        held = [index for index, layer in enumerate(layers) if layer.kind == target.kind]
        module = ModuleSpec(module.name, module.role, config, layers)
        stage = build_stage(
            self.model,
            module,
            range(held[0], held[-1] + 1),
            groups,
            dtype=self.dtype,
            seed=0,  # Times do not depend on weights.
            device=self.device,
            recompute=False,
        )
        return train_stage(stage, groups, self.alone, OptimizerSettings())

    def inputs(self, target: Target, lengths: Sequence[int]) -> Inputs:
        """Inputs of a stage's forward for sequences of these lengths."""
        module, total = target.module, sum(lengths)
        share = shares_of(total, self.groups[target.tp]).hidden
        hidden = (share.stop - share.start, module.config.hidden_size)
        first, last = (target.kind == module.layers[end].kind for end in (0, -1))
        if module.is_encoder:
            merge = merge_tokens(module)
            pack = Pack(tuple(lengths), tuple(-(-length // merge) for length in lengths))
            if not first:
                return Inputs(pack, self._leaf(hidden))
            features = torch.rand(total, input_width(module), pin_memory=self.device.type == "cuda")
            return Inputs(pack, lambda: to_device(features, self.device))
        # The first half of every sample is what encoders hand over.
        ids = torch.cat([torch.arange(length) % module.config.vocab_size for length in lengths])
        ids[torch.cat([torch.arange(length) < length // 2 for length in lengths])] = -1
        pack = Pack(tuple(lengths), (), ids, ids.clamp(min=0))
        if not first:
            return Inputs(pack, self._leaf(hidden), is_loss=last)
        projected = int((ids < 0).sum())
        return Inputs(pack, self._leaf((projected, module.config.hidden_size)) if projected else lambda: None)

    def _leaf(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        values = torch.randn(shape, dtype=self.dtype, device=self.device)
        return lambda: values.detach().requires_grad_()


@dataclass(frozen=True, slots=True)
class Inputs:
    """A pack, and the function that makes the input of each forward."""

    pack: Pack
    start: Callable[[], Tensor | None]
    is_loss: bool = False


@contextmanager
def one_of_many(
    model: ModelSpec,
    degrees: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    sequence_parallel: bool = True,
) -> Iterator[Bench]:
    """Build and run stages as shards of each tensor-parallel degree."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with rank_of_many(max(degrees)):
        alone = dist.new_group([0])
        groups = {tp: StageGroups(dist.new_group(list(range(tp))), alone, alone, sequence_parallel) for tp in degrees}
        yield Bench(model, groups, alone, dtype, device)
