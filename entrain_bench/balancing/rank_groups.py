"""Units of a micro-step on aligned groups of ranks: adjacent groups that share work, or groups that end first."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_units_s
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import check_plane, group_numbers
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# Halvings of the interval in which the greedy makespan lies, and its share of the lower bound that is good enough.
BISECTIONS = 30
GOOD = 1.01
FILLED = 0.9  # share of memory without states that units may fill; the rest is for temporary tensors


@dataclass(frozen=True, slots=True)
class SequenceGroups:
    """Groups of a microbatch."""

    width: IntArray  # ranks of each ``[groups]``
    group: IntArray  # of each sequence ``[sequences]``
    makespan_s: float  # of the slowest group


def grouped(
    seconds: FloatArray, bytes_: FloatArray, widths: IntArray, num_ranks: int, room: float
) -> SequenceGroups | None:
    """Return groups with a small makespan, without a solver; None if sequences exceed ``room`` bytes of a rank.

    ``seconds`` are those of a sequence on a group of each of ``widths``, rising powers of two ``[widths, sequences]``;
    a group shares the bytes of a sequence ``[sequences]``.
    """
    order = np.argsort(-decisive(seconds[0]), kind="stable")
    alone = np.where(bytes_ <= room * widths[:, None], decisive(seconds), np.inf)
    low = max(float(alone.min(axis=0).max()), float((alone * widths[:, None]).min(axis=0).sum()) / num_ranks)
    if not np.isfinite(low):
        return None
    best = None
    high = np.inf
    middle = low
    for _ in range(2 * BISECTIONS):
        group, width = _packed(seconds, bytes_, widths, num_ranks, room, middle, order)
        if width[0]:
            best = measured(width, group, seconds, widths)
            high = middle
        else:
            low = middle
        if high <= low * (GOOD**0.1):
            break
        middle = (low + high) / 2 if best else 2 * low
    return best


def measured(width: IntArray, group: IntArray, seconds: FloatArray, widths: IntArray) -> SequenceGroups:
    """Groups of the given widths and sequences, with their makespan."""
    own_s = seconds[np.searchsorted(widths, width[group]), np.arange(len(group))]
    return SequenceGroups(width, group, float(np.bincount(group, own_s).max(initial=0.0)))


@njit()
def _packed(seconds, bytes_, widths, num_ranks, room, most_s, order):  # type: ignore[no-untyped-def]
    """Group of each sequence and widths of groups; the first width is 0 if there is no room for all."""
    group = np.zeros(len(order), np.int64)
    width = np.zeros(num_ranks, np.int64)
    level = np.zeros(num_ranks, np.int64)
    load = np.zeros(num_ranks)
    held = np.zeros(num_ranks)
    count = 0
    free = num_ranks
    limit = most_s * (1 + 1e-9)
    for sequence in order:
        best = -1
        for open_group in range(count):
            if best >= 0 and width[open_group] >= width[best]:
                continue
            fits = held[open_group] + bytes_[sequence] / width[open_group] <= room
            if fits and load[open_group] + seconds[level[open_group], sequence] <= limit:
                best = open_group
        if best < 0:
            for index in range(len(widths)):
                if widths[index] > free:
                    break
                if seconds[index, sequence] <= limit and bytes_[sequence] / widths[index] <= room:
                    best = count
                    width[count] = widths[index]
                    level[count] = index
                    count = count + 1
                    free = free - widths[index]
                    break
        if best < 0:
            width[0] = 0
            return group, width[: max(count, 1)].copy()
        group[sequence] = best
        load[best] += seconds[level[best], sequence]
        held[best] += bytes_[sequence] / width[best]
    return group, width[:count].copy()


def first_positions(width: IntArray) -> IntArray:
    """First position of each group ``[groups]``: by falling width, so that all are aligned."""
    falling = np.argsort(-width, kind="stable")
    first = np.empty(len(width), np.int64)
    first[falling] = np.cumsum(width[falling]) - width[falling]
    return first


def joined(
    seconds: FloatArray,
    bytes_: FloatArray,
    pack_s: FloatArray,
    step: IntArray,
    position: IntArray,
    num_positions: int,
    room: float,
) -> tuple[IntArray, IntArray]:
    """First position and width of each unit's group ``[units]``: of all nested groups those whose slowest ends first.

    Adjacent halves join if that ends sooner, or if units exceed ``room`` bytes of a position. Seconds: ``seconds`` of a
    unit on 1, 2, 4, ... positions ``[widths, units]``, ``pack_s`` of a pack in addition ``[widths]``.
    """
    steps = 1 + int(step.max(initial=0))
    whole = 1 << (num_positions - 1).bit_length()
    width = np.ones((steps, whole), np.int64)
    ends_s = np.zeros((steps, 0))
    for level, (unit_s, once) in enumerate(zip(seconds, pack_s, strict=True)):
        groups = whole >> level
        size = 1 << level
        node = step * groups + (position >> level)

        work_s, held, units = (
            np.bincount(node, values, steps * groups).reshape(steps, groups) for values in (unit_s, bytes_, None)
        )
        shared_s = decisive(work_s + once * (units > 0))
        exists = (1 + np.arange(groups)) * size <= num_positions
        # The widest group takes any unit; one that exceeds memory is refused later, with the reason.
        fits = (held <= room * size) | (level == len(seconds) - 1)
        shared_s = np.where(exists & fits, shared_s, np.inf)
        if not level:
            ends_s = shared_s
            continue
        halves_s = ends_s.reshape(steps, groups, 2).max(axis=2)
        joins = shared_s < halves_s
        width = np.where(np.repeat(joins, size, axis=1), size, width)
        ends_s = np.minimum(shared_s, halves_s)
    own_width = width[step, position]
    return position // own_width * own_width, own_width


def unit_costs(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, profile: Profile
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return estimated seconds of units, all stages ``[degrees, units]``, bytes ``[units]``, packs ``[degrees]``."""
    kinds = module.kind_counts(placed.layers_per_stage).sum(axis=0)
    again = kinds * np.array([kind.remade_share for kind in module.kinds]) * placed.recompute
    seconds = []
    pack_s = []
    for tp, cp in placed.degrees:
        forward, backward = packed_units_s(module, shapes, tp, cp, profile)
        seconds.append(matmul(forward + backward, kinds) + matmul(forward, again))
        pack_s.append(float(matmul(profile.layers.pack_times(module, tp, cp).chunk_s.sum(axis=0), kinds)))
    kept, working = profile.memory.token_bytes(module, placed)
    bytes_ = np.asarray(module.lengths(shapes, module.units(shapes)), np.float64) * float((kept + working).max())
    return np.stack(seconds), bytes_, np.array(pack_s)


def sample_costs(
    shapes: SampleShapes, layout: Layout, profile: Profile, *, spread: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """``unit_costs`` of samples, all modules together; ranks of a group share items, or deal them out (``spread``)."""
    model = profile.job.model
    widths = np.array([tp * cp for tp, cp in layout.modules[model.llm_index].degrees])
    widths = widths // widths[0]
    seconds = np.zeros((len(widths), len(shapes)))
    bytes_ = np.zeros(len(shapes))
    pack_s = np.zeros(len(widths))
    for module, placed in zip(model.modules, layout.modules, strict=True):
        owner = module.owners(shapes, module.units(shapes))
        unit_s, bytes_of_unit, once = unit_costs(module, placed, shapes, profile)
        for level, width in enumerate(widths.tolist()):
            dealt = spread and module is not model.llm
            seconds[level] += np.bincount(owner, unit_s[0] / width if dealt else unit_s[level], len(shapes))
        bytes_ += np.bincount(owner, bytes_of_unit, len(shapes))
        pack_s += once
    return seconds, bytes_, pack_s


def room_bytes(layout: Layout, profile: Profile) -> float:
    """Memory that units may fill on a rank."""
    return FILLED * (profile.job.planning_budget_bytes - float(profile.memory.lane_state_bytes(layout).max()))


def step_assignment(
    shapes: SampleShapes, layout: Layout, profile: Profile, balanced: Collection[str], step: IntArray | None = None
) -> Assignment:
    """Micro-steps on groups of several widths: of ``balanced`` modules ``grouped``, of others ``joined``.

    ``step`` are micro-steps ``[samples]``, by default those of arrival. ``OutOfMemoryError`` if units fit on no group.
    """
    model = profile.job.model
    llm = layout.modules[model.llm_index]
    count = len(shapes)
    check_plane(layout, "strategy/assigner", "strategy.planner.widths=true of strategy=fsdp")
    if llm.pp > 1:
        raise IncompatibleError(f"layout.pp={llm.pp}: must be 1 for micro-steps on groups of several widths")
    share = -(-count // layout.num_microbatches)
    arrival, place = np.divmod(np.arange(count), share)
    step = arrival if step is None else step
    modules = list(zip(model.modules, layout.modules, strict=True))
    costs = [unit_costs(module, placed, shapes, profile) for module, placed in modules]
    total_bytes = sum(float(bytes_.sum()) for _, bytes_, _ in costs)
    room = room_bytes(layout, profile)
    labels = []
    for (module, placed), (seconds, bytes_, pack_s) in zip(modules, costs, strict=True):
        owner = module.owners(shapes, module.units(shapes))
        own_room = room * float(bytes_.sum()) / max(total_bytes, 1.0)
        positions = placed.dp
        if module.name in balanced:
            first, width = _dealt(seconds, bytes_, step[owner], placed, own_room)
        else:
            position = place[owner] * positions // share
            first, width = joined(seconds, bytes_, pack_s, step[owner], position, positions, own_room)
        labels.append(ModuleAssignment(group_numbers(placed, first, width), step[owner]))
    return Assignment(tuple(labels))


def _dealt(
    seconds: FloatArray, bytes_: FloatArray, step: IntArray, placed: ModuleLayout, room: float
) -> tuple[IntArray, IntArray]:
    """First position and width of each unit's group ``[units]``, ``grouped`` in every micro-step."""
    widths = np.array([cp for _, cp in placed.degrees])
    first, width = np.zeros((2, len(step)), np.int64)
    for micro_step in np.unique(step):
        mine = np.flatnonzero(step == micro_step)
        groups = grouped(seconds[:, mine], bytes_[mine], widths, placed.dp, room)
        if groups is None:
            raise OutOfMemoryError(f"assignment: {len(mine)} units of {placed.module} do not fit on {placed.dp} ranks")
        first[mine] = first_positions(groups.width)[groups.group]
        width[mine] = groups.width[groups.group]
    return first, width
