"""Recomputation by chunk: keep activations where a fully recomputing program has free memory."""

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from entrain_bench.balancing.chunk_estimates import covered_layer_s
from entrain_bench.balancing.options import Memory
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, offsets_from_counts, sum_rows
from entrain_bench.base.compiled import njit
from entrain_bench.program import Program, recompute_chunks
from entrain_bench.program.columns import covered_per_stage
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.model import ModuleSpec

# Bytes and seconds count in whole units, so that equal choices are equal on every machine.
BYTES_UNIT = 1024
SECONDS_UNIT = 1e-6


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Options of a scheduler that can choose recomputation after it has ordered the passes.

    Attributes:
        memory: ``module`` leaves recomputation to the planner; ``stage`` recomputes as many layers of each stage as the
            order has no memory for, ``greedy`` those of each chunk. ``layout.recompute`` goes before it.
    """

    memory: Memory = field(default="module", kw_only=True)

    @property
    def chooses_recomputation(self) -> bool:
        """Whether the scheduler chooses recomputation instead of planners."""
        return self.memory != "module"

    def draft(self) -> Self:
        """Return the scheduler itself, because it searches for no order."""
        return self

    def within_memory(self, program: Program, profile: Profile) -> Program:
        """Return the program with the recomputation that these options choose."""
        if not self.chooses_recomputation or profile.job.request.recompute is not None:
            return program
        recompute = recompute_by_stage if self.memory == "stage" else recompute_by_chunk
        return recompute(recompute_all(program), profile)


@dataclass(frozen=True, slots=True)
class LaneOffers:
    """Intervals of lanes that may keep activations, in units of bytes and seconds."""

    first: IntArray  # entry of a lane's order from which each interval holds its activations ``[intervals]``
    last: IntArray  # and to which ``[intervals]``
    most: IntArray  # layers that it may keep ``[intervals]``
    size: IntArray  # memory of each layer ``[intervals]``
    gain: IntArray  # time that each layer saves ``[intervals]``
    spare: IntArray  # memory that is left during every entry if none is kept ``[entries]``


def recompute_all(program: Program) -> Program:
    """Return the program with every chunk recomputing all it can, except in modules that the layout recomputes."""
    remade = []
    for module, placed, rows in zip(program.model.modules, program.layout.modules, program.chunks, strict=True):
        covered = covered_per_stage(module, placed.layers_per_stage) * (not placed.recompute)
        remade.append(np.repeat(covered[None], len(rows), 0))
    return recompute_chunks(program, remade)


def recompute_by_stage(program: Program, profile: Profile) -> Program:
    """Return a program that recomputes all it can with as few recomputed layers per stage as memory demands."""
    if not program.remade:
        return program
    sizes, gains = _per_action(program, profile)
    most = [layers.max(axis=0, initial=0) for layers in program.remade]
    kept = [np.zeros_like(layers) for layers in most]

    def keeping(index: int, layers: IntArray) -> Program:
        stays = [layers if index == other else stays for other, stays in enumerate(kept)]
        return recompute_chunks(program, [remade - less for remade, less in zip(program.remade, stays, strict=True)])

    def worth(index: int) -> float:
        forward = program.forward_actions(index)
        return decisive(float(gains[forward].sum()) / max(1.0, float(sizes[forward].sum())))

    for index in sorted(range(len(most)), key=worth, reverse=True):
        low = np.zeros_like(most[index])
        high = most[index].copy()
        # All of them at first: mostly there is memory for that.
        middle = high
        while np.any(low < high):
            fits = _stages_fit(keeping(index, middle), index, profile)
            low = np.where(fits, middle, low)
            high = np.where(fits, high, middle - 1)
            middle = (low + high + 1) // 2
        kept[index] = low
    return keeping(0, kept[0])


def _stages_fit(program: Program, index: int, profile: Profile) -> BoolArray:
    """Return whether all lanes of a module's stages are within memory ``[stages]``."""
    over = profile.memory.peak_bytes(program) > profile.job.planning_budget_bytes
    blocks = program.layout.blocks[index]
    return np.array([not over[blocks.of_stage(stage)].any() for stage in range(blocks.num_stages)])


def recompute_by_chunk(program: Program, profile: Profile) -> Program:
    """Return the program with the least recomputation that its order has memory for, by chunk."""
    if not program.remade:
        return program
    offers, forwards = _offers(program, profile)
    kept = np.zeros(program.num_actions, np.int64)
    kept[forwards] = offers.most
    # Lanes that run a stage together keep as many layers as all of them can.
    np.minimum.at(kept, forwards, greedy(offers))
    stays = (kept[program.forward_actions(index)] for index in range(len(program.remade)))
    return recompute_chunks(program, [remade - less for remade, less in zip(program.remade, stays, strict=True)])


def greedy(offers: LaneOffers) -> IntArray:
    """Return layers kept if intervals are served by falling seconds per byte and held entry ``[intervals]``."""
    worth = offers.gain / (np.maximum(offers.size, 1) * (1.0 + offers.last - offers.first))
    order = np.argsort(-worth, kind="stable")
    kept: IntArray = _bought(order, offers.first, offers.last, offers.most, offers.size, offers.spare.copy())
    return kept


@njit()
def _bought(order, first, last, most, size, spare):  # type: ignore[no-untyped-def]
    """Return layers kept if intervals are served in order ``[intervals]``; their memory is taken from ``spare``."""
    kept = np.zeros(len(order), np.int64)
    for index in order:
        room = spare[first[index] : last[index] + 1].min() // max(size[index], 1)
        kept[index] = max(0, min(most[index], room))
        for entry in range(first[index], last[index] + 1):
            spare[entry] -= kept[index] * size[index]
    return kept


def _offers(program: Program, profile: Profile) -> tuple[LaneOffers, IntArray]:
    """Return the offers of all lanes, entries of ``lane_actions``, and the forward of each interval ``[intervals]``."""
    spare = profile.job.planning_budget_bytes - profile.memory.over_program(program)[0]
    whole = np.maximum(np.floor(spare / BYTES_UNIT), 0.0).astype(np.int64)
    sizes, gains = _per_action(program, profile)
    most, backward = np.zeros((2, program.num_actions), np.int64)
    for index, layers in enumerate(program.remade):
        forwards = program.forward_actions(index)
        most[forwards] = layers
        backward[forwards] = program.backward_actions(index)
    actions = program.lane_actions
    by_action = np.argsort(actions, kind="stable")
    place = np.empty_like(by_action)
    place[by_action] = np.arange(len(actions))
    begin = offsets_from_counts(np.bincount(actions, minlength=program.num_actions))
    first = np.flatnonzero(most[actions] > 0)
    forwards = actions[first]
    # An action and its backward are on the same lanes: their entries are pairs by rising lane.
    last = by_action[place[first] - begin[forwards] + begin[backward[forwards]]]
    return LaneOffers(first, last, most[forwards], sizes[forwards], gains[forwards], whole), forwards


def _per_action(program: Program, profile: Profile) -> tuple[IntArray, IntArray]:
    """Return the most memory units that a kept layer of each forward takes, and time units it saves ``[actions]``."""
    sizes, gains = np.zeros((2, program.num_actions), np.int64)
    modules = zip(program.model.modules, program.layout.modules, program.chunks, strict=True)
    for index, (module, placed, rows) in enumerate(modules):
        tokens = sum_rows(rows.offsets, module.lengths(program.shapes, rows.members))
        used, place = np.unique(placed.degree_of_copy[rows.replica], return_inverse=True)
        per_token = np.array([_bytes_per_token(module, placed.at(one), profile) for one in used.tolist()])
        chunk_bytes = tokens[:, None] * per_token.reshape(len(used), placed.pp)[place]
        forward = program.forward_actions(index)
        sizes[forward] = np.ceil(chunk_bytes / BYTES_UNIT).astype(np.int64)
        layer_s = covered_layer_s(module, placed, program.shapes, rows, profile)
        gains[forward] = np.maximum(np.rint(layer_s / SECONDS_UNIT), 1.0).astype(np.int64)
    return sizes, gains


def _bytes_per_token(module: ModuleSpec, placed: ModuleLayout, profile: Profile) -> FloatArray:
    """Return the most bytes per token that a layer of each stage keeps beyond its input on a rank ``[stages]``."""
    kept, _ = profile.memory.layer_bytes(module, replace(placed, recompute=False))
    less, _ = profile.memory.layer_bytes(module, replace(placed, recompute=True))
    covered = np.array([kind.recomputed for kind in module.kinds])
    held = module.kind_counts(placed.layers_per_stage) > 0
    return np.asarray(np.max(np.where(held & covered, kept - less, 0.0), axis=1))
