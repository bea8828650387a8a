"""Seconds of stages of one kind of layer, of optimizer steps and of communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from math import isqrt
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray
from entrain_bench.costs.profiled.file import COLLECTIVES, CollectivePoint, StagePoint, StepPoint
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import build_layers
from entrain_bench.train.device import rank_of_many, to_device
from entrain_bench.train.launching import on_ranks
from entrain_bench.train.measuring import Clock
from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.packing import Pack, StageGroups, merge_tokens, shares_of
from entrain_bench.train.modules.stage import build_stage
from entrain_bench.train.running.learning import OptimizerSettings
from entrain_bench.train.running.stages import TrainedStage, train_stage

# Calls before the first that counts, unless they take longer than a share of a point's time.
WARM_UPS = 3
WARM_UP_SHARE = 0.2
# Between waits for a GPU, so that it always has kernels queued, as in training.
GPU_BATCH = 5
# Blocks of the deeper stage. A layer's time is the difference to a stage of one block, per additional block.
DEPTH = 4
FORWARD, BACKWARD, REMADE = range(3)
# Share of a point's time; a pack of which one repetition takes longer is left out.
TURN_SHARE = 0.5
# Gradients of a step are clipped to half.
CLIP = 1.0
NORM = 2.0
# One after the other between two looks at the clock, so that ranks that start apart hardly count.
CALLS = 4
ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Patience:
    """The repetitions of a point; no more begin after ``point_s`` seconds."""

    repetitions: int
    point_s: float


def sample(turn: Callable[[Clock], None], device: torch.device, patience: Patience) -> FloatArray:
    """Return the seconds of all turns ``[repetitions, parts]``."""
    clock = Clock(device)
    started = perf_counter()
    for _ in range(WARM_UPS):
        _run(turn, clock, 1)
        if perf_counter() - started > WARM_UP_SHARE * patience.point_s:
            break
    batch = GPU_BATCH if device.type == "cuda" else 1
    rows = list[FloatArray]()
    started = perf_counter()
    while not rows or (len(rows) < patience.repetitions and perf_counter() - started < patience.point_s):
        rows += [*_run(turn, clock, batch)]
    return np.stack(rows)


def quantiles(seconds: FloatArray) -> tuple[float, ...]:
    """Tenth percentile, median and ninetieth of repetitions."""
    return tuple(float(value) for value in np.quantile(seconds, [0.1, 0.5, 0.9]))


def _run(turn: Callable[[Clock], None], clock: Clock, repetitions: int) -> FloatArray:
    clock.start()
    for _ in range(repetitions):
        turn(clock)
    return clock.seconds().reshape(repetitions, -1)


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of layer at a TP and a CP degree."""

    module: ModuleSpec
    kind: str
    tp: int
    cp: int = 1

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of layers in timed stages; only blocks are stacked."""
        layer = next(layer for layer in self.module.kinds if layer.kind == self.kind)
        return (1, DEPTH) if layer.attention else (1,)


def targets_of(module: ModuleSpec, tp: int, cp: int = 1) -> list[Target]:
    """Every kind of layer of a module; only blocks are timed for several CP ranks."""
    return [Target(module, layer.kind, tp, cp) for layer in module.kinds if layer.attention or cp == 1]


def packs_of(target: Target, tokens: int) -> Iterator[tuple[int, ...]]:
    """Packs of ``tokens`` in all: one sequence, for blocks also a few and many; none if the context is too short."""
    longest = target.module.config.context_tokens or tokens
    most = isqrt(tokens)
    allowed = [number for number in range(1, most + 1) if split_tokens(tokens, number)[-1] <= longest]
    wanted = {1, isqrt(most), most} if len(target.depths) > 1 else {1}
    for number in sorted({max(count, *allowed[:1]) for count in wanted if allowed}):
        yield split_tokens(tokens, number)


def split_tokens(tokens: int, number: int) -> tuple[int, ...]:
    """Rising lengths, 1 : 3 : 5 ... as whole tokens allow; ``number`` squared is at most ``tokens``."""
    ends = [tokens * index * index // (number * number) for index in range(number + 1)]
    return tuple(end - start for start, end in pairwise(ends))


@dataclass(frozen=True, slots=True)
class Bench:
    """Where stages are built and run; ``groups`` are those of the first rank, by TP and CP degree."""

    model: ModelSpec
    groups: dict[tuple[int, int], StageGroups]
    alone: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device

    def stages(self, target: Target) -> dict[int, TrainedStage]:
        """The stages of a target, by depth."""
        return {depth: self.build(target, depth) for depth in target.depths}

    def build(self, target: Target, depth: int) -> TrainedStage:
        """A stage of ``depth`` layers of the target's kind, with gradient buffers and optimizer."""
        module = target.module
        groups = self.groups[target.tp, target.cp]
        full = tuple(range(depth)) if target.kind == "block" and module.config.window_tokens else ()
        layers = build_layers(config := replace(module.config, num_layers=depth, full_attention_layers=full))
        held = [index for index, layer in enumerate(layers) if layer.kind == target.kind]
        module = ModuleSpec(module.name, module.role, config, layers)
        blocks = range(held[0], held[-1] + 1)
        stage = build_stage(self.model, module, blocks, groups, dtype=self.dtype, device=self.device)
        return train_stage(stage, groups, self.alone, OptimizerSettings())

    def inputs(self, target: Target, lengths: tuple[int, ...]) -> tuple[Pack, Callable[[], Tensor | None]]:
        """A pack of sequences of these lengths, and the function that makes the input of each forward."""
        module = target.module
        is_first = target.kind == module.layers[0].kind
        num_rows = shares_of(lengths, self.groups[target.tp, target.cp]).hidden.size
        if module.is_encoder:
            merge = merge_tokens(module)
            pack = Pack(lengths, tuple(-(-length // merge) for length in lengths))
            if is_first:
                features = torch.rand(sum(lengths), input_width(module), pin_memory=self.device.type == "cuda")
                return pack, lambda: to_device(features, self.device)
        else:
            # The first half of every sample are projected tokens.
            within = torch.cat([torch.arange(length) for length in lengths])
            halves = torch.repeat_interleave(torch.tensor(lengths) // 2, torch.tensor(lengths))
            ids = torch.where(within < halves, -1, within % module.config.vocab_size)
            pack = Pack(lengths, (), ids, ids.clamp(min=0))
            num_rows = int((ids < 0).sum()) if is_first else num_rows
        values = torch.randn(num_rows, module.config.hidden_size, dtype=self.dtype, device=self.device)
        return pack, lambda: values.detach().requires_grad_() if num_rows else None

    def measure(
        self, target: Target, stages: Mapping[int, TrainedStage], lengths: tuple[int, ...], patience: Patience
    ) -> list[StagePoint]:
        """Points of one pack, a stage each; none if a single repetition takes too long, or too much memory."""
        pack, start = self.inputs(target, lengths)
        forward = partial(_forward, pack, start)
        try:
            if _estimated_s(stages, forward, self.device) > TURN_SHARE * patience.point_s:
                return []
            rows = sample(partial(_turn, stages, forward), self.device, patience)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return []
        points = []
        for depth, parts in zip(stages, np.split(rows, len(stages), axis=1), strict=True):
            times = [*map(quantiles, parts.T), ()]
            key = (target.module.name, target.kind, depth, target.tp, lengths)
            points.append(StagePoint(*key, times[FORWARD], times[BACKWARD], times[REMADE], len(rows), target.cp))
        return points


@contextmanager
def one_of_many(
    model: ModelSpec,
    degrees: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    sequence_parallel: bool = True,
) -> Iterator[Bench]:
    """Build and run stages as the first rank of each pair of TP and CP degrees does."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with rank_of_many(max(tp * cp for tp, cp in degrees)):
        alone = dist.new_group([0])
        groups = {
            (tp, cp): StageGroups(
                dist.new_group([*range(tp)]), dist.new_group([*range(0, tp * cp, tp)]), alone, sequence_parallel
            )
            for tp, cp in degrees
        }
        yield Bench(model, groups, alone, dtype, device)


def _forward(pack: Pack, start: Callable[[], Tensor | None], trained: TrainedStage) -> Tensor:
    output: Tensor = trained.buffers(start(), pack)
    return output


def _estimated_s(
    stages: Mapping[int, TrainedStage], forward: Callable[[TrainedStage], Tensor], device: torch.device
) -> float:
    """Estimate the seconds of a repetition from a forward of the smallest stage, the faster of two."""
    clock = Clock(device)
    depth, smallest = next(iter(stages.items()))
    clock.start()
    for _ in range(2):
        with clock.action(FORWARD):
            forward(smallest)
    # A backward is two forwards, one with recomputation and the forward before it four.
    return float(clock.seconds().min()) * (7 if len(stages) > 1 else 3) * sum(stages) / depth


def _turn(stages: Mapping[int, TrainedStage], forward: Callable[[TrainedStage], Tensor], clock: Clock) -> None:
    """Run every stage once, depths in turn, so that a slowdown of the machine affects all of them."""
    for trained in stages.values():
        trained.buffers.zero_grad_buffer()
        for part in (BACKWARD, REMADE) if len(stages) > 1 else (BACKWARD,):
            trained.stage.recompute = part == REMADE
            with nullcontext() if part == REMADE else clock.action(FORWARD):
                output = forward(trained)
                gradient = torch.ones_like(output)
            with clock.action(part):
                torch.autograd.backward(output, gradient)


def measure_step(target: Target, depth: int, bench: Bench, patience: Patience) -> StepPoint:
    """The optimizer step of a stage of ``depth`` layers."""
    trained = bench.build(target, depth)
    parameters = [*trained.stage.parameters()]

    def step(clock: Clock) -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.main_grad.normal_()  # type: ignore[attr-defined]
        with clock.action(0):
            trained.gradient_square()
            trained.step(CLIP, NORM)

    rows = sample(step, bench.device, patience)
    return StepPoint(sum(parameter.numel() for parameter in parameters), quantiles(rows[:, 0]), len(rows))


def measure_collectives(
    device: str, num_ranks: int, message_bytes: tuple[int, ...], patience: Patience
) -> list[CollectivePoint]:
    """Time every operation at every size on ranks of this machine."""
    args = (device, message_bytes, patience)
    points: list[CollectivePoint] = on_ranks(_points, num_ranks, *args, device=device)[0]
    return points


def _points(
    device: str, message_bytes: tuple[int, ...], patience: Patience, group: dist.ProcessGroup
) -> list[CollectivePoint]:
    place = torch.device(device, group.rank()) if device == "cuda" else torch.device("cpu")
    size = group.size()
    points = []
    for operation, num_bytes in product(COLLECTIVES, message_bytes):
        # Every rank holds a share of equal size.
        part = torch.zeros(max(1, num_bytes // (ELEMENT_BYTES * size)), device=place)
        whole = torch.zeros(len(part) * size, device=place)
        calls = {
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "all_reduce": partial(dist.all_reduce, whole),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "send": partial(_pass_on, group.rank(), whole),
        }
        warm = _sample(calls[operation], WARM_UPS, place, group)
        wanted = int(patience.point_s / (CALLS * max(float(warm.min()), 1e-6)))
        # All ranks must agree.
        count = torch.tensor([min(max(wanted, 1), patience.repetitions)])
        dist.broadcast(count, 0, group=group)
        seconds = _sample(calls[operation], int(count), place, group) / (2 if operation == "send" else 1)
        shape = (operation, size, len(whole) * ELEMENT_BYTES)
        points.append(CollectivePoint(*shape, quantiles(seconds), len(seconds)))
    return points


def _pass_on(rank: int, whole: Tensor) -> None:
    """Send from the first rank to the second and back; one transfer takes half of the time."""
    if rank < 2:
        for passed in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
            passed(whole, 1 - rank)


def _sample(
    call: Callable[[], object], repetitions: int, device: torch.device, control: dist.ProcessGroup
) -> FloatArray:
    """Seconds of a call on the slowest rank ``[repetitions]``."""
    seconds = torch.zeros(repetitions, dtype=torch.float64)
    for index in range(repetitions):
        dist.barrier(group=control)
        started = perf_counter()
        for _ in range(CALLS):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[index] = (perf_counter() - started) / CALLS
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=control)
    return np.asarray(seconds.numpy())
