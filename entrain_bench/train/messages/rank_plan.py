"""One rank's plan of an iteration: its place in a layout, its actions in order, and its messages.

Both ends derive messages from the program. Any chunks may feed any chunks, unlike megatron-core's bridges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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


def copy_ranks(placed: ModuleLayout) -> list[IntArray]:
    """Ranks of the replicas, or of the groups of each width ``[replicas or groups, pp, tp * cp]``, TP innermost."""
    if not placed.widths:
        return [placed.ranks]
    sizes = [(int(count), tp * cp) for count, (tp, cp) in zip(placed.num_groups, placed.widths, strict=True)]
    return [placed.plane[:, : n * size].reshape(placed.pp, n, size).swapaxes(0, 1) for n, size in sizes]


def places_of(layout: Layout, rank: int) -> list[Place]:
    """Return the rank's blocks: those of its replicas, or of all groups that contain it."""
    places = []
    for index, placed in enumerate(layout.modules):
        first = 0
        for ranks in copy_ranks(placed):
            for copy, stage, position in np.argwhere(ranks == rank).tolist():
                places.append(Place(index, first + copy, stage, position))
            first += len(ranks)
    return places


def block_of(layout: Layout, module: int, replica: int, stage: int) -> list[int]:
    """The ranks of a stage of a replica or group, TP innermost."""
    placed = layout.modules[module]
    degree = int(placed.degree_of_copy[replica])
    first = int(placed.num_groups[:degree].sum())
    block: list[int] = copy_ranks(placed)[degree][replica - first, stage].tolist()
    return block


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


def data_edges(program: Program) -> tuple[IntArray, IntArray]:
    """Source and target of all dependencies of chunks that carry data ``[edges]``."""
    target = rows_of(program.dep_offsets)
    carries = (program.dep_bytes > 0) & (program.chunk[target] >= 0)
    return program.dep_actions[carries], target[carries]


def channels_of(program: Program) -> tuple[Channel, ...]:
    """The channels that a program needs, of all ranks."""
    edges = data_edges(program)
    columns = [column[actions] for actions in edges for column in (program.module, program.replica, program.stage)]
    _, first = np.unique(np.stack(columns), axis=1, return_index=True)
    channels = set[Channel]()
    for source, target in zip(*(actions[first].tolist() for actions in edges), strict=True):
        channels.update(_edge_channels(program, source, target))
    return tuple(sorted(channel for channel in channels if channel[0] != channel[1]))


def _edge_channels(program: Program, source: int, target: int) -> list[Channel]:
    """Sender and receiver of each message of a dependency; they may be one rank."""
    columns = (program.module, program.replica, program.stage)
    ends = (map(int, (column[action] for column in columns)) for action in (source, target))
    senders, receivers = (block_of(program.layout, *end) for end in ends)
    if program.module[source] != program.module[target]:
        senders = sending_ranks(senders, receivers)
    return [*zip(senders, receivers, strict=True)]


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
    """A collective of a stage's replicas that a rank begins at a place in the order of all actions, after messages."""

    place: int
    module: int
    stage: int
    sums: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a rank, with its messages and the collectives that begin before it.

    ``ends_gradients``: this rank's last pass that adds to the stage's gradients; ``closes``: the last of all replicas,
    which begins their sum. ``starts``: gathers of weights, and sums that another rank's pass closes. A rank takes part
    in passes that start on several replicas: without a chunk, its step ``is_empty``, and the action another rank's.
    """

    action: int
    place: Place
    kind: Pass
    chunk: int
    receives: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()
    ends_gradients: bool = False
    closes: bool = False
    starts: tuple[Start, ...] = ()
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's actions and messages, in order; channels and ``order`` are those of all ranks."""

    rank: int
    steps: tuple[Step, ...]
    arrivals: tuple[Message, ...]
    channels: tuple[Channel, ...]
    order: IntArray


def plan_rank(
    program: Program, rank: int, framework: FrameworkOptions = DEFAULTS, order: IntArray | None = None
) -> RankPlan:
    """The rank's actions in the program's order, with all its messages; ``order`` of actions is equal on all ranks."""
    order = order_of_actions(program) if order is None else order
    lane = lane_of_rank(program.layout, rank)
    entries = slice(0) if lane is None else slice(*program.lane_offsets[lane : lane + 2])
    actions = program.lane_actions[entries].tolist()
    places = {(place.module, place.replica, place.stage): place for place in places_of(program.layout, rank)}
    # Sums and optimizer steps are of no replica.
    places |= {(module, -1, stage): place for (module, _, stage), place in places.items()}
    messages = list(rank_messages(program, rank, actions, framework))
    messages.sort(key=lambda message: (order[message.source], message.target, message.receiver))
    closing, starts = _collectives(program, actions, order, framework)
    kinds = program.kind[actions].tolist()
    # A chunk's weight pass, if it has one, follows its backward.
    learning = [action for action, kind in zip(actions, kinds, strict=True) if kind in (Pass.BACKWARD, Pass.WEIGHT)]
    ends = {(int(program.module[action]), int(program.stage[action])): action for action in learning}
    incoming = defaultdict[int, list[Message]](list)
    outgoing = defaultdict[int, list[Message]](list)
    for message in messages:
        if message.receiver == rank:
            incoming[message.target].append(message)
        if message.sender == rank:
            outgoing[message.source].append(message)
    steps = [
        Step(
            action,
            places[int(program.module[action]), int(program.replica[action]), int(program.stage[action])],
            Pass(kind),
            int(program.chunk[action]),
            tuple(incoming[action]),
            tuple(outgoing[action]),
            action in ends.values(),
            action in closing,
            tuple(sorted(starts[action], key=lambda start: start.place)),
        )
        for action, kind in zip(actions, kinds, strict=True)
    ]
    arrivals = tuple(message for message in messages if message.receiver == rank != message.sender)
    steps = list(with_empty_steps(program, steps, places.values(), order))
    return RankPlan(rank, tuple(steps), arrivals, channels_of(program), order)


def _collectives(
    program: Program, actions: Sequence[int], order: IntArray, framework: FrameworkOptions
) -> tuple[set[int], dict[int, list[Start]]]:
    """Actions of a rank that close a stage's gradients, and collectives it begins, by the next action."""
    places = order[actions]
    closing = set()
    starts = defaultdict(list)
    held = np.unique(np.stack([program.module[actions], program.stage[actions]]), axis=1)
    for module, stage in held.T.tolist():
        mine = (program.module == module) & (program.stage == stage)
        forwards = np.flatnonzero(mine & (program.kind == Pass.FORWARD))
        learning = np.flatnonzero(mine & np.isin(program.kind, (Pass.BACKWARD, Pass.WEIGHT)))
        if program.layout.modules[module].scatters or not len(learning):
            continue
        first = -1 if framework.align_param_gather else int(order[forwards].min())
        for place, sums in ((first, False), (int(order[learning].max()), True)):
            index = int(np.searchsorted(places, place))
            if sums and places[index] == place:
                closing.add(actions[index])
            else:
                starts[actions[index]].append(Start(place, module, stage, sums))
    return closing, starts


def rank_messages(
    program: Program, rank: int, actions: Sequence[int], framework: FrameworkOptions
) -> Iterator[Message]:
    """All messages from and to a rank, which runs the actions."""
    mine = np.zeros(program.num_actions, bool)
    mine[actions] = True
    for source, target in zip(*(ends.tolist() for ends in data_edges(program)), strict=True):
        if not mine[source] and not mine[target]:
            continue
        module = int(program.module[source])
        if module == program.module[target]:
            rows: tuple[int, Rows, Rows] = (_local_tokens(program, target, framework), None, None)
            width = program.model.modules[module].config.hidden_size
        else:
            rows = _common_rows(program, source, target)
            width = program.model.llm.config.hidden_size
        num_rows, *named = rows
        for channel in _edge_channels(program, source, target):
            if rank in channel:
                yield Message(source, target, *channel, num_rows, width, *named)


def _local_tokens(program: Program, action: int, framework: FrameworkOptions) -> int:
    module = int(program.module[action])
    spec = program.model.modules[module]
    placed = program.layout.modules[module]
    tp, cp = placed.degrees[placed.degree_of_copy[program.replica[action]]]
    lengths = spec.lengths(program.shapes, program.chunks[module].units(int(program.chunk[action])))
    parts = tp if framework.splits_tokens(spec, tp) else 1
    return rank_rows(lengths, cp, whole_pack=framework.cp_split == PACK, parts=parts) // parts


def _common_rows(program: Program, source: int, target: int) -> tuple[int, Rows, Rows]:
    """Return the rows of items in both chunks: their number, and their places in either tensor, in one order."""
    source_items = _row_items(program, source)
    target_items = _row_items(program, target)
    source_places = _places_by_item(source_items, target_items)
    target_places = _places_by_item(target_items, source_items)
    return len(source_places), _named(source_places, len(source_items)), _named(target_places, len(target_items))


def _places_by_item(items: IntArray, others: IntArray) -> IntArray:
    """Places of items that are among others, by item."""
    places = np.flatnonzero(np.isin(items, others))
    return places[np.argsort(items[places], kind="stable")]


def _row_items(program: Program, action: int) -> IntArray:
    """Item of every projected token at the module boundary of a chunk ``[tokens]``."""
    shapes = program.shapes
    module = int(program.module[action])
    items = program.chunks[module].units(int(program.chunk[action]))
    if not program.model.modules[module].is_encoder:
        items = take_rows(shapes.item_offsets, items)[1]
    return np.repeat(items, shapes.item_llm_tokens[items])


def _named(places: IntArray, total: int) -> Rows:
    first = int(places[0])
    count = len(places)
    if not np.array_equal(places, np.arange(first, first + count)):
        return places
    return None if count == total else slice(first, first + count)


def with_empty_steps(program: Program, steps: Iterable[Step], held: Iterable[Place], order: IntArray) -> Iterator[Step]:
    """Return a rank's steps with inserted empty steps, so that all ranks run collective passes in one order."""
    group = collective_passes(program)
    replicas = defaultdict[tuple[int, int], set[int]](set)
    for place in held:
        span = program.layout.modules[place.module].expert_span
        replicas[place.module, place.stage].add(place.replica // span)
    rest = list[tuple[int, Step]]()
    numbers, examples = np.unique(group, return_index=True)
    for action in examples[numbers >= 0].tolist():
        module, stage = int(program.module[action]), int(program.stage[action])
        placed = program.layout.modules[module]
        if placed.scatters or program.replica[action] // placed.expert_span in replicas.get((module, stage), ()):
            place = Place(module, -1, stage, 0)
            kind = Pass(int(program.kind[action]))
            rest.append((int(order[action]), Step(action, place, kind, int(program.chunk[action]), is_empty=True)))
    rest.sort(key=lambda turn: turn[0])
    missed = iter(rest)
    turn = next(missed, None)
    for step in steps:
        own = int(group[step.action])
        # Up to the own one, or all that are left.
        while turn and (turn[0] <= order[step.action] or step.kind is Pass.GRAD_SYNC):
            if group[turn[1].action] != own:
                yield turn[1]
            turn = next(missed, None)
        yield step


def order_of_actions(program: Program, seconds: FloatArray | None = None) -> IntArray:
    """Place of each action in one order of all, the same on every rank ``[actions]``.

    Actions come in the order in which they would end if only they took time (``seconds`` each; None: the same), so most
    messages arrive while other actions run. Passes that start together come one after the other.
    """
    work = np.ones(program.num_actions) if seconds is None else seconds
    ns = np.maximum(np.rint(work * 1e9), 1).astype(np.int64)
    node = _nodes(program)
    ends = np.zeros(program.num_actions, np.int64)
    np.maximum.at(ends, node, positions_of_actions(program, ns) + ns)
    order = np.empty(program.num_actions, np.int64)
    order[np.lexsort((node, ends[node]))] = np.arange(program.num_actions)
    return order


def believed_order(program: Program, profile: Profile) -> IntArray:
    """Return ``order_of_actions`` for passes and blocking transfers with the profile's estimated seconds."""
    seconds = np.zeros(program.num_actions)
    handed = profile.programs.handovers(program)
    seconds[: program.first_action[-1]] = packed_durations(program, profile)
    return order_of_actions(program, seconds + held_s(program, handed.send_s, handed.receive_s))


def positions_of_actions(program: Program, work: IntArray | None = None) -> IntArray:
    """Work of the longest chain that must end before each action starts ``[actions]``; None: 1 for each action."""
    node = _nodes(program)
    lane = rows_of(program.lane_offsets)
    action = program.lane_actions
    follows = lane[1:] == lane[:-1]
    before = node[np.concatenate([program.dep_actions, action[:-1][follows]])]
    after = node[np.concatenate([rows_of(program.dep_offsets), action[1:][follows]])]
    each = np.ones(program.num_actions, np.int64) if work is None else work
    longest = np.zeros(program.num_actions, np.int64)
    np.maximum.at(longest, node, each)
    order = np.argsort(before, kind="stable")
    offsets = offsets_from_counts(np.bincount(before, minlength=program.num_actions))
    after = after[order]
    missing = np.bincount(after, minlength=program.num_actions)
    position = np.zeros(program.num_actions, np.int64)
    ready = np.flatnonzero(missing == 0)
    while len(ready):
        bounds, edges = take_rows(offsets, ready)
        freed = after[edges]
        np.maximum.at(position, freed, np.repeat(position[ready] + longest[ready], np.diff(bounds)))
        np.subtract.at(missing, freed, 1)
        ready = np.unique(freed[missing[freed] == 0])
    assert not missing.any(), "an order that lanes, dependencies and turns agree with"
    return position[node]


def _nodes(program: Program) -> IntArray:
    """The first of the passes that start together with each action, else the action itself ``[actions]``."""
    node = np.arange(program.num_actions)
    group = collective_passes(program)
    members = group >= 0
    _, first, number = np.unique(group[members], return_index=True, return_inverse=True)
    node[members] = np.flatnonzero(members)[first[number]]
    return node
