"""The compiled loop that times a program: lanes run their actions in order, each once its inputs have arrived."""

from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.base.compiled import inlined, njit
from entrain_bench.base.errors import DeadlockError
from entrain_bench.costs.edges import LinkTransfers
from entrain_bench.program import Program


def place_actions(
    program: Program,
    duration_s: FloatArray,
    delay_s: FloatArray,
    transfers: LinkTransfers | None = None,
    hold_s: FloatArray | None = None,
    release_s: FloatArray | None = None,
    stall_s: FloatArray | None = None,
    together: IntArray | None = None,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Earliest start and end of every action, and how long each waited for transfers alone ``[actions]``.

    Arguments are as in ``Prices``. Actions of a group (``together``) wait until the lanes of all are free, then for
    their inputs. ``DeadlockError`` names a cycle of lanes that wait for each other.
    """
    dep_actions = program.dep_actions.astype(np.int32)
    nothing = np.zeros(program.num_actions)
    columns = Columns(
        first_transfer=program.num_actions,
        lane_offsets=program.lane_offsets.astype(np.int64),
        lane_actions=program.lane_actions.astype(np.int32),
        num_lanes=program.num_lanes.astype(np.int32),
        dep_offsets=program.dep_offsets.astype(np.int64),
        dep_actions=dep_actions,
        carriers=dep_actions,
        duration_s=duration_s,
        hold_s=nothing if hold_s is None else hold_s,
        release_s=nothing if release_s is None else release_s,
        stall_s=nothing if stall_s is None else stall_s,
        delay_s=delay_s,
        link_offsets=np.zeros(1, np.int64),
        links=np.zeros(0, np.int64),
        num_links=0,
    )
    groups = None if together is None or together.max(initial=-1) < 0 else together
    if groups is not None:
        columns = _with_barriers(columns, program, groups)
    start, end, wait, position = _run_lanes(columns if transfers is None else _with_transfers(columns, transfers))
    position = position[: program.layout.num_lanes]
    if groups is not None:
        met = wait[program.num_actions :]
        first = columns.lane_offsets[:-1]
        # The program's actions among those that each lane ran.
        offsets = np.concatenate(([0], np.cumsum(columns.lane_actions < program.num_actions)))
        position = offsets[first + position] - offsets[first]
        start, end, wait = (times[: program.num_actions] for times in (start, end, wait))
        # The wait of lanes for transfers before they met counts for the action that they began together.
        wait += np.where(groups >= 0, met[groups], 0.0)
    if np.any(position < np.diff(program.lane_offsets)):
        raise DeadlockError(describe_deadlock(program, transfers, position, ~np.isnan(end), groups))
    return start, end, wait


class Columns(NamedTuple):
    """Input of the compiled loop: a program, followed by a lane, an action and a row for each transfer."""

    first_transfer: int  # number of the program's actions and its barriers; those from here on are transfers
    # Actions of each lane in its order, CSR.
    lane_offsets: IntArray
    lane_actions: IntArray
    num_lanes: IntArray  # lanes that an action occupies ``[actions]``
    # Actions that each action depends on, CSR; a transfer on the sources of all that it carries.
    dep_offsets: IntArray
    dep_actions: IntArray
    # Action or transfer with which the data of each dependency arrive ``[dependencies]``.
    carriers: IntArray
    duration_s: FloatArray  # of an action; how long a transfer occupies its links ``[actions]``
    hold_s: FloatArray  # how long its lanes are held after it ``[actions]``
    release_s: FloatArray  # its earliest start ``[actions]``
    stall_s: FloatArray  # how long it waits once all else is ready ``[actions]``
    delay_s: FloatArray  # from the end of its carrier ``[dependencies]``
    # Links of each transfer, CSR.
    link_offsets: IntArray
    links: IntArray
    num_links: int  # links in all


class Lanes(NamedTuple):
    """Progress of lanes ``[lanes]``."""

    position: IntArray  # actions that it is done with
    reached: IntArray  # action that it has come to last; -1 for none
    checked: IntArray  # row of the first dependency of that action that may be missing
    done_s: FloatArray  # end of its last action
    free_s: FloatArray  # when that no longer holds it
    next_parked: IntArray  # the lane after it that is parked on the same action; -1 for none


class Actions(NamedTuple):
    """Progress of actions ``[actions]``."""

    # NaN until it is placed.
    start_s: FloatArray
    end_s: FloatArray
    wait_s: FloatArray  # how long it waits for transfers alone
    arrived: IntArray  # lanes that have come to it
    done_s: FloatArray  # when the last of them had ended its previous action
    free_s: FloatArray  # when the last of them was free
    parked: IntArray  # the first lane that is parked on it, -1 for none; at the very end, the first that may resume


AWAKE = -1  # Where lanes are parked that may resume.
TIMES = ("duration_s", "hold_s", "release_s", "stall_s")


def _with_barriers(columns: Columns, program: Program, together: IntArray) -> Columns:
    """Add barriers: one action of zero duration before each group that begins together, on all its members' lanes."""
    count = int(together.max()) + 1
    group = together[program.lane_actions]
    before = np.flatnonzero(group >= 0)
    barriers = program.num_actions + group[before]
    per_lane = np.diff(program.lane_offsets) + np.bincount(
        rows_of(program.lane_offsets)[before], minlength=program.layout.num_lanes
    )
    times: dict[str, Any] = {name: np.append(getattr(columns, name), np.zeros(count)) for name in TIMES}
    return columns._replace(
        first_transfer=program.num_actions + count,
        lane_offsets=offsets_from_counts(per_lane),
        lane_actions=np.insert(columns.lane_actions, before, barriers.astype(np.int32)),
        num_lanes=np.append(columns.num_lanes, np.bincount(group[before], minlength=count).astype(np.int32)),
        dep_offsets=np.append(columns.dep_offsets, np.full(count, columns.dep_offsets[-1])),
        **times,
    )


def _with_transfers(columns: Columns, transfers: LinkTransfers) -> Columns:
    """A transfer is an action on a lane of its own; it waits for the sources of all that it carries, or for another."""
    count = len(transfers)
    numbers = np.arange(columns.first_transfer, columns.first_transfer + count, dtype=np.int32)
    carriers = columns.carriers.copy()
    delivered = np.flatnonzero(transfers.last >= 0)
    carriers[delivered] = numbers[transfers.last[delivered]]
    taken = np.flatnonzero(transfers.first >= 0)
    forwarding = np.flatnonzero(transfers.follows >= 0)
    waits = np.concatenate([transfers.first[taken], forwarding])
    needs = np.concatenate([columns.dep_actions[taken], numbers[transfers.follows[forwarding]]])
    needs = needs[np.argsort(waits, kind="stable")]
    times: dict[str, Any] = {name: np.append(getattr(columns, name), np.zeros(count)) for name in TIMES}
    return columns._replace(
        lane_offsets=np.append(columns.lane_offsets, columns.lane_offsets[-1] + np.arange(1, count + 1)),
        lane_actions=np.append(columns.lane_actions, numbers),
        num_lanes=np.append(columns.num_lanes, np.ones(count, np.int32)),
        dep_offsets=np.append(
            columns.dep_offsets, columns.dep_offsets[-1] + np.cumsum(np.bincount(waits, minlength=count))
        ),
        dep_actions=np.append(columns.dep_actions, needs),
        carriers=np.append(carriers, needs),
        delay_s=np.append(columns.delay_s, np.zeros(len(needs))),
        link_offsets=transfers.link_offsets.astype(np.int64),
        links=transfers.links.astype(np.int64),
        num_links=transfers.num_links,
        **times | {"duration_s": np.append(columns.duration_s, transfers.link_s)},
    )


@njit()
def _run_lanes(columns):  # type: ignore[no-untyped-def]
    """Run lanes until all are done or stuck, in O(actions + dependencies) and a heap of transfers.

    A blocked lane is parked; if all lanes are blocked, the earliest transfer in the queue is served.
    """
    lanes, actions = _nothing_run(columns)
    queue = [(0.0, 0) for _ in range(0)]
    link_free_s = np.zeros(columns.num_links)
    while True:
        lane = actions.parked[AWAKE]
        if lane >= 0:
            actions.parked[AWAKE] = lanes.next_parked[lane]
            transfer = _run_lane(lane, columns, lanes, actions)
            if transfer >= 0:
                heappush(queue, (actions.start_s[transfer], transfer))
        elif queue:
            ready_s, transfer = heappop(queue)
            actions.end_s[transfer] = _occupy(transfer, ready_s, columns, link_free_s)
            _wake(transfer, lanes, actions)
        else:
            break
    program = slice(0, columns.first_transfer)
    return actions.start_s[program], actions.end_s[program], actions.wait_s[program], lanes.position


@njit()
def _nothing_run(columns):  # type: ignore[no-untyped-def]
    num_lanes = len(columns.lane_offsets) - 1
    num_actions = len(columns.num_lanes)
    lanes = Lanes(
        position=np.zeros(num_lanes, np.int64),
        reached=np.full(num_lanes, -1, np.int32),
        checked=np.zeros(num_lanes, np.int64),
        done_s=np.zeros(num_lanes),
        free_s=np.zeros(num_lanes),
        next_parked=np.full(num_lanes, -1, np.int32),
    )
    actions = Actions(
        start_s=np.full(num_actions, np.nan),
        end_s=np.full(num_actions, np.nan),
        wait_s=np.zeros(num_actions),
        arrived=np.zeros(num_actions, np.int32),
        done_s=np.zeros(num_actions),
        free_s=np.zeros(num_actions),
        parked=np.full(num_actions + 1, -1, np.int32),
    )
    for lane in range(num_lanes - 1, -1, -1):
        _park(lane, AWAKE, lanes, actions)
    return lanes, actions


@inlined
def _run_lane(lane, columns, lanes, actions):  # type: ignore[no-untyped-def]
    """Run a lane's actions one after another, until it is done or parked; returns a transfer that is ready, or -1."""
    first = columns.lane_offsets[lane]
    beyond = columns.lane_offsets[lane + 1]
    for row in range(first + lanes.position[lane], beyond):
        action = columns.lane_actions[row]
        # An action that another lane has run for both has an end.
        if np.isnan(actions.end_s[action]):
            missing = _missing(lane, action, columns, lanes, actions)
            if missing >= 0:
                _park(lane, missing, lanes, actions)
                break
            _start(action, columns, actions)
            if action >= columns.first_transfer:
                return action
            actions.end_s[action] = actions.start_s[action] + columns.duration_s[action]
            _wake(action, lanes, actions)
        lanes.done_s[lane] = actions.end_s[action]
        lanes.free_s[lane] = actions.end_s[action] + columns.hold_s[action]
        lanes.position[lane] = row + 1 - first
    return -1


@inlined
def _missing(lane, action, columns, lanes, actions):  # type: ignore[no-untyped-def]
    """Return the action that a lane's next one waits for; itself until all its lanes have arrived; -1 for none."""
    if lanes.reached[lane] != action:
        lanes.reached[lane] = action
        lanes.checked[lane] = columns.dep_offsets[action]
        actions.arrived[action] += 1
        actions.done_s[action] = max(actions.done_s[action], lanes.done_s[lane])
        actions.free_s[action] = max(actions.free_s[action], lanes.free_s[lane])
    if actions.arrived[action] < columns.num_lanes[action]:
        return action
    while lanes.checked[lane] < columns.dep_offsets[action + 1]:
        needed = columns.carriers[lanes.checked[lane]]
        if np.isnan(actions.end_s[needed]):
            return needed
        lanes.checked[lane] += 1
    return -1


@inlined
def _start(action, columns, actions):  # type: ignore[no-untyped-def]
    """Start an action when its lanes are free and its data are there, and note how much of that is transfers."""
    computed_s = actions.done_s[action]
    start_s = actions.free_s[action]
    for row in range(columns.dep_offsets[action], columns.dep_offsets[action + 1]):
        computed_s = max(computed_s, actions.end_s[columns.dep_actions[row]])
        start_s = max(start_s, actions.end_s[columns.carriers[row]] + columns.delay_s[row])
    start_s = max(start_s, columns.release_s[action]) + columns.stall_s[action]
    actions.start_s[action] = start_s
    actions.wait_s[action] = start_s - computed_s


@inlined
def _occupy(transfer, ready_s, columns, link_free_s):  # type: ignore[no-untyped-def]
    """Occupy a transfer's links once it is ready and all are free; return when it ends."""
    start_s = ready_s
    number = transfer - columns.first_transfer
    for row in range(columns.link_offsets[number], columns.link_offsets[number + 1]):
        start_s = max(start_s, link_free_s[columns.links[row]])
    end_s = start_s + columns.duration_s[transfer]
    for row in range(columns.link_offsets[number], columns.link_offsets[number + 1]):
        link_free_s[columns.links[row]] = end_s
    return end_s


@inlined
def _park(lane, action, lanes, actions):  # type: ignore[no-untyped-def]
    lanes.next_parked[lane] = actions.parked[action]
    actions.parked[action] = lane


@inlined
def _wake(action, lanes, actions):  # type: ignore[no-untyped-def]
    lane = actions.parked[action]
    while lane >= 0:
        after = lanes.next_parked[lane]
        _park(lane, AWAKE, lanes, actions)
        lane = after


def describe_deadlock(
    program: Program,
    transfers: LinkTransfers | None,
    position: IntArray,
    done: BoolArray,
    together: IntArray | None = None,
) -> str:
    """Name a cycle of lanes that wait for each other; ``position``: number of actions each lane ran ``[lanes]``."""

    def next_action(lane: int) -> int:
        return int(program.lane_actions[program.lane_offsets[lane] + position[lane]])

    lane_of_entry = rows_of(program.lane_offsets)
    stuck = np.flatnonzero(position < np.diff(program.lane_offsets)).tolist()
    heads = {next_action(lane) for lane in stuck}
    lane = stuck[0]
    waits: dict[int, str] = {}
    while lane not in waits:
        action = next_action(lane)
        inputs = _inputs(program, transfers, action)
        missing = inputs[~done[inputs]]
        peers = np.zeros(0, np.int64)
        if together is not None and together[action] >= 0:
            peers = np.flatnonzero(together == together[action])
        # An input that it lacks, a peer that another action precedes, or else its own lanes that have not come.
        needed = next((int(one) for one in (*missing, *peers) if one not in heads or missing.size), action)
        holders = lane_of_entry[program.lane_actions == needed].tolist()
        if needed == action:
            holders = [holder for holder in holders if next_action(holder) != needed]
        if not holders:
            return f"program: {program.view(action)} waits for {program.view(needed)}, which no lane runs"
        rank = int(program.layout.lane_first_rank[lane])
        waits[lane] = f"rank {rank} at {program.view(action)} needs {program.view(needed)}"
        lane = holders[0]
    cycle = list(waits.values())[list(waits).index(lane) :]
    return "program: deadlock, a cycle of waits: " + "; ".join(cycle)


def _inputs(program: Program, transfers: LinkTransfers | None, action: int) -> IntArray:
    """Actions that one waits for: those it depends on, then all others whose data share a transfer with its own."""
    row = slice(program.dep_offsets[action], program.dep_offsets[action + 1])
    needs = program.dep_actions[row]
    if transfers is None:
        return needs
    mine = np.unique(transfers.first[row])
    return np.append(needs, program.dep_actions[np.isin(transfers.first, mine[mine >= 0])])
