"""One rank's plan of an iteration: where it stands in a layout, its actions in order, and its messages.

Both ends derive a message from the program; nothing is negotiated. Chunks may feed any chunks on any ranks, which
megatron-core's bridge communicators cannot express.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import takewhile

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_durations
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.costs.edges import held_s
from entrain_bench.costs.loads import rank_rows
from entrain_bench.costs.sharding import collective_passes
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import PACK, FrameworkOptions

Channel = tuple[int, int]  # sender and receiver
DEFAULTS = FrameworkOptions()

# Rows of a tensor: consecutive ones, any, or all of them in order. Slices are cut and filled without an index.
Rows = slice | IntArray | None


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part of one module: a stage of a replica or group, at a place in its block (TP innermost)."""

    module: int
    replica: int
    stage: int
    position: int


def weights_of(layout: Layout, rank: int) -> list[Place]:
    """The stages whose weights the rank holds, with its replica of each."""
    return [
        Place(index, replica, stage, position)
        for index, module in enumerate(layout.modules)
        for replica, stage, position in np.argwhere(module.ranks == rank).tolist()
    ]


def places_of(layout: Layout, rank: int) -> list[Place]:
    """The blocks that the rank computes in: of its replicas, or of all groups that it is in."""
    places = [place for place in weights_of(layout, rank) if not layout.modules[place.module].widths]
    for index, module in enumerate(layout.modules):
        places += [Place(index, *where) for where in (_group_places(module, rank) if module.widths else ())]
    return places


def _group_places(module: ModuleLayout, rank: int) -> Iterable[tuple[int, int, int]]:
    for stage, column in np.argwhere(module.plane == rank).tolist():
        first = 0
        for (tp, cp), count in zip(module.widths, module.num_groups.tolist(), strict=True):
            group, position = divmod(column, tp * cp)
            if group < count:
                yield first + group, stage, position
            first += count


def block_of(layout: Layout, module: int, replica: int, stage: int) -> list[int]:
    """The ranks of a stage of a replica or group, TP innermost."""
    placed = layout.modules[module]
    if not placed.widths:
        ranks: list[int] = placed.ranks[replica, stage].tolist()
        return ranks
    degree = int(placed.degree_of_copy[replica])
    tp, cp = placed.widths[degree]
    first = (replica - int(placed.num_groups[:degree].sum())) * tp * cp
    group: list[int] = placed.plane[stage, first : first + tp * cp].tolist()
    return group


def lane_of_rank(layout: Layout, rank: int) -> int | None:
    """The lane the rank acts with; None for a rank the layout does not use."""

    def blocks(one: int) -> list[tuple[int, int, int]]:
        return [(place.module, place.replica, place.stage) for place in places_of(layout, one)]

    held = blocks(rank)
    firsts = layout.lane_first_rank.tolist()
    return next((lane for lane, first in enumerate(firsts) if blocks(first) == held), None)


def sending_ranks(from_ranks: Sequence[int], to_ranks: Sequence[int]) -> list[int]:
    """The sender for each receiving rank, from a block of one module to another's; a block's ranks hold all rows."""
    return [rank if rank in from_ranks else from_ranks[i % len(from_ranks)] for i, rank in enumerate(to_ranks)]


def channels_of(program: Program) -> tuple[Channel, ...]:
    """The channels that a program needs, of all ranks."""
    source = program.dep_actions
    target = rows_of(program.dep_offsets)
    edges = (program.dep_bytes > 0) & (program.chunk[target] >= 0)
    columns = (program.module, program.replica, program.stage)
    ends = [column[actions[edges]] for actions in (source, target) for column in columns]
    channels: set[Channel] = set()
    for *sender, module, replica, stage in np.unique(np.stack(ends, axis=1), axis=0).tolist():
        from_ranks = block_of(program.layout, *sender)
        to_ranks = block_of(program.layout, module, replica, stage)
        senders = from_ranks if sender[0] == module else sending_ranks(from_ranks, to_ranks)
        channels.update(zip(senders, to_ranks, strict=True))
    return tuple(sorted(channel for channel in channels if channel[0] != channel[1]))


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A tensor of rows of ``width`` elements from one action to another; it may stay on its rank."""

    source: int
    target: int
    sender: int
    receiver: int
    num_rows: int
    width: int
    source_rows: Rows = None
    target_rows: Rows = None

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the message at its receiver."""
        return self.source, self.target


@dataclass(frozen=True, slots=True)
class Start:
    """A collective of a stage's replicas that a rank begins at a place in the order of all actions, behind messages."""

    place: int
    module: int
    stage: int
    sums: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a rank, with its messages and what its rank begins before it.

    ``ends_gradients``: this rank's last pass that adds to the stage's gradients; ``closes``: the last of all replicas,
    which begins their sum. ``starts``: gathers of weights, and sums that another rank's pass closes.
    """

    action: int
    place: Place
    kind: Pass
    chunk: int
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    ends_gradients: bool = False
    closes: bool = False
    starts: tuple[Start, ...] = ()


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's actions and messages, in order; channels and ``order`` are those of all ranks."""

    rank: int
    steps: tuple[Step, ...]
    arrivals: tuple[Message, ...]
    channels: tuple[Channel, ...]
    order: IntArray


@dataclass(frozen=True, slots=True)
class EmptyPass:
    """A pass of a sharded module in which a replica has no chunk, and takes part for the sake of others."""

    module: int
    kind: Pass
    microbatch: int
    part: int


def plan_rank(
    program: Program, rank: int, framework: FrameworkOptions = DEFAULTS, order: IntArray | None = None
) -> RankPlan:
    """The rank's actions in the program's order, with all its messages; ``order`` of actions is equal on all ranks."""
    messages = _RankMessages(program, rank, framework)
    order = order_of_actions(program) if order is None else order
    # In the order of all messages: that of the actions that send them, then of their targets.
    arrivals = [m for messages_in in messages.incoming.values() for m in messages_in if m.sender != rank]
    arrivals.sort(key=lambda m: (order[m.source], m.target))
    return RankPlan(rank, messages.steps(order), tuple(arrivals), channels_of(program), order)


class _RankMessages:
    def __init__(self, program: Program, rank: int, framework: FrameworkOptions) -> None:
        self.program = program
        self.rank = rank
        self.framework = framework
        self.places = {(p.module, p.replica, p.stage): p for p in places_of(program.layout, rank)}
        lane = lane_of_rank(program.layout, rank)
        of_lanes = np.split(program.lane_actions, program.lane_offsets[1:-1])
        self.actions: list[int] = [] if lane is None else of_lanes[lane].tolist()
        self.incoming: dict[int, list[Message]] = defaultdict(list)
        self.outgoing: dict[int, list[Message]] = defaultdict(list)
        self._rows: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        columns = (program.module, program.stage, program.replica, program.chunk)
        self._labels = np.stack(columns, axis=1)
        mine = np.zeros(program.num_actions, bool)
        mine[self.actions] = True
        mine &= program.chunk >= 0
        source = program.dep_actions
        target = rows_of(program.dep_offsets)
        edges = np.flatnonzero((program.dep_bytes > 0) & (mine[source] | mine[target]))
        for edge in edges.tolist():
            for message in self._messages(int(source[edge]), int(target[edge])):
                if message.receiver == self.rank:
                    self.incoming[message.target].append(message)
                if message.sender == self.rank:
                    self.outgoing[message.source].append(message)
        for messages in self.outgoing.values():
            messages.sort(key=lambda m: (m.target, m.receiver))

    def steps(self, order: IntArray) -> tuple[Step, ...]:
        program = self.program
        # A chunk's weight pass, if it has one, follows its backward.
        learning = [action for action in self.actions if program.kind[action] in (Pass.BACKWARD, Pass.WEIGHT)]
        ends = {(place.module, place.stage): action for action in learning for place in (self._place(action),)}
        closing, starts = self._collectives(order)
        return tuple(
            Step(
                action,
                self._place(action),
                Pass(int(program.kind[action])),
                int(program.chunk[action]),
                tuple(self.incoming[action]),
                tuple(self.outgoing[action]),
                action in ends.values(),
                action in closing,
                tuple(sorted(starts[action], key=lambda start: start.place)),
            )
            for action in self.actions
        )

    def _collectives(self, order: IntArray) -> tuple[set[int], dict[int, list[Start]]]:
        """Actions of this rank that close a stage's gradients, and collectives it begins, by the next action."""
        program = self.program
        places = order[self.actions]
        closing = set()
        starts = defaultdict(list)
        for module, stage in sorted({(place.module, place.stage) for place in self.places.values()}):
            placed = program.layout.modules[module]
            if placed.sharded:
                continue
            mine = (program.module == module) & (program.stage == stage)
            forwards = np.flatnonzero(mine & (program.kind == Pass.FORWARD))
            learning = np.flatnonzero(mine & np.isin(program.kind, (Pass.BACKWARD, Pass.WEIGHT)))
            if not len(learning):
                continue
            first = -1 if self.framework.align_param_gather else int(order[forwards].min())
            for place, sums in ((first, False), (int(order[learning].max()), True)):
                index = int(np.searchsorted(places, place))
                if sums and places[index] == place:
                    closing.add(self.actions[index])
                else:
                    starts[self.actions[index]].append(Start(place, module, stage, sums))
        return closing, starts

    def _place(self, action: int) -> Place:
        module, stage, replica, _ = self._labels[action].tolist()
        if replica >= 0:
            return self.places[module, replica, stage]
        return next(place for place in self.places.values() if (place.module, place.stage) == (module, stage))

    def _messages(self, source: int, target: int) -> Iterable[Message]:
        module = int(self.program.module[source])
        senders, receivers = map(self._block, (source, target))
        if module == self.program.module[target]:
            rows: tuple[int, Rows, Rows] = (self._local_tokens(target), None, None)
            width = self.program.model.modules[module].config.hidden_size
        else:
            rows = self._common_rows(source, target)
            width = self.program.model.llm.config.hidden_size
            senders = sending_ranks(senders, receivers)
        num_rows, of_source, of_target = rows
        for sender, receiver in zip(senders, receivers, strict=True):
            yield Message(source, target, sender, receiver, num_rows, width, of_source, of_target)

    def _block(self, action: int) -> list[int]:
        module, stage, replica, _ = self._labels[action].tolist()
        return block_of(self.program.layout, module, replica, stage)

    def _local_tokens(self, action: int) -> int:
        module, _, replica, chunk = self._labels[action].tolist()
        spec = self.program.model.modules[module]
        placed = self.program.layout.modules[module]
        tp, cp = placed.degrees[placed.degree_of_copy[replica]]
        lengths = spec.lengths(self.program.shapes, self.program.chunks[module].units(chunk))
        parts = tp if self.framework.splits_tokens(spec, tp) else 1
        return rank_rows(lengths, cp, whole_pack=self.framework.cp_split == PACK, parts=parts) // parts

    def _common_rows(self, source: int, target: int) -> tuple[int, Rows, Rows]:
        """Rows of the items that both chunks have in common: how many, and where in either tensor."""
        source_items = self._item_rows(source)
        target_items = self._item_rows(target)
        common = [item for item in source_items if item in target_items]
        rows = []
        for items in (source_items, target_items):
            places = np.concatenate([np.arange(*items[item]) for item in common])
            rows.append(_named(places, max(end for _, end in items.values())))
        return len(places), rows[0], rows[1]

    def _item_rows(self, action: int) -> dict[int, tuple[int, int]]:
        """First and last row of every item's projected tokens at the module boundary of a chunk."""
        module, *_, chunk = self._labels[action].tolist()
        if (module, chunk) not in self._rows:
            shapes = self.program.shapes
            items = self.program.chunks[module].units(chunk)
            if not self.program.model.modules[module].is_encoder:
                items = take_rows(shapes.item_offsets, items)[1]
            ends = np.cumsum(shapes.item_llm_tokens[items])
            starts = ends - shapes.item_llm_tokens[items]
            spans = zip(starts.tolist(), ends.tolist(), strict=True)
            self._rows[module, chunk] = dict(zip(items.tolist(), spans, strict=True))
        return self._rows[module, chunk]


def _named(places: IntArray, total: int) -> Rows:
    first = int(places[0])
    count = len(places)
    if not np.array_equal(places, np.arange(first, first + count)):
        return places
    return None if count == total else slice(first, first + count)


def empty_passes(program: Program, steps: Iterable[Step]) -> dict[int, list[EmptyPass]]:
    """Return empty passes that a rank runs before its steps, by step index, in one order of collective passes."""
    if not any(placed.sharded for placed in program.layout.modules):
        return {}
    group = collective_passes(program)
    turns, example = np.unique(group, return_index=True)
    action_of = dict(zip(turns.tolist(), example.tolist(), strict=True))
    rest = iter(order_of_groups(program, group))
    empty = dict[int, list[EmptyPass]]()
    for place, step in enumerate(steps):
        turn_here = int(group[step.action])
        if turn_here >= 0 or step.kind is Pass.GRAD_SYNC:
            # Up to the own one, or all that are left.
            empty[place] = [_as_empty(program, action_of[turn]) for turn in takewhile(turn_here.__ne__, rest)]
    return {place: skipped for place, skipped in empty.items() if skipped}


def _as_empty(program: Program, action: int) -> EmptyPass:
    module = int(program.module[action])
    chunk = int(program.chunk[action])
    chunks = program.chunks[module]
    return EmptyPass(module, Pass(int(program.kind[action])), int(chunks.microbatch[chunk]), int(chunks.part[chunk]))


def order_of_actions(program: Program, seconds: FloatArray | None = None) -> IntArray:
    """Place of each action in one order of all, the same on every rank ``[actions]``.

    Actions come in the order in which they would end if only they took time (``seconds`` each; None: the same), so most
    messages arrive while other actions run. Collective passes of one turn come before all of the next.
    """
    work = np.ones(program.num_actions) if seconds is None else seconds
    ns = np.maximum(np.rint(work * 1e9), 1).astype(np.int64)
    order = np.empty(program.num_actions, np.int64)
    order[np.argsort(positions_of_actions(program, ns) + ns, kind="stable")] = np.arange(program.num_actions)
    return order


def believed_order(program: Program, profile: Profile) -> IntArray:
    """``order_of_actions`` if passes and the transfers that hold their ranks take as long as the profile estimates."""
    seconds = np.zeros(program.num_actions)
    handed = profile.programs.handovers(program)
    seconds[: program.first_action[-1]] = packed_durations(program, profile)
    return order_of_actions(program, seconds + held_s(program, handed.send_s, handed.receive_s))


def positions_of_actions(program: Program, work: IntArray | None = None) -> IntArray:
    """Work of the longest chain that must end before each action starts ``[actions]``; None: 1 for each action."""
    lane = rows_of(program.lane_offsets)
    action = program.lane_actions
    follows = lane[1:] == lane[:-1]
    ends, begins = _turns(program)
    before = np.concatenate([program.dep_actions, action[:-1][follows], ends])
    after = np.concatenate([rows_of(program.dep_offsets), action[1:][follows], begins])
    num_nodes = max(program.num_actions, int(begins.max(initial=-1)) + 1)
    order = np.argsort(before, kind="stable")
    offsets = offsets_from_counts(np.bincount(before, minlength=num_nodes))
    after = after[order]
    missing = np.bincount(after, minlength=num_nodes)
    work = np.ones(program.num_actions, np.int64) if work is None else work
    work = np.append(work, np.zeros(num_nodes - program.num_actions, np.int64))
    position = np.zeros(num_nodes, np.int64)
    ready = np.flatnonzero(missing == 0)
    while len(ready):
        bounds, edges = take_rows(offsets, ready)
        freed = after[edges]
        np.maximum.at(position, freed, np.repeat(position[ready] + work[ready], np.diff(bounds)))
        np.subtract.at(missing, freed, 1)
        ready = np.unique(freed[missing[freed] == 0])
    assert not missing.any(), "an order that lanes, dependencies and turns agree with"
    return position[: program.num_actions]


def _turns(program: Program) -> tuple[IntArray, IntArray]:
    """Edges over further nodes that put the passes of a collective before those of the next ``[edges]``."""
    nothing = np.zeros(0, np.int64)
    if not any(placed.sharded for placed in program.layout.modules):
        return nothing, nothing
    group = collective_passes(program)
    turn = np.empty(int(group.max()) + 1, np.int64)
    turn[order_of_groups(program, group)] = np.arange(len(turn))
    passes = np.flatnonzero(group >= 0)
    gap = program.num_actions + turn[group[passes]]
    later = gap > program.num_actions
    return np.concatenate([passes, gap[later] - 1]), np.concatenate([gap, passes[later]])


def order_of_groups(program: Program, group: IntArray) -> list[int]:
    """Groups in an order that every lane's and every dependency's agrees with; of several the lowest number first."""
    lane = rows_of(program.lane_offsets)
    action = program.lane_actions
    member = group[action] >= 0
    lane = lane[member]
    turn = group[action[member]]
    same = lane[1:] == lane[:-1]
    source = group[program.dep_actions]
    target = group[rows_of(program.dep_offsets)]
    both = (source >= 0) & (target >= 0)
    before = np.concatenate([turn[:-1][same], source[both]])
    after = np.concatenate([turn[1:][same], target[both]])
    sorter = TopologicalSorter(dict.fromkeys(range(int(group.max()) + 1), ()))
    for one, other in zip(before.tolist(), after.tolist(), strict=True):
        sorter.add(other, one)
    sorter.prepare()
    ready = list[int]()
    order = list[int]()
    while sorter.is_active():
        for freed in sorter.get_ready():
            heappush(ready, freed)
        order.append(heappop(ready))
        sorter.done(order[-1])
    return order
