"""Profiles of devices that never were: every time follows from a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path

import numpy as np

from entrain_bench.costs.profiled.file import (
    CollectivePoint,
    Constants,
    DeviceProfile,
    StagePoint,
    StepPoint,
    Subject,
    module_values,
    write_profile,
)
from entrain_bench.costs.profiled.layers import held_segments, num_segments, score_elements
from entrain_bench.specs.layer import Attention
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.profiling.timing import packs_of, targets_of

TOKENS = (1, 16, 256, 4096, 65536, 1048576)
# Seconds of a layer's forward: once, a token, a score, a segment; and of a stage once and a token.
ONCE_S, TOKEN_S, SCORE_S, SEGMENT_S = 1e-4, 1e-6, 1e-10, 2e-6
# Of a token that is gathered from other context-parallel ranks.
GATHERED_S = 4e-7
STAGE_S, STAGE_TOKEN_S = 5e-5, 1e-8
# A backward, and one that runs the forward once more, in forwards.
BACKWARD, REMADE = 2.0, 3.0
CONSTANTS = Constants(
    peak_bf16_flops=1e12,
    memory_bytes=16 * 2**30,
    memory_bandwidth_bytes_per_s=1e10,
    host_bandwidth_bytes_per_s=5e9,
    sources={name: "made up" for name in Constants.__dataclass_fields__ if name != "sources"},
)


def layer_s(attention: Attention | None, lengths: Sequence[int], tp: int = 1, cp: int = 1) -> float:
    array = np.array(lengths)
    tokens = -(-array.sum() // cp)
    seconds = ONCE_S + TOKEN_S * tokens / tp
    if attention:
        seconds += SCORE_S * score_elements(attention, array).sum() / cp / tp
        seconds += SEGMENT_S * held_segments(attention, num_segments(attention, array).sum(), cp, whole_pack=False)
        seconds += GATHERED_S * (cp - 1) * tokens
    return float(seconds)


def stage_s(tokens: int) -> float:
    return STAGE_S + STAGE_TOKEN_S * tokens


def profile_of_formula(
    model: ModelSpec,
    degrees: Sequence[int] = (1, 2),
    tokens: Sequence[int] = TOKENS,
    error: Callable[[], float] = lambda: 0.0,
    contexts: Sequence[int] = (1,),
) -> DeviceProfile:
    """A profile with every kind of layer of the model, each time wrong by a relative error."""
    stages = []
    each = (targets_of(module, *pair) for module in model.modules for pair in product(degrees, contexts))
    for target in chain.from_iterable(each):
        attention = next(layer for layer in target.module.kinds if layer.kind == target.kind).attention
        for lengths in (lengths for total in tokens for lengths in packs_of(target, total)):
            for depth in target.depths:
                seconds = depth * layer_s(attention, lengths, target.tp, target.cp)
                seconds += stage_s(-(-sum(lengths) // target.cp)) if attention else 0.0
                times = [three(seconds * factor * (1 + error())) for factor in (1.0, BACKWARD, REMADE)]
                remade = times[2] if attention else ()
                key = (target.module.name, target.kind, depth, target.tp, lengths)
                stages.append(StagePoint(*key, *times[:2], remade, 9, target.cp))
    steps = tuple(StepPoint(parameters, three(1e-4 + 1e-9 * parameters), 9) for parameters in (1000, 100_000))
    collectives = tuple(
        CollectivePoint(operation, 2, size, three(rounds * (1e-5 + size / share / 1e9)), 9)
        for operation, rounds, share in (("all_gather", 1, 2), ("all_reduce", 2, 2), ("send", 1, 1))
        for size in (1000, 1_000_000)
    )
    return DeviceProfile(subject_of(model), CONSTANTS, "2026-11-21", True, tuple(stages), steps, collectives)


def subject_of(model: ModelSpec) -> Subject:
    modules = {module.name: module_values(module) for module in model.modules}
    return Subject("made up", "cpu", "float32", True, 1, "2.0", "0.1", model.name, modules)


def three(seconds: float) -> tuple[float, ...]:
    return (0.9 * seconds, seconds, 1.2 * seconds)


def noise(seed: int, size: float) -> Callable[[], float]:
    rng = np.random.default_rng(seed)
    return lambda: float(size * (2 * rng.random() - 1))


def written(path: Path, profile: DeviceProfile) -> str:
    write_profile(path, profile)
    return f"cluster.device.path={path}"
