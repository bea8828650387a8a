"""Samples to replicas and microbatches in two dimensions; encoder chunks to whichever ranks the LLM leaves time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_units_s
from entrain_bench.balancing.lpt import deal, lpt_with_exchange
from entrain_bench.balancing.planning import mean_length
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

from .packs import fastest_packs

# Bisection steps of a level: to a part in 10^12 of the greatest.
LEVEL_STEPS = 40
# Share of an encoder chunk's time that a chunk costs anyway, about: what its tokens follow from. Items are never cut.
OVERHEAD = 0.05
# Chunks that cost so many times as much as a replica's mean one are placed before the others.
HEAVY = 2.0


def others(model: ModelSpec) -> dict[int, ModuleSpec]:
    """All modules but the LLM, by their positions in the model."""
    return {index: module for index, module in enumerate(model.modules) if index != model.llm_index}


def unit_layers_s(
    profile: Profile, module: ModuleSpec, shapes: SampleShapes, tp: int, cp: int, recompute: bool
) -> FloatArray:
    """Estimated seconds that a unit adds to both passes of a layer, with recomputation ``[units, kinds]``."""
    forward, backward = packed_units_s(module, shapes, tp, cp, profile)
    return np.asarray(forward + backward + forward * _remade(module, recompute))


def chunk_layers_s(profile: Profile, module: ModuleSpec, tp: int, cp: int, recompute: bool) -> FloatArray:
    """Estimated fixed seconds of a chunk in both passes of a layer, with recomputation ``[kinds]``."""
    forward, backward = profile.layers.pack_times(module, tp, cp).chunk_s
    return np.asarray(forward + backward + forward * _remade(module, recompute))


def chunk_tokens(profile: Profile, module: ModuleSpec, lengths: IntArray, tp: int, cp: int) -> float:
    """Tokens at which a chunk of units of mean length spends ``OVERHEAD`` of its time on what a chunk costs anyway."""
    if not len(lengths):
        return 1.0
    mean = mean_length(lengths)
    times = profile.layers.pack_times(module, tp, cp)
    counts = np.bincount(module.layer_kind, minlength=len(module.kinds))
    added_s = float(matmul(times.of(np.array([mean]))[:, 0], counts).sum())
    fixed_s = float(matmul(times.chunk_s, counts).sum())
    return max(1.0, mean * (fixed_s / max(added_s, 1e-12)) * (1 / OVERHEAD - 1))


def _remade(module: ModuleSpec, recompute: bool) -> FloatArray:
    return np.array([recompute and kind.remade_share for kind in module.kinds], np.float64)


@njit()
def level_shares(base_s, cost_s):  # type: ignore[no-untyped-def]
    """Shares ``[replicas, copies]`` of an encoder's work ``[replicas, stages]`` that level the copies' lanes."""
    replicas, copies, _ = base_s.shape
    shares = np.zeros((replicas, copies))
    for replica in range(replicas):
        low_s = np.inf
        for copy in range(copies):
            low_s = min(low_s, base_s[replica, copy].max())
        high_s = low_s + cost_s[replica].max()
        for _ in range(LEVEL_STEPS):
            middle_s = (low_s + high_s) / 2
            if _taken(middle_s, base_s[replica], cost_s[replica], shares[replica]) >= 1:
                high_s = middle_s
            else:
                low_s = middle_s
        total = _taken(high_s, base_s[replica], cost_s[replica], shares[replica])
        for copy in range(copies):
            shares[replica, copy] = shares[replica, copy] / total if total > 0 else 1 / copies
    return shares


@njit()
def _taken(level_s, base_s, cost_s, share):  # type: ignore[no-untyped-def]
    """Share of the work that each copy can take below a level, and their sum."""
    for copy in range(len(base_s)):
        share[copy] = max(((level_s - base_s[copy]) / np.maximum(cost_s, 1e-12)).min(), 0.0)
    return share.sum()


@dataclass(frozen=True, slots=True)
class BraidAssigner:
    """Balances samples over replicas and microbatches, then encoder (and generator) chunks over copies in each replica.

    Attributes:
        balance: whether samples are balanced; otherwise they stay in order of arrival.
        compare: whether groups of several widths compare sizes and orders of packs (``packs``).
        level: whether encoder chunks level the ranks of a replica; otherwise all its copies get the same.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    balance: bool = True
    compare: bool = True
    level: bool = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Labels of all units; ``IncompatibleError`` if DPs do not divide, ``OutOfMemoryError`` if no rounds fit."""
        profile = profile.smoothed()
        if layout.modules[0].widths:
            packed = fastest_packs(shapes, layout, profile, self.compare)[1]
            if not packed.modules:
                raise OutOfMemoryError(
                    f"assignment: {len(shapes)} samples do not fit in memory in any number of rounds"
                )
            return packed
        model = profile.job.model
        index_of_llm = model.llm_index
        llm = layout.modules[index_of_llm]
        room_bytes = profile.job.planning_budget_bytes - float(profile.memory.lane_state_bytes(layout).max())
        pairs = zip(model.modules, layout.modules, strict=True)
        work = [_work(profile, module, shapes, placed, room_bytes) for module, placed in pairs]
        replica, microbatch = self._samples(profile, shapes, layout, work)
        busy_s = _lane_seconds(layout, index_of_llm, _sums(replica, work[index_of_llm], llm.dp))
        chunks_s = _chunk_work(profile, model.llm, llm) * layout.num_microbatches
        busy_s += _lane_seconds(layout, index_of_llm, np.tile(chunks_s, (llm.dp, 1)))
        items = {}
        for index, module in others(model).items():
            placed = layout.modules[index]
            owner = module.owners(shapes, module.units(shapes))
            tokens = module.lengths(shapes, module.units(shapes))
            most = chunk_tokens(profile, module, tokens, placed.tp, placed.cp)
            chunk = deal_chunks(replica[owner], microbatch[owner], work[index].sum(axis=1), tokens, most)
            items[index] = owner, chunk
        before = [pair for index, pair in items.items() if index < index_of_llm]
        behind = [pair for index, pair in items.items() if index > index_of_llm]
        first, middle = find_places(replica, microbatch, before, behind)
        labels = []
        for index, (owner, chunk) in items.items():
            placed = layout.modules[index]
            copies = _copies(placed, llm)
            place = (first if index < index_of_llm else middle)[owner] + chunk
            of_replica = replica[owner] // max(1, llm.dp // placed.dp)
            total = _sums(of_replica, work[index], placed.dp // copies)
            shares = self._share_out(layout, index, busy_s, total, copies)
            chunk_s = float(_chunk_work(profile, model.modules[index], placed).sum())
            copy = spread_chunks(of_replica, place, work[index].sum(axis=1), shares, chunk_s)
            labels.append(ModuleAssignment(of_replica * copies + copy, place))
        labels.insert(index_of_llm, ModuleAssignment(replica, middle))
        return Assignment(tuple(labels))

    def _samples(
        self, profile: Profile, shapes: SampleShapes, layout: Layout, work: list[FloatArray]
    ) -> tuple[IntArray, IntArray]:
        """Replica and microbatch of every sample."""
        llm = layout.modules[profile.job.model.llm_index]
        count = layout.num_microbatches
        if not self.balance:
            group = np.arange(len(shapes)) // max(1, -(-len(shapes) // (llm.dp * count)))
            return group % llm.dp, group // llm.dp
        cost = two_columns(self._sample_lanes(profile, shapes, layout, work))
        replica = lpt_with_exchange(cost, llm.dp)
        microbatch = np.zeros(len(shapes), np.int64)
        for one in range(llm.dp):
            mine = np.flatnonzero(replica == one)
            if len(mine):
                microbatch[mine] = lpt_with_exchange(np.ascontiguousarray(cost[mine]), min(count, len(mine)))
        return replica, microbatch

    def _sample_lanes(
        self, profile: Profile, shapes: SampleShapes, layout: Layout, work: list[FloatArray]
    ) -> FloatArray:
        """Seconds that each sample costs every lane of an LLM replica on average ``[samples, lanes]``."""
        model = profile.job.model
        index_of_llm = profile.job.model.llm_index
        llm = layout.modules[index_of_llm]
        busy_s = _lane_seconds(layout, index_of_llm, np.tile(work[index_of_llm].sum(axis=0) / llm.dp, (llm.dp, 1)))
        held = [
            blocks.lanes[: blocks.offsets[max(1, placed.dp // llm.dp) * placed.pp]]
            for blocks, placed in zip(layout.blocks, layout.modules, strict=True)
        ]
        lanes = np.unique(np.concatenate(held))
        loads = np.zeros((len(shapes), len(lanes)))

        def add(index: int, copy: int, stage_s: FloatArray) -> None:
            blocks = layout.blocks[index]
            for stage, seconds in enumerate(stage_s.T):
                block = copy * layout.modules[index].pp + stage
                mine = blocks.lanes[blocks.offsets[block] : blocks.offsets[block + 1]]
                loads[:, np.searchsorted(lanes, mine)] += seconds[:, None]

        add(index_of_llm, 0, work[index_of_llm])
        for index, module in others(model).items():
            placed = layout.modules[index]
            copies = _copies(placed, llm)
            total = np.tile(work[index].sum(axis=0) * copies / placed.dp, (placed.dp // copies, 1))
            shares = self._share_out(layout, index, busy_s, total, copies)
            of_sample = _sums(module.owners(shapes, module.units(shapes)), work[index], len(shapes))
            for copy in range(copies):
                add(index, copy, of_sample * shares[0, copy])
        return loads

    def _share_out(self, layout: Layout, index: int, busy_s: FloatArray, total: FloatArray, copies: int) -> FloatArray:
        """Shares of an encoder's copies in each replica's work ``[replicas, copies]``, which lanes are busy with."""
        shares = np.full((len(total), copies), 1 / copies)
        placed = layout.modules[index]
        if self.level:
            blocks = layout.blocks[index]
            base = np.maximum.reduceat(busy_s[blocks.lanes], blocks.offsets[:-1])
            shares = level_shares(base.reshape(len(total), copies, placed.pp), total)
        busy_s += _lane_seconds(layout, index, (shares[:, :, None] * total[:, None]).reshape(placed.dp, -1))
        return shares


def two_columns(loads: FloatArray) -> FloatArray:
    """The loads ``[samples, lanes]`` of the two lanes that differ most, as shares of their totals ``[samples, 2]``."""
    share = loads / np.maximum(loads.sum(axis=0), 1e-300)
    off = decisive(np.abs(share - share.mean(axis=1, keepdims=True)).sum(axis=0))
    one = int(off.argmax())
    other = int(decisive(np.abs(share - share[:, [one]]).sum(axis=0)).argmax())
    return np.ascontiguousarray(share[:, [one, other]])


def deal_chunks(
    replica: IntArray, microbatch: IntArray, cost_s: FloatArray, tokens: IntArray, most_tokens: float
) -> IntArray:
    """Chunk of each item, counted in its microbatch: in every one as many as tokens ask for, by LPT ``[items]``."""
    key = replica * (1 + int(microbatch.max(initial=0))) + microbatch
    _, group, size = np.unique(key, return_inverse=True, return_counts=True)
    wanted = np.rint(np.bincount(group, tokens) / most_tokens).astype(np.int64)
    count = np.clip(wanted, 1, size)
    order = np.argsort(-decisive(cost_s), kind="stable")
    return np.asarray(deal(order, group, cost_s, count))


def find_places(
    replica: IntArray,
    microbatch: IntArray,
    before: Sequence[tuple[IntArray, IntArray]],
    behind: Sequence[tuple[IntArray, IntArray]] = (),
) -> tuple[IntArray, IntArray]:
    """Places of each sample's microbatch in its replica's order ``[samples]``: the first, and the LLM's.

    Encoder chunks take a microbatch's places up to the LLM's, generator chunks those from there on. ``before`` has by
    encoder, of each item its sample and its chunk, counted in the microbatch ``[items]``; ``behind`` by generator.
    """
    ahead, later = np.ones((2, 1 + int(replica.max(initial=0)), 1 + int(microbatch.max(initial=0))), np.int64)
    for count, items in ((ahead, before), (later, behind)):
        for owner, chunk in items:
            np.maximum.at(count, (replica[owner], microbatch[owner]), chunk + 1)
    whole = ahead + later - 1
    first = (whole.cumsum(axis=1) - whole)[replica, microbatch]
    return first, first + ahead[replica, microbatch] - 1


def spread_chunks(
    replica: IntArray, chunk: IntArray, cost_s: FloatArray, shares: FloatArray, chunk_s: float = 0.0
) -> IntArray:
    """Copy of the encoder that runs each item's chunk, by place in its replica's order ``[items]``.

    First the heavy chunks, the heaviest first, each to the copy that has most of its share left; then, chunk after
    chunk, to the copy furthest below its share ``[replicas, copies]``. A chunk costs ``chunk_s`` besides its items.
    """
    most = 1 + int(chunk.max(initial=0))
    key, member = np.unique(replica * most + chunk, return_inverse=True)
    chunk_replica = key // most
    seconds = np.bincount(member, cost_s) + chunk_s
    total = np.bincount(chunk_replica, seconds, len(shares))
    mean = total / np.maximum(np.bincount(chunk_replica, minlength=len(shares)), 1)
    heavy = np.flatnonzero(seconds > HEAVY * mean[chunk_replica])
    heavy = heavy[np.argsort(-decisive(seconds[heavy]), kind="stable")]
    return np.asarray(_spread(chunk_replica, seconds, shares, shares * total[:, None], heavy)[member])


@njit()
def _spread(replica, cost_s, shares, target_s, heavy):  # type: ignore[no-untyped-def]
    carried = np.zeros_like(shares)
    chosen = np.full(len(replica), -1)
    for chunk in heavy:
        mine = replica[chunk]
        chosen[chunk] = (target_s[mine] - carried[mine]).argmax()
        carried[mine, chosen[chunk]] += cost_s[chunk]
    for chunk in range(len(replica)):
        if chosen[chunk] >= 0:
            continue
        mine = replica[chunk]
        best_s = np.inf
        for copy in range(shares.shape[1]):
            if shares[mine, copy] > 0:
                after_s = (carried[mine, copy] + cost_s[chunk]) / shares[mine, copy]
                if after_s < best_s * (1 - 1e-9):
                    chosen[chunk] = copy
                    best_s = after_s
        carried[mine, chosen[chunk]] += cost_s[chunk]
    return chosen


def _copies(encoder: ModuleLayout, llm: ModuleLayout) -> int:
    """Copies of an encoder that one LLM replica's items are shared out among; 1 if it serves several replicas."""
    if encoder.dp % llm.dp and llm.dp % encoder.dp:
        raise IncompatibleError(
            f"strategy.assigner: {encoder.module} has dp={encoder.dp}, {llm.module} has dp={llm.dp}; one must "
            "be a multiple of the other"
        )
    return max(1, encoder.dp // llm.dp)


def _work(
    profile: Profile, module: ModuleSpec, shapes: SampleShapes, placed: ModuleLayout, room_bytes: float
) -> FloatArray:
    """Load of each unit on each stage ``[units, stages]``; one that does not fit memory alone will be recomputed."""
    counts = module.kind_counts(placed.layers_per_stage).T
    seconds, again = (
        matmul(unit_layers_s(profile, module, shapes, placed.tp, placed.cp, recompute), counts)
        for recompute in (placed.recompute, True)
    )
    if placed.recompute or profile.job.request.recompute is not None:
        return seconds
    token_bytes, _ = profile.memory.token_bytes(module, placed)
    lengths = module.lengths(shapes, module.units(shapes))
    filled = np.outer(lengths, token_bytes) / max(room_bytes, 1.0)
    return np.asarray(seconds + np.clip(2 * filled - 1, 0.0, 1.0) * (again - seconds))


def _chunk_work(profile: Profile, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
    kinds = chunk_layers_s(profile, module, placed.tp, placed.cp, placed.recompute)
    return matmul(kinds, module.kind_counts(placed.layers_per_stage).T)


def _sums(label: IntArray, values: FloatArray, count: int) -> FloatArray:
    """Sum of the rows of each label ``[count, columns]``."""
    return np.stack([np.bincount(label, column, count) for column in values.T], axis=1)


def _lane_seconds(layout: Layout, index: int, stage_s: FloatArray) -> FloatArray:
    """A module's seconds on each lane ``[lanes]``, from those of its stages ``[replicas, stages]``."""
    blocks = layout.blocks[index]
    total = np.zeros(layout.num_lanes)
    np.add.at(total, blocks.lanes, np.repeat(stage_s.ravel(), np.diff(blocks.offsets)))
    return total
