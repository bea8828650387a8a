"""Layouts: the LLM over all blocks of a replica, every encoder in copies over runs of the same blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from entrain_bench.arithmetic import decisive
from entrain_bench.arrays import FloatArray
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout
from entrain_bench.specs.job import Degrees, Job, divisors
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.profile import Profile

from .work import chunk_layers_s, shares_of, split_chain, unit_layers_s

# Alternations between splitting the LLM around the encoders and the encoders around the LLM.
JOINT_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layout is made from.

    Attributes:
        degrees: TP, CP and DP of the LLM, and the blocks of a replica.
        encoder_tp, encoder_cp: of the encoders; their product divides that of the LLM.
        segments: runs of blocks, each with a copy of every encoder (or several side by side).
        joint: whether the two chains are split around each other.
        recompute: modules that recompute their activations.
        num_microbatches: of an LLM replica.
    """

    degrees: Degrees
    encoder_tp: int
    encoder_cp: int
    segments: int
    joint: bool
    recompute: tuple[bool, ...]
    num_microbatches: int

    @property
    def copies_abreast(self) -> int:
        """Copies of an encoder on one run of blocks."""
        return self.degrees.tp * self.degrees.cp // (self.encoder_tp * self.encoder_cp)


@dataclass(frozen=True, slots=True)
class Split:
    """Layers of every module's stages, and the believed seconds of an iteration on the busiest rank."""

    layers: tuple[tuple[int, ...], ...]
    busiest_s: float


def encoder_degrees(job: Job, degrees: Degrees, own: bool) -> Iterator[tuple[int, int]]:
    """TP and CP that encoders may have in a block of the LLM, that of the LLM first; only that unless they have own."""
    yield degrees.tp, degrees.cp
    if not own or not job.model.encoders:
        return
    sizes = [size for module in job.model.encoders for size in module.sharded_sizes.values()]
    for tp in reversed(divisors(degrees.tp)):
        for cp in divisors(degrees.tp * degrees.cp // tp):
            splits = cp == 1 or all(job.framework.sequence_parts(module, cp) == cp for module in job.model.encoders)
            if splits and all(size % tp == 0 for size in sizes) and (tp, cp) != (degrees.tp, degrees.cp):
                yield tp, cp


def iteration_s(
    profile: Profile, samples: SampleShapes, index: int, tp: int, cp: int, recompute: bool, num_chunks: float
) -> FloatArray:
    """Seconds of each layer of a module in an iteration, all replicas together ``[layers]``.

    Args:
        profile: what is known.
        samples: stand for a batch.
        index: of the module.
        tp: its TP.
        cp: its CP.
        recompute: whether it recomputes.
        num_chunks: chunks of an iteration.
    """
    module = profile.job.model.modules[index]
    units = unit_layers_s(profile, module, samples, tp, cp, recompute).sum(axis=0)
    kinds = units * (profile.job.global_batch / len(samples))
    return np.asarray((kinds + num_chunks * chunk_layers_s(profile, module, tp, cp, recompute))[module.layer_kind])


def split_layers(profile: Profile, samples: SampleShapes, shape: Shape, chunk_tokens: int) -> Split:
    """Split every module so that the busiest lane of a replica, encoder work levelled, is least busy.

    Args:
        profile: what is known.
        samples: stand for a batch.
        shape: the layout.
        chunk_tokens: of an encoder chunk, about.
    """
    job, degrees = profile.job, shape.degrees
    model, lanes = job.model, degrees.pp
    llm_s = (
        iteration_s(
            profile,
            samples,
            model.llm_index,
            degrees.tp,
            degrees.cp,
            shape.recompute[-1],
            shape.num_microbatches * degrees.dp,
        )
        / degrees.dp
    )
    encoders_s = []
    for index, module in enumerate(model.encoders):
        tokens = module.lengths(samples, module.units(samples)).sum() * (job.global_batch / len(samples))
        chunks = max(tokens / chunk_tokens, shape.num_microbatches * degrees.dp)
        tp, cp = shape.encoder_tp, shape.encoder_cp
        encoders_s.append(iteration_s(profile, samples, index, tp, cp, shape.recompute[index], chunks) / degrees.dp)
    encoder_lane_s = np.zeros(lanes)
    found = []
    for _ in range(JOINT_ROUNDS if shape.joint and lanes > shape.segments else 1):
        # An LLM of fewer layers leaves the last blocks to the encoders.
        llm_layers = split_chain(llm_s, encoder_lane_s[: min(lanes, len(llm_s))])
        llm_lane_s = np.zeros(lanes)
        llm_lane_s[: len(llm_layers)] = _sums(llm_s, llm_layers)
        layers, encoder_lane_s = _split_encoders(shape, encoders_s, llm_lane_s)
        found.append(Split((*layers, llm_layers), _busiest_s(shape, encoders_s, layers, llm_lane_s)))
    return min(found, key=lambda split: decisive(split.busiest_s))


def _split_encoders(
    shape: Shape, encoders_s: Sequence[FloatArray], llm_lane_s: FloatArray
) -> tuple[list[tuple[int, ...]], FloatArray]:
    """Layers of every encoder's stages, alike in all segments, and what they cost each lane if all copies do the same.

    Args:
        shape: the layout.
        encoders_s: seconds of each layer in a replica, by encoder ``[layers]``.
        llm_lane_s: of the LLM on each lane ``[lanes]``.
    """
    copies, layers, total = shape.segments * shape.copies_abreast, [], np.zeros(len(llm_lane_s))
    for own_s in encoders_s:
        beside = (llm_lane_s + total if shape.joint else np.zeros_like(total)).reshape(shape.segments, -1).max(axis=0)
        layers.append(split_chain(own_s / copies, beside))
        total = total + np.tile(_sums(own_s, layers[-1]) / copies, shape.segments)
    return layers, total


def _busiest_s(
    shape: Shape, encoders_s: Sequence[FloatArray], layers: Sequence[tuple[int, ...]], llm_lane_s: FloatArray
) -> float:
    """Seconds of the busiest lane once the copies of every encoder share its work out; arguments as before."""
    busy = llm_lane_s
    for own_s, stages in zip(encoders_s, layers, strict=True):
        base = np.repeat(busy.reshape(shape.segments, -1), shape.copies_abreast, axis=0)
        cost = _sums(own_s, stages)
        shares, _ = shares_of(base[None], cost[None])
        of_segment = shares[0].reshape(shape.segments, -1).sum(axis=1) / shape.copies_abreast
        busy = busy + (of_segment[:, None] * cost).ravel()
    return float(busy.max())


def place(job: Job, shape: Shape, layers: Sequence[tuple[int, ...]]) -> Layout:
    """The layout of a shape; replicas are consecutive ranks, blocks of TP x CP ranks inside."""
    degrees, width = shape.degrees, shape.encoder_tp * shape.encoder_cp
    lanes, abreast = degrees.pp, shape.copies_abreast
    ranks = np.arange(degrees.dp * lanes * degrees.tp * degrees.cp)
    blocks = ranks.reshape(degrees.dp, lanes, degrees.tp * degrees.cp)
    runs = ranks.reshape(degrees.dp, shape.segments, lanes // shape.segments, abreast, width)
    copies = runs.transpose(0, 1, 3, 2, 4).reshape(-1, lanes // shape.segments, width)
    modules = []
    for module, split, again in zip(job.model.modules, layers, shape.recompute, strict=True):
        if module.is_encoder:
            held, tp, cp = copies[:, : len(split)], shape.encoder_tp, shape.encoder_cp
        else:
            held, tp, cp = blocks[:, : len(split)], degrees.tp, degrees.cp
        modules.append(ModuleLayout(module.name, tp, cp, split, np.ascontiguousarray(held), again))
    layout = Layout(tuple(modules), shape.num_microbatches)
    check_layout(layout, job.model, job.cluster)
    return layout


def shapes_of(
    job: Job, choices: Sequence[tuple[bool, ...]], own_degrees: bool, joint: bool, copies: bool
) -> Iterator[Shape]:
    """Every shape of a job's degrees with the microbatches that its size asks for.

    Args:
        job: the job.
        choices: of recomputation.
        own_degrees: whether encoders have TP and CP of their own.
        joint: see ``Shape``.
        copies: whether a replica may hold several copies of an encoder in a chain.
    """
    model = job.model
    for degrees in job.degrees():
        if any(size % degrees.tp for size in model.llm.sharded_sizes.values()):
            continue
        runs = divisors(degrees.pp) if copies and model.encoders else [1]
        fewest = min((len(module.layers) for module in model.encoders), default=degrees.pp)
        for (tp, cp), segments, again in product(encoder_degrees(job, degrees, own_degrees), runs, choices):
            if degrees.pp // segments > fewest:
                continue
            if not model.encoders and len(model.llm.layers) < degrees.pp:
                continue
            yield Shape(degrees, tp, cp, segments, joint, again, job.num_microbatches(degrees.dp))


def _sums(layer_s: FloatArray, layers_per_stage: Sequence[int]) -> FloatArray:
    return np.add.reduceat(layer_s, np.cumsum([0, *layers_per_stage[:-1]]))
