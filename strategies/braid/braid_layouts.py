"""Layouts: the LLM over all blocks of a replica, every other module in copies over runs of the same blocks; chains.

Generators are laid out as encoders are, whose name stands for both here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Protocol

import numpy as np

from entrain_bench.balancing.planning import partition_layers, place_chain, stage_sums
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Degrees, Job, divisors
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

from .work import chunk_layers_s, chunk_tokens, split_evenly, unit_layers_s


class ShapeOptions(Protocol):
    """The options of ``BraidPlanner`` that decide on shapes."""

    @property
    def encoder_degrees(self) -> bool:
        """Whether encoders have TP and CP of their own."""
        ...

    @property
    def spans(self) -> tuple[int, ...]:
        """Numbers of LLM blocks that a stage of an encoder may take in addition to one."""
        ...

    @property
    def encoder_copies(self) -> bool:
        """Whether a replica may hold several copies of an encoder."""
        ...

    @property
    def llm_stages(self) -> bool:
        """Whether the LLM may have fewer stages than a replica has blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Shape:
    """The choices that determine a layout.

    Attributes:
        degrees: TP, CP and DP of the LLM, and the blocks of a replica.
        encoder_tp, encoder_cp: of the encoders; their product divides that of the LLM, or is a multiple of it: a stage
            of an encoder then takes several blocks.
        segments: runs of blocks, each with a copy of every encoder (or several side by side).
        llm_stages: of the LLM, on every ``llm_stride``-th block from the first.
        llm_stride: blocks from one of them to the next.
        recompute: modules that recompute their activations.
        num_microbatches: of an LLM replica.
        chain: whether encoders are on the first block only and generators on the last, whole: one copy of each.
    """

    degrees: Degrees
    encoder_tp: int
    encoder_cp: int
    segments: int
    llm_stages: int
    llm_stride: int
    recompute: tuple[bool, ...]
    num_microbatches: int
    chain: bool = False

    @property
    def copies_abreast(self) -> int:
        """Copies of an encoder on one run of blocks."""
        return max(1, self.degrees.tp * self.degrees.cp // (self.encoder_tp * self.encoder_cp))

    @property
    def blocks_abreast(self) -> int:
        """Blocks that a stage of an encoder takes."""
        return max(1, self.encoder_tp * self.encoder_cp // (self.degrees.tp * self.degrees.cp))

    @property
    def encoder_stages(self) -> int:
        """Stages of a copy of an encoder."""
        return self.degrees.pp // (self.segments * self.blocks_abreast)

    @property
    def llm_blocks(self) -> IntArray:
        """Blocks of the LLM's stages."""
        return np.arange(self.llm_stages) * self.llm_stride


def others(model: ModelSpec) -> dict[int, ModuleSpec]:
    """All modules but the LLM, by their positions in the model."""
    return {index: module for index, module in enumerate(model.modules) if index != model.llm_index}


def encoder_degrees(job: Job, degrees: Degrees, planner: ShapeOptions) -> Iterator[tuple[int, int]]:
    """TP and CP that encoders may have, that of the LLM first.

    Those of a block of the LLM, or of a part of it; then those of several blocks, for items that would keep one block
    busy for a large share of an iteration.
    """
    modules = others(job.model)
    sizes = [size for module in modules.values() for size in module.sharded_sizes.values()]
    if all(size % degrees.tp == 0 for size in sizes):
        yield degrees.tp, degrees.cp
    if not planner.encoder_degrees or not modules:
        return
    inside = [(tp, cp) for tp in reversed(divisors(degrees.tp)) for cp in divisors(degrees.tp * degrees.cp // tp)]
    wide = [blocks for blocks in planner.spans if degrees.pp % blocks == 0]
    across = [
        pair for blocks in wide for pair in ((degrees.tp, degrees.cp * blocks), (degrees.tp * blocks, degrees.cp))
    ]
    for tp, cp in (*inside, *across):
        splits = cp == 1 or all(job.framework.sequence_parts(module, cp) == cp for module in modules.values())
        fits = job.cluster.gpus_per_node % tp == 0 and all(size % tp == 0 for size in sizes)
        if splits and fits and (tp, cp) != (degrees.tp, degrees.cp):
            yield tp, cp


@dataclass(frozen=True, slots=True)
class _ModuleWork:
    """Work of an iteration for a module with given degrees, all replicas together.

    Attributes:
        units_s: seconds of each layer by its units ``[layers]``.
        chunk_s: by a chunk besides ``[layers]``.
        num_chunks: chunks of an encoder at least; 0 for the LLM.
        longest_s: of each sample's longest unit, through all layers ``[samples]``.
    """

    units_s: FloatArray
    chunk_s: FloatArray
    num_chunks: int
    longest_s: FloatArray


@dataclass(frozen=True, slots=True)
class ShapeWork:
    """Estimated work of each module in an iteration.

    Attributes:
        profile: what is known.
        samples: stand for a batch.
        overhead: share of an encoder chunk's time that a chunk costs anyway, about.
    """

    profile: Profile
    samples: SampleShapes
    overhead: float
    _known: dict[tuple[int, int, int, bool], _ModuleWork] = field(init=False, default_factory=dict)

    def _of(self, index: int, tp: int, cp: int, recompute: bool) -> _ModuleWork:
        key = (index, tp, cp, recompute)
        if key not in self._known:
            job = self.profile.job
            module = self.profile.job.model.modules[index]
            units_s = unit_layers_s(self.profile, module, self.samples, tp, cp, recompute)
            whole_s = matmul(units_s, np.bincount(module.layer_kind, minlength=len(module.kinds)))
            longest = np.zeros(len(self.samples))
            units = module.units(self.samples)
            scale = job.global_batch / len(self.samples)
            np.maximum.at(longest, module.owners(self.samples, units), whole_s)
            chunk_s = chunk_layers_s(self.profile, module, tp, cp, recompute)
            num_chunks = 0
            if module.per_item:
                lengths = module.lengths(self.samples, units)
                one = chunk_tokens(self.profile, module, lengths, tp, cp, self.overhead)
                num_chunks = round(float(lengths.sum()) * scale / one)
            kinds = module.layer_kind
            self._known[key] = _ModuleWork((units_s.sum(axis=0) * scale)[kinds], chunk_s[kinds], num_chunks, longest)
        return self._known[key]

    def layers_s(self, shape: Shape, index: int) -> FloatArray:
        """Seconds of each layer of a module in an iteration of one LLM replica, on one of its blocks ``[layers]``."""
        module = self.profile.job.model.modules[index]
        chunks = shape.num_microbatches * shape.degrees.dp
        tp = shape.degrees.tp
        cp = shape.degrees.cp
        if module.per_item:
            tp = shape.encoder_tp
            cp = shape.encoder_cp
        module_work = self._of(index, tp, cp, shape.recompute[index])
        return np.asarray(
            (module_work.units_s + max(module_work.num_chunks, chunks) * module_work.chunk_s) / shape.degrees.dp
        )

    def longest_s(self, shape: Shape) -> float:
        """Seconds of the sample that takes longest, forth and back: its longest items, before the LLM and after it."""
        model = self.profile.job.model
        degrees = shape.degrees
        llm = self.profile.job.model.llm_index
        before, behind = np.zeros((2, len(self.samples)))
        for index in others(model):
            longest_unit_s = self._of(index, shape.encoder_tp, shape.encoder_cp, shape.recompute[index]).longest_s
            longest = before if index < llm else behind
            np.maximum(longest, longest_unit_s, out=longest)
        between = self._of(llm, degrees.tp, degrees.cp, shape.recompute[llm]).longest_s
        return float((before + between + behind).max())

    def least_s(self, shape: Shape) -> float:
        """No split makes an iteration of a shape shorter: all work, evenly on all blocks; and the longest sample."""
        lanes = shape.degrees.pp
        total = self.layers_s(shape, self.profile.job.model.llm_index).sum() / lanes
        for index in others(self.profile.job.model):
            copies = shape.copies_abreast * lanes // shape.blocks_abreast
            total += self.layers_s(shape, index).sum() / copies
        return max(float(total), self.longest_s(shape))


def split_layers(work: ShapeWork, shape: Shape) -> tuple[list[tuple[int, ...]], float]:
    """Split every module evenly: layers of every module's stages, and believed seconds on the busiest rank.

    Copies of encoders level their work in a replica.
    """
    llm = work.profile.job.model.llm_index
    encoders_s = [work.layers_s(shape, index) for index in others(work.profile.job.model)]
    if shape.chain:
        loaded_s = work.layers_s(shape, llm).copy()
        whole = [(len(layer_s),) for layer_s in encoders_s]
        loaded_s[[0, -1]] += [sum(map(np.sum, encoders_s[:llm])), sum(map(np.sum, encoders_s[llm:]))]
        layers = partition_layers(loaded_s, shape.llm_stages)
        return [*whole[:llm], layers, *whole[llm:]], float(stage_sums(loaded_s, layers).max())
    llm_bounds, bounds, busiest_s = split_evenly(
        work.layers_s(shape, llm),
        np.concatenate([np.zeros(0), *encoders_s]),
        np.cumsum([0, *map(len, encoders_s)]),
        shape.llm_blocks,
        (shape.segments, shape.encoder_stages, shape.blocks_abreast),
        shape.copies_abreast,
    )
    chain = [tuple(np.diff(bound).tolist()) for bound in bounds]
    chain.insert(llm, tuple(np.diff(llm_bounds).tolist()))
    return chain, float(busiest_s)


def place(job: Job, shape: Shape, layers: Sequence[tuple[int, ...]]) -> Layout:
    """The layout of a shape; replicas are consecutive ranks, blocks of TP x CP ranks inside."""
    degrees = shape.degrees
    width = shape.encoder_tp * shape.encoder_cp
    if shape.chain:
        chain = place_chain(job, degrees, layers, shape.recompute, False)
        return replace(chain, num_microbatches=shape.num_microbatches)
    ranks = np.arange(degrees.dp * degrees.pp * degrees.tp * degrees.cp)
    blocks = ranks.reshape(degrees.dp, degrees.pp, degrees.tp * degrees.cp)
    runs = ranks.reshape(degrees.dp, shape.segments, shape.encoder_stages, shape.copies_abreast, width)
    copies = runs.transpose(0, 1, 3, 2, 4).reshape(-1, shape.encoder_stages, width)
    modules = []
    for module, split, again in zip(job.model.modules, layers, shape.recompute, strict=True):
        if module.per_item:
            held = copies[:, : len(split)]
            tp = shape.encoder_tp
            cp = shape.encoder_cp
        else:
            held = blocks[:, shape.llm_blocks]
            tp = degrees.tp
            cp = degrees.cp
        modules.append(ModuleLayout(module.name, tp, cp, split, np.ascontiguousarray(held), again))
    return Layout(tuple(modules), shape.num_microbatches)


def llm_places(job: Job, degrees: Degrees, spread: bool) -> list[tuple[int, int]]:
    """Numbers of the LLM's stages and blocks from one to the next: on every block as far as it has layers.

    With ``own`` also on half, a quarter, ... of the blocks, next to each other or spread over the replica: fewer
    microbatches are under way then, and encoders have the other blocks to themselves.
    """
    layers = len(job.model.llm.layers)
    lanes = degrees.pp
    choices = [(min(lanes, layers), 1)]
    for count in reversed(divisors(lanes)[:-1]) if spread and others(job.model) else ():
        if count <= layers:
            choices += [(count, 1), (count, lanes // count)]
    return [*dict.fromkeys(choices)]


def list_shapes(job: Job, choices: Sequence[tuple[bool, ...]], planner: ShapeOptions) -> Iterator[Shape]:
    """Every shape of a job's degrees and of some choices of recomputation, with the microbatches of its size."""
    model = job.model
    fewest = min((len(module.layers) for module in others(model).values()), default=0)
    for degrees in job.degrees():
        if any(size % degrees.tp for size in model.llm.sharded_sizes.values()):
            continue
        if not fewest and len(model.llm.layers) < degrees.pp:
            continue
        for (tp, cp), again in product(encoder_degrees(job, degrees, planner), choices):
            stages = degrees.pp * degrees.tp * degrees.cp // max(tp * cp, degrees.tp * degrees.cp)
            runs = divisors(stages) if planner.encoder_copies and fewest else [1]
            runs = [run for run in runs if not fewest or stages // run <= fewest]
            for segments, (count, stride) in product(runs, llm_places(job, degrees, planner.llm_stages)):
                microbatches = job.num_microbatches(degrees.dp)
                yield Shape(degrees, tp, cp, segments, count, stride, again, microbatches)


def list_chains(job: Job, choices: Sequence[tuple[bool, ...]]) -> Iterator[Shape]:
    """Every shape whose encoders are on the first of a replica's blocks and whose generators are on the last.

    A copy of either then takes memory on one block instead of all.
    """
    sizes = [size for module in job.model.modules for size in module.sharded_sizes.values()]
    for degrees, again in product(job.degrees(), choices):
        tp = degrees.tp
        cp = degrees.cp
        pp = degrees.pp
        if 1 < pp <= len(job.model.llm.layers) and all(size % tp == 0 for size in sizes):
            yield Shape(degrees, tp, cp, 1, pp, 1, again, job.num_microbatches(degrees.dp), chain=True)
