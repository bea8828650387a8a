"""Sharded weights and gradients: the time and memory that gathering and scattering them layer by layer adds.

With ZeRO-3 (FSDP) every pass gathers, with ``zero3_kept`` the forwards of the first microbatch, with ZeRO-2 none; every
backward scatters. Hybrid sharding gathers and scatters inside a node, then all-reduces shards of gradients over nodes.
Ranks gather the experts that they hold from those that hold the same (``layout.ep``), and the rest from all.
While a layer computes, the next layer's gather and the previous layer's scatter run (torch 2.13,
``_fsdp_param_group.py``): it takes the longer of both, and ``overlap_cost`` seconds for each second of communication.
Nothing hides the first gather and the last scatter of a micro-step through all modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, numbered
from entrain_bench.costs.experts import meeting_chunks
from entrain_bench.costs.layer_times import PassTimes, priced_by_width
from entrain_bench.costs.links import all_gather_s, all_reduce_s
from entrain_bench.costs.loads import Loads
from entrain_bench.costs.profiled.times import LayerTimes
from entrain_bench.program import Pass, Program
from entrain_bench.program.columns import covered_layers
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import ModuleSpec

# Layers whose weights are gathered at the same time: the running one and the next one.
LAYERS_GATHERED = 2


def layer_parameters(module: ModuleSpec, tp: int, *, learning: bool = False, closed: bool = True) -> FloatArray:
    """Parameters (that learn) of each layer on all ``tp`` ranks ``[layers]``; if closed, tied embeddings count once."""
    layers = module.padded(tp).layers
    parameters = np.array([float(layer.trained_parameters if learning else layer.parameters) for layer in layers])
    if module.config.tied_embeddings and closed:
        parameters[-1] -= parameters[0]
    return parameters


def gathered_parameters(
    module: ModuleSpec, placed: ModuleLayout, *, learning: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Parameters (that learn) of each layer that a rank gathers from all ranks, and from those with its experts.

    ``[layers]`` each; without expert parallelism it gathers everything from all.
    """
    shards = module.weight_shards(placed.tp)
    every = layer_parameters(module, placed.tp, learning=learning) / shards
    if placed.ep == 1:
        return every, np.zeros(len(every))
    layers = module.padded(placed.tp).layers
    experts = np.array(
        [float(layer.trained_expert_parameters if learning else layer.expert_parameters) for layer in layers]
    )
    return every - experts / shards, experts / (shards * placed.ep)


def gathered_bytes(
    module: ModuleSpec, placed: ModuleLayout, element_bytes: int, gradient_bytes: int = FP32_BYTES
) -> tuple[float, float]:
    """Bytes of gathered weights (two layers, a tied embedding), and with a layer's gradients, on a rank.

    Weights that it keeps are states (``Memory``), not counted here.
    """
    inner = np.add(*gathered_parameters(module, placed))
    kept = 0.0
    if module.config.tied_embeddings:
        kept = float(inner[0])
        inner = inner[1:]
    ahead = min(LAYERS_GATHERED, len(inner))
    pairs = np.convolve(inner, np.ones(ahead), "valid")
    whole = 0.0 if placed.keeps_weights else element_bytes * (kept + float(pairs.max()))
    gradients = gradient_bytes * float(np.add(*gathered_parameters(module, placed, learning=True)).max())
    return whole, whole + gradients


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """Seconds of the collectives of each layer of a module ``[layers]``."""

    gather_s: FloatArray  # all-gather of bf16 weights before the (first) forward; 0 if they are not sharded
    again_s: FloatArray  # before the backward; 0 if weights are still there, or the layer has no backward
    scatter_s: FloatArray  # reduce-scatter of gradients after every backward; 0 for frozen layers


def layer_traffic(
    module: ModuleSpec, placed: ModuleLayout, cluster: ClusterSpec, gradient_bytes: int = FP32_BYTES
) -> LayerTraffic:
    """Return the times of a module's collectives, over its data-parallel and context-parallel ranks."""
    shards = module.weight_shards(placed.tp)
    copies = module.weight_copies(placed.tp, placed.dp * placed.cp)
    sharing = copies // placed.nodes
    ring = placed.ranks[:, 0, ::shards].reshape(1, -1)
    groups = [
        (sharing, cluster.ring_tiers(ring[:, :sharing])[0]),
        (sharing // placed.ep, cluster.ring_tiers(ring[:, :: placed.ep])[0]),
    ]
    weights, learning = (gathered_parameters(module, placed, learning=learns) for learns in (False, True))
    runs_backward = np.array([layer.backward_share > 0 for layer in module.layers])

    def seconds(size: int, parts: tuple[FloatArray, FloatArray]) -> FloatArray:
        every, experts = (
            np.where(part > 0, all_gather_s(size * part, *group), 0.0)
            for part, group in zip(parts, groups, strict=True)
        )
        return every + experts

    gather_s = seconds(BF16_BYTES, weights) * placed.sharded
    scatter_s = seconds(gradient_bytes, learning) * placed.scatters
    if placed.nodes > 1:
        across = cluster.ring_tiers(ring[:, ::sharing])[0]
        scatter_s += all_reduce_s(gradient_bytes * learning[0] / sharing, placed.nodes, across) * (learning[0] > 0)
    again_s = gather_s * (runs_backward & (not placed.keeps_weights))
    if module.config.tied_embeddings:
        again_s[0] = 0.0
    return LayerTraffic(gather_s, again_s, scatter_s)


@dataclass(frozen=True, slots=True)
class Passes:
    """All forwards or all backwards of a module, with layers in execution order."""

    actions: IntArray  # [passes]
    compute_s: FloatArray  # seconds of each layer [passes, layers]
    ready_s: FloatArray  # seconds of the gather that each layer waits for [layers]
    left_s: FloatArray  # seconds of the scatter that each layer starts [layers]


def sharded_modules(program: Program) -> list[int]:
    """Return the indices of modules with sharded weights or gradients."""
    return [index for index, placed in enumerate(program.layout.modules) if placed.scatters]


def exposed_s(
    program: Program,
    layers_s: Mapping[int, tuple[FloatArray, FloatArray]],
    cluster: ClusterSpec,
    framework: FrameworkOptions,
) -> FloatArray:
    """Return the seconds that gathers and scatters add to passes ``[actions]``, given ``price_layers`` by module."""
    added, first_ready, last_left = np.zeros((3, program.num_actions))
    gradient_bytes = framework.gradient_bytes(BF16_BYTES)
    sets = list[Passes]()
    for index, layer_s in layers_s.items():
        sets += price_passes(program, index, layer_s, cluster, gradient_bytes)
    if not sets:
        return added
    hides_gather = framework.overlap_param_gather
    hides_scatter = framework.overlap_grad_reduce
    for pass_set in sets:
        first_ready[pass_set.actions] = pass_set.ready_s[0]
        last_left[pass_set.actions] = pass_set.left_s[-1]
    before, after = _neighbours(program, np.concatenate([pass_set.actions for pass_set in sets]))
    for pass_set in sets:
        row = np.full(program.num_actions, -1)
        row[pass_set.actions] = np.arange(len(pass_set.actions))
        entries = np.flatnonzero(row[program.lane_actions] >= 0)
        rows = row[program.lane_actions[entries]]
        previous = before[entries]
        following = after[entries]
        compute_s = pass_set.compute_s[rows]
        gathers, scatters = np.zeros((2, *compute_s.shape))
        gathers[:, :-1] = pass_set.ready_s[1:]
        scatters[:, 1:] = pass_set.left_s[:-1]
        gathers[:, -1] = np.where(following >= 0, first_ready[following], 0.0)
        scatters[:, 0] = np.where(previous >= 0, last_left[previous], 0.0)
        beside = hides_gather * gathers + hides_scatter * scatters
        alone = (1 - hides_gather) * gathers + (1 - hides_scatter) * scatters
        slowed = compute_s + cluster.device.overlap_cost * beside
        seconds = (np.maximum(slowed, beside) - compute_s + alone).sum(axis=1)
        # The ends of a micro-step have nothing to hide behind.
        seconds += np.where(previous < 0, pass_set.ready_s[0], 0.0) + np.where(following < 0, pass_set.left_s[-1], 0.0)
        np.maximum.at(added, pass_set.actions[rows], seconds)
    return added


def collective_passes(program: Program) -> IntArray:
    """Return groups of passes that start together, by microbatch and part ``[actions]``; -1: none.

    On all replicas of sharded modules backwards do, and forwards that gather weights; of those that share experts, all.
    """
    group = np.full(program.num_actions, -1)
    count = 0
    for index, (placed, chunks) in enumerate(zip(program.layout.modules, program.chunks, strict=True)):
        meeting = meeting_chunks(placed, chunks)
        together = placed.scatters and placed.copies > 1
        every = numbered(chunks.microbatch, chunks.part) if together else meeting
        gathers = gathering(program, index) if together else np.ones(len(chunks), bool)
        for actions, alike, number in (
            (program.forward_actions(index), gathers, every),
            (program.forward_actions(index), ~gathers, meeting),
            (program.backward_actions(index), np.ones(len(chunks), bool), every),
        ):
            for stage in range(placed.pp if number is not None and len(chunks) else 0):
                assert number is not None
                group[actions[alike, stage]] = count + number[alike]
                count += 1 + int(number[alike].max(initial=-1))
    return group


def passes_together(program: Program) -> IntArray | None:
    """Return ``collective_passes``, or None if no module has any."""
    modules = program.layout.modules
    return collective_passes(program) if any(m.scatters or m.expert_span > 1 for m in modules) else None


def price_layers(program: Program, index: int, layer_times: LayerTimes, loads: Loads) -> tuple[FloatArray, FloatArray]:
    """Return seconds of each layer in forward, and in backward (or weight pass) ``[chunks, layers]``."""
    module = program.model.modules[index]
    split = program.splits_backward(index)

    def priced(group: ModuleLayout, part: Loads, _: object) -> list[PassTimes]:
        return layer_times.layers_s(module, part, group.tp, group.cp, split, group.expert_groups)

    kinds = priced_by_width(program.layout.modules[index], program.chunks[index].replica, loads, priced)
    columns = [(kind.ahead_s, kind.back_s if kind.weight_s is None else kind.weight_s, kind.again_s) for kind in kinds]
    forward_s, backward_s, again_s = (
        np.stack(column, axis=1)[:, module.layer_kind] for column in zip(*columns, strict=True)
    )
    return forward_s, backward_s if split else backward_s + again_s * remade_layers(program, index)


def price_passes(
    program: Program,
    index: int,
    layers_s: tuple[FloatArray, FloatArray],
    cluster: ClusterSpec,
    gradient_bytes: int = FP32_BYTES,
) -> tuple[Passes, ...]:
    """Return the forwards and backwards of a module whose layers take ``layers_s``; no backwards if it is frozen."""
    module = program.model.modules[index]
    placed = program.layout.modules[index]
    traffic = layer_traffic(module, placed, cluster, gradient_bytes)
    forward_s, backward_s = layers_s
    runs = np.array([layer.backward_share > 0 for layer in module.layers])[::-1]
    nothing = np.zeros(len(module.layers))
    actions = program.forward_actions(index)[:, 0]
    gathers = gathering(program, index)
    forwards = tuple(
        Passes(actions[alike], forward_s[alike], ready_s, nothing)
        for alike, ready_s in ((gathers, traffic.gather_s), (~gathers, nothing))
        if alike.any()
    )
    if not runs.any():
        return forwards
    gather_s = traffic.again_s[::-1][runs]
    scatter_s = traffic.scatter_s[::-1][runs]
    backwards = Passes(program.backward_actions(index)[:, 0], backward_s[:, ::-1][:, runs], gather_s, scatter_s)
    return *forwards, backwards


def gathering(program: Program, index: int) -> BoolArray:
    """Return whether the forward of each chunk gathers weights: those of the first microbatch if they stay."""
    placed = program.layout.modules[index]
    chunks = program.chunks[index]
    if not placed.keeps_weights or not len(chunks):
        return np.full(len(chunks), placed.sharded)
    first = (chunks.microbatch == chunks.microbatch.min()) & placed.sharded
    return np.asarray(first & (chunks.part == chunks.part[first].min(initial=len(chunks.part))))


def remade_layers(program: Program, index: int) -> BoolArray:
    """Return whether the backward of each chunk recomputes each layer ``[chunks, layers]``."""
    module = program.model.modules[index]
    placed = program.layout.modules[index]
    covered = covered_layers(module)
    needed = covered & [layer.backward_share > 0 for layer in module.layers]
    if placed.recompute or not program.remade:
        return np.repeat((needed & placed.recompute)[None], len(program.chunks[index]), axis=0)
    stage = np.repeat(np.arange(placed.pp), placed.layers_per_stage)
    inside = np.concatenate([part.cumsum() for part in np.split(covered, np.cumsum(placed.layers_per_stage[:-1]))])
    return np.asarray(needed & (inside <= program.remade[index][:, stage]))


def _neighbours(program: Program, sharded: IntArray) -> tuple[IntArray, IntArray]:
    """Return the previous and next sharded pass of the same micro-step on each lane ``[entries]``; -1 if none."""
    counts = np.zeros(program.num_actions, bool)
    counts[sharded] = True
    order = program.lane_actions
    chained = counts[order[:-1]] & counts[order[1:]]
    chained &= (program.kind[order[:-1]] == Pass.FORWARD) | (program.kind[order[1:]] == Pass.BACKWARD)
    # Not from the end of one lane to the beginning of the next.
    ends = program.lane_offsets[1:-1] - 1
    chained[ends[(ends >= 0) & (ends < len(chained))]] = False
    before = np.full(len(order), -1)
    after = np.full(len(order), -1)
    before[1:][chained] = order[:-1][chained]
    after[:-1][chained] = order[1:][chained]
    return before, after
