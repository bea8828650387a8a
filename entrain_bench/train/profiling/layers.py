"""Timing of stages: forward, backward, recomputation and kept bytes of packs, and optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from entrain_bench.costs.profiled.points import StagePoint, StepPoint
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.profiling.packs import Target
from entrain_bench.train.profiling.sampling import Patience, quantiles, sample
from entrain_bench.train.profiling.stages import Bench, Inputs
from entrain_bench.train.running.step import TrainedStage

FORWARD, BACKWARD, REMADE = range(3)
# Of the time of a point; a pack of which a single repetition takes longer is left out.
TURN_SHARE = 0.5
# Gradients of a step are clipped to half.
CLIP, NORM = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class TargetStages:
    """The stages of a target, by depth, and where they run."""

    target: Target
    bench: Bench
    stages: Mapping[int, TrainedStage]

    @classmethod
    def build(cls, target: Target, bench: Bench) -> TargetStages:
        """Build all of them."""
        return cls(target, bench, {depth: bench.build(target, depth) for depth in target.depths})

    def measure(self, lengths: tuple[int, ...], patience: Patience) -> list[StagePoint]:
        """Points of one pack, a stage each; none if a single repetition takes too long, or too much memory."""
        inputs, device = self.bench.inputs(self.target, lengths), self.bench.device
        try:
            if self._turn_s(inputs, device) > TURN_SHARE * patience.point_s:
                return []
            kept = [self._kept(stage, inputs) for stage in self.stages.values()]
            rows = sample(partial(self._turn, inputs), device, patience)
        except torch.OutOfMemoryError:
            for stage in self.stages.values():
                stage.stage.recompute = False
            torch.cuda.empty_cache()
            return []
        points, width = [], self._parts
        for index, depth in enumerate(self.stages):
            passes = [quantiles(rows[:, width * index + part]) for part in range(width)]
            remade = passes[REMADE] if width > REMADE else ()
            key = (self.target.module.name, self.target.kind, depth, self.target.tp, lengths)
            points.append(StagePoint(*key, passes[FORWARD], passes[BACKWARD], remade, *kept[index], len(rows)))
        return points

    @property
    def _parts(self) -> int:
        return 3 if len(self.target.depths) > 1 else 2

    def _turn_s(self, inputs: Inputs, device: torch.device) -> float:
        """Estimate the seconds of a repetition from a forward of the smallest stage, the faster of two."""
        clock = Clock(device)
        depth, stage = next(iter(self.stages.items()))
        clock.start()
        for _ in range(2):
            with clock.action(0):
                stage.buffers(inputs.start(), inputs.pack)
        rows = clock.rows()
        # A backward is two forwards, one with recomputation and the forward before it four.
        return float((rows[:, 2] - rows[:, 1]).min()) * (7 if self._parts > 2 else 3) * sum(self.stages) / depth

    def _kept(self, trained: TrainedStage, inputs: Inputs) -> tuple[int, int]:
        """Bytes that a forward keeps, without and with recomputation."""
        plain = kept_bytes(trained, inputs)
        if self._parts <= REMADE:
            return plain, 0
        trained.stage.recompute = True
        again = kept_bytes(trained, inputs)
        trained.stage.recompute = False
        return plain, again

    def _turn(self, inputs: Inputs, clock: Clock) -> None:
        """Every stage once, depths in turn, so that a machine that slows down slows all of them."""
        for trained in self.stages.values():
            trained.buffers.zero_grad_buffer()
            for part in (BACKWARD, REMADE)[: self._parts - 1]:
                trained.stage.recompute = part == REMADE
                with nullcontext() if part == REMADE else clock.action(FORWARD):
                    output, gradient = _forward(trained, inputs)
                with clock.action(part):
                    torch.autograd.backward(output, gradient)
            trained.stage.recompute = False


def kept_bytes(trained: TrainedStage, inputs: Inputs) -> int:
    """Bytes that a forward keeps for its backward, parameters and what several operations keep counted once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in trained.stage.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _ = trained.buffers(inputs.start(), inputs.pack)
    return sum(kept.values())


def _forward(trained: TrainedStage, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The output, and the gradient that its backward starts with."""
    output: Tensor = trained.buffers(inputs.start(), inputs.pack)
    if inputs.is_loss:
        return output / sum(inputs.pack.lengths), None
    return output, torch.ones_like(output)


def measure_step(target: Target, depth: int, bench: Bench, patience: Patience) -> StepPoint:
    """The point of a stage of so many layers."""
    trained = bench.build(target, depth)
    rows = sample(partial(_step, trained), bench.device, patience)
    parameters = sum(parameter.numel() for parameter in trained.stage.parameters())
    return StepPoint(parameters, quantiles(rows[:, 0]), len(rows))


def _step(trained: TrainedStage, clock: Clock) -> None:
    with torch.no_grad():
        for parameter in trained.stage.parameters():
            parameter.main_grad.normal_()  # type: ignore[attr-defined]
    with clock.action(0):
        trained.gradient_square()
        trained.step(CLIP, NORM)
