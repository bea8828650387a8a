"""Layouts: which ranks hold which layers of which module, and the lanes that follow: ranks that always act together."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, digest_of, freeze, offsets_from_counts, rows_of
from entrain_bench.base.errors import IncompatibleError, UserError, require
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.parse import Count, OneOf
from entrain_bench.specs.sharding import HYBRID, SHARDINGS, ZERO1, ZERO2, ZERO3, ZERO3_KEPT


@dataclass(frozen=True)
class Blocks:
    """Lanes of each block (replica or group, stage) of one module, as CSR rows in replica-major order.

    Blocks of any module with equal ``rank_set`` hold the same ranks, ``low`` to ``high``; ``width`` are their ranks.
    """

    offsets: IntArray
    lanes: IntArray
    num_stages: int
    rank_set: IntArray
    low: IntArray
    high: IntArray
    width: IntArray
    # Lanes that hold each stage's weights: ``offsets`` and ``lanes`` if groups are replicas, else a CSR row per stage.
    held_offsets: IntArray
    held_lanes: IntArray

    def first_lane(self) -> IntArray:
        """One lane of every block ``[replicas, stages]``."""
        return self.lanes[self.offsets[:-1]].reshape(-1, self.num_stages)

    def of_stage(self, stage: int) -> IntArray:
        """Return the lanes that hold a stage's weights, over all replicas."""
        return self._of_stages[stage]

    @cached_property
    def _of_stages(self) -> list[IntArray]:
        stage = rows_of(self.held_offsets) % self.num_stages
        lanes = self.held_lanes[np.argsort(stage, kind="stable")]
        freeze(lanes)
        return np.split(lanes, np.cumsum(np.bincount(stage, minlength=self.num_stages))[:-1])


@lru_cache(maxsize=64)
def find_lanes(
    shapes: tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...], contents: tuple[bytes, ...]
) -> tuple[IntArray, IntArray, tuple[Blocks, ...]]:
    """Width, lowest rank and blocks of the lanes of modules; ``shapes`` are those of the ranks, with group widths."""
    modules = [
        np.frombuffer(content, np.int64).reshape(shape[:3]) for shape, content in zip(shapes, contents, strict=True)
    ]
    num_ranks = 1 + max(int(ranks.max()) for ranks in modules)
    block_of_rank = np.full((len(modules), num_ranks), -1)
    sets = [
        _group_ranks(ranks, [tp * cp for tp, cp in widths]) if widths else _block_ranks(ranks)
        for ranks, (*_, widths) in zip(modules, shapes, strict=True)
    ]
    # Virtual stages hold the same ranks: number blocks by the first one that does.
    numbers = _numbered(sets)
    for row, ranks, number, (*_, widths) in zip(block_of_rank, modules, numbers, shapes, strict=True):
        if widths:
            # Groups are nested: ranks that share a narrowest one share all. Replicas hold the weights.
            plane = stage_planes(ranks)
            row[plane] = np.arange(plane.size).reshape(plane.shape) // min(tp * cp for tp, cp in widths)
        else:
            row[ranks.reshape(len(number), -1)] = number[:, None]
    used = np.flatnonzero((block_of_rank >= 0).any(axis=0))
    # Ranks with the same blocks in every module are one lane: number the combinations.
    combination = np.ravel_multi_index(tuple(1 + block_of_rank[:, used]), tuple(2 + block_of_rank.max(axis=1)))
    _, first, lane, width = np.unique(combination, return_index=True, return_inverse=True, return_counts=True)
    # Number lanes by their lowest rank, so that adjacent lanes in a figure are adjacent in the cluster.
    order = np.argsort(first, kind="stable")
    lane_of_rank = np.full(num_ranks, -1)
    lane_of_rank[used] = np.argsort(order, kind="stable")[lane]
    blocks = []
    for ranks, number, own_sets, (*_, widths) in zip(modules, numbers, sets, shapes, strict=True):
        block_lanes = _block_lanes(*own_sets, lane_of_rank, len(order))
        held = block_lanes
        if widths:
            plane = stage_planes(ranks)
            held = _block_lanes(plane.ravel(), np.full(len(plane), plane.shape[1]), lane_of_rank, len(order))
        flat, size = own_sets
        starts = offsets_from_counts(size)[:-1]
        low = np.minimum.reduceat(flat, starts)
        high = np.maximum.reduceat(flat, starts)
        blocks.append(Blocks(*block_lanes, ranks.shape[1], number, low, high, size, *held))
        freeze(*block_lanes, number, low, high, size, *held)
    lanes = width[order], used[first[order]]
    freeze(*lanes)
    return *lanes, tuple(blocks)


def stage_planes(ranks: IntArray) -> IntArray:
    """Ranks of each stage, ascending ``[pp, dp * tp * cp]``, of ranks ``[dp, pp, tp * cp]``."""
    return np.sort(ranks.swapaxes(0, 1).reshape(ranks.shape[1], -1), axis=1)


def _block_ranks(ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Return the ranks of all blocks in ascending order, block after block, and the number of ranks in each block."""
    flat = np.sort(ranks.reshape(ranks.shape[0] * ranks.shape[1], -1), axis=1)
    return flat.ravel(), np.full(len(flat), flat.shape[1])


def _group_ranks(ranks: IntArray, widths: Sequence[int]) -> tuple[IntArray, IntArray]:
    """As ``_block_ranks``, for every group and stage, group-major, numbered as in ``ModuleLayout.widths``."""
    plane = stage_planes(ranks)
    counts = [plane.shape[1] // width for width in widths]
    group_ranks = [
        plane[:, : count * width].reshape(len(plane), count, width).swapaxes(0, 1).ravel()
        for count, width in zip(counts, widths, strict=True)
    ]
    return np.concatenate(group_ranks), np.repeat(widths, [count * len(plane) for count in counts])


def _numbered(sets: Sequence[tuple[IntArray, IntArray]]) -> list[IntArray]:
    """Return a number for every set of ranks of all modules; equal sets have equal numbers."""
    flat, size = (np.concatenate(columns) for columns in zip(*sets, strict=True))
    ends = offsets_from_counts(size)
    low = flat[ends[:-1]]
    high = flat[ends[1:] - 1]
    # A run of consecutive ranks is told by its lowest rank and its length; any other set by its first place.
    key = (1 + low) * (1 + max(len(size), int(size.max()))) + size
    known: dict[bytes, int] = {}
    for index in np.flatnonzero(high - low != size - 1).tolist():
        key[index] = known.setdefault(flat[ends[index] : ends[index + 1]].tobytes(), index)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    of_first = np.argsort(np.argsort(first, kind="stable"), kind="stable")[number]
    return np.split(of_first, np.cumsum([len(flat_ranks) for _, flat_ranks in sets])[:-1])


def _block_lanes(flat: IntArray, size: IntArray, lane_of_rank: IntArray, num_lanes: int) -> tuple[IntArray, IntArray]:
    block = np.repeat(np.arange(len(size)), size)
    # Ranks that are adjacent in a block are mostly adjacent among lanes: a stable sort is fast then, a hash is not.
    entry = np.sort(block * num_lanes + lane_of_rank[flat], kind="stable")
    is_first = np.diff(entry, prepend=-1) > 0
    block, lanes = np.divmod(entry[is_first], num_lanes)
    return offsets_from_counts(np.bincount(block, minlength=len(size))), lanes


@dataclass(frozen=True)
class ModuleLayout:
    """Parallel layout of one module."""

    module: str  # name of the module
    tp: Count  # tensor-parallel degree
    cp: Count  # context-parallel degree
    layers_per_stage: tuple[int, ...]  # consecutive layers of each pipeline stage, embedding and head included ``[pp]``
    # Ranks of each block, TP innermost ``[dp, pp, tp * cp]``. Stages s and s + P on the same ranks are virtual stages
    # of an interleaved pipeline over P ranks (arXiv:2104.04473, section 2.2). Stages that return over the ranks of
    # earlier stages form a V (arXiv:2401.10241, section 6).
    ranks: IntArray
    recompute: bool = False  # whether backward recomputes each layer from its input
    # Whether it recomputes a whole encoder at once; forwards then keep the encoder's input and output alone.
    recompute_whole: bool = False
    # Whether weights and gradient buffers leave the device between a rank's last forward and first backward.
    offload: bool = False
    # Data- and context-parallel ranks share out optimizer states, if the job shards them; other kinds need one stage.
    sharding: Annotated[str, OneOf(SHARDINGS)] = ZERO1
    nodes: Count = 1  # that hold the weights once each, with hybrid sharding
    # (TP, CP) of the groups of ranks that may process a unit, narrow to wide; empty: each replica is the only group of
    # its ranks. A group of w = TP x CP ranks holds w consecutive ranks of every stage, from a multiple of w among the
    # stage's ranks, so narrow groups lie inside wide ones. Weights stay where ``ranks`` says; a group whose TP is wider
    # than ``tp`` computes with slices of them. Assignments number groups as replicas: those of the first width by
    # position, then those of the next (``copies``).
    widths: tuple[tuple[int, int], ...] = ()
    # Expert parallelism: groups of ``ep`` ranks divide the experts. A group's ranks have one stage and one TP rank, and
    # follow each other by replica, then by CP (Megatron-LM, whose expert-tensor-parallel size is TP by default).
    ep: Count = 1

    @property
    def sharded(self) -> bool:
        """Whether ranks share out weights, and gather those of a layer where a pass needs them."""
        return self.sharding not in (ZERO1, ZERO2)

    @property
    def scatters(self) -> bool:
        """Whether ranks share out gradients, so that every backward reduce-scatters its own."""
        return self.sharding != ZERO1

    @property
    def keeps_weights(self) -> bool:
        """Whether all weights of a rank's layers stay on it from the first forward to the last backward."""
        return self.sharding in (ZERO1, ZERO2, ZERO3_KEPT)

    @property
    def pp(self) -> int:
        """Number of pipeline stages, virtual ones included."""
        return len(self.layers_per_stage)

    @cached_property
    def digest_of_ranks(self) -> tuple[tuple[int, ...], bytes]:
        """Return shape and hash of the ranks: a short cache key for results that depend on them."""
        return digest_of(self.ranks)

    @cached_property
    def stages_per_rank(self) -> int:
        """Stages that a rank holds at most: virtual pipeline stages if more than one."""
        _, held = np.unique(self.ranks[0], return_counts=True)
        return int(held.max())

    @cached_property
    def is_closed(self) -> bool:
        """Whether the first and the last stage are on the same ranks."""
        return bool(np.array_equal(self.ranks[:, 0], self.ranks[:, -1]))

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    @property
    def recomputes_layers(self) -> bool:
        """Whether every layer keeps its input, from which backward recomputes it."""
        return self.recompute and not self.recompute_whole

    @property
    def ranks_per_block(self) -> int:
        """Ranks that hold one stage of one replica."""
        return self.tp * self.cp

    @property
    def degrees(self) -> tuple[tuple[int, int], ...]:
        """(TP, CP) at which units are processed: the widths, or the only one."""
        return self.widths or ((self.tp, self.cp),)

    @cached_property
    def num_groups(self) -> IntArray:
        """Groups of each of ``degrees``: replicas, if there are no widths ``[degrees]``."""
        ranks = self.dp * self.ranks_per_block
        return np.array([ranks // (tp * cp) for tp, cp in self.widths] or [self.dp])

    @property
    def copies(self) -> int:
        """Groups of all widths that an assignment may name: replicas, if there are no widths."""
        return int(self.num_groups.sum())

    @cached_property
    def degree_of_copy(self) -> IntArray:
        """Entry of ``degrees`` of each group ``[copies]``."""
        return np.repeat(np.arange(len(self.num_groups)), self.num_groups)

    @cached_property
    def plane(self) -> IntArray:
        """Ranks of each stage, ascending ``[pp, dp * tp * cp]``."""
        return stage_planes(self.ranks)

    @cached_property
    def expert_groups(self) -> IntArray | None:
        """Ranks of all expert-parallel groups ``[groups, ep]``; None without expert parallelism."""
        if self.ep == 1:
            return None
        first = self.ranks[:, :, :: self.tp].swapaxes(0, 1)
        return np.ascontiguousarray(first.reshape(-1, self.ep))

    @property
    def expert_span(self) -> int:
        """Replicas whose tokens the experts of a group share."""
        return max(1, self.ep // self.cp)

    @property
    def as_replicas(self) -> "ModuleLayout":
        """The layout without widths if its groups have one width, which makes them replicas; otherwise unchanged."""
        if len(self.widths) != 1:
            return self
        tp, cp = self.widths[0]
        ranks = self.plane.reshape(self.pp, -1, tp * cp).swapaxes(0, 1)
        return replace(self, tp=tp, cp=cp, ranks=np.ascontiguousarray(ranks), widths=())

    def at(self, degree: int) -> "ModuleLayout":
        """The layout with the given entry of ``degrees`` for all units; only ``tp`` and ``cp`` of it mean anything."""
        if not self.widths:
            return self
        tp, cp = self.widths[degree]
        return replace(self, tp=tp, cp=cp, widths=())


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of all modules, in the model's order; ranks that share a block in every module are one lane."""

    modules: tuple[ModuleLayout, ...]
    num_microbatches: Count  # of a replica's LLM, as the planner assumed
    single_rank_boundary: bool = False  # all data between modules passes through one rank
    split_backward: bool = False  # the planner assumed input and weight gradients in passes of their own
    options: tuple[str, ...] = ()  # of assigner and scheduler, that the planner chose with the layout, ``key=value``
    lane_width: IntArray = field(init=False, compare=False)  # ranks of each lane ``[lanes]``
    lane_first_rank: IntArray = field(init=False, compare=False)  # lowest rank of each lane ``[lanes]``
    blocks: tuple[Blocks, ...] = field(init=False, compare=False)  # lanes of each module's blocks

    def __post_init__(self) -> None:
        for module in self.modules:
            freeze(module.ranks)
        ranks = (np.ascontiguousarray(module.ranks, np.int64).tobytes() for module in self.modules)
        shapes = tuple((*module.ranks.shape, module.widths) for module in self.modules)
        width, first_rank, blocks = find_lanes(shapes, tuple(ranks))
        object.__setattr__(self, "lane_width", width)
        object.__setattr__(self, "lane_first_rank", first_rank)
        object.__setattr__(self, "blocks", blocks)

    @property
    def content(self) -> tuple[object, ...]:
        """The parts in which layouts of one model differ, without the planner's assumptions."""
        names = ("tp", "cp", "layers_per_stage", "recompute", "recompute_whole", "offload", "sharding", "widths", "ep")
        return self.single_rank_boundary, *(
            (*(getattr(m, name) for name in names), m.ranks.shape, m.ranks.tobytes()) for m in self.modules
        )

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.lane_width)

    @property
    def is_one_stage(self) -> bool:
        """Whether every module is on all ranks, in one stage."""
        return all(module.pp == 1 and module.ranks.size == self.num_ranks for module in self.modules)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in use."""
        return int(self.lane_width.sum())

    def lane_sums(self, per_stage: Sequence[FloatArray]) -> FloatArray:
        """Sum a quantity over the stages of each lane ``[lanes]``; ``per_stage`` has one array per module."""
        total = np.zeros(self.num_lanes)
        for values, blocks in zip(per_stage, self.blocks, strict=True):
            np.add.at(total, blocks.held_lanes, values[rows_of(blocks.held_offsets) % blocks.num_stages])
        return total

    def module(self, name: str) -> ModuleLayout:
        """Return the layout of the named module."""
        return next(module for module in self.modules if module.module == name)

    def describe(self) -> dict[str, str]:
        """Return one short text per module for tables: degrees and layers of each stage."""
        return {
            m.module: f"tp{m.tp} cp{m.cp} pp{m.pp} dp{m.dp} layers {'/'.join(map(str, m.layers_per_stage))}"
            + (f" virtual x{m.stages_per_rank}" if m.stages_per_rank > 1 else "")
            + (" recompute" if m.recompute else "")
            + (" whole" if m.recompute_whole else "")
            + (" offload" if m.offload else "")
            + {ZERO1: "", ZERO3: " sharded"}.get(m.sharding, f" {m.sharding}")
            + (f" ep{m.ep}" if m.ep > 1 else "")
            + (f" widths {' '.join(f'{tp}x{cp}' for tp, cp in m.widths)}" if m.widths else "")
            for m in self.modules
        }


def check_tensor_parallel(module: ModuleSpec, tp: int, key: str = "layout.tp") -> None:
    """Raise ``UserError`` if a tensor-parallel degree, the user's ``key``, does not divide a size that it splits."""
    for what, size in module.sharded_sizes.items():
        if size % tp:
            raise UserError(f"{key}={tp}: must divide the {size} {what} of module {module.name}")


def check_words(module: ModuleSpec, tp: int, key: str = "layout.tp") -> None:
    """Raise ``UserError`` if a vocabulary would be padded, which training does not support."""
    if module.padded(tp) is not module:
        words = module.config.vocab_size
        raise UserError(f"{key}={tp}: must divide the {words} words of module {module.name} in training")


def check_layout(layout: Layout, model: ModelSpec, cluster: ClusterSpec) -> None:
    """Raise ``UserError`` for a layout that the model or the cluster cannot take."""
    names = [module.name for module in model.modules]
    require([m.module for m in layout.modules] == names, "layout", [m.module for m in layout.modules], f"for {names}")
    for placed, module in zip(layout.modules, model.modules, strict=True):
        where = f"layout.{placed.module}"
        check_tensor_parallel(module, placed.tp)
        total = sum(placed.layers_per_stage)
        require(total == len(module.layers), f"{where}.layers_per_stage", total, f"{len(module.layers)} layers in all")
        require(min(placed.layers_per_stage) >= 1, f"{where}.layers_per_stage", placed.layers_per_stage, "positive")
        _check_widths(placed, module, cluster)
        check_experts(placed, module)
        if placed.recompute_whole:
            fits = placed.recompute and placed.pp == 1 and module.is_encoder
            require(fits, f"{where}.recompute_whole", True, "false but for recomputed encoders in one stage")
        if placed.scatters:
            shards = f"sharded {'weights' if placed.sharded else 'gradients'}"
            require(placed.pp == 1, f"{where}.pp", placed.pp, f"1 with {shards}")
            require(not placed.offload, f"{where}.offload", placed.offload, f"false with {shards}")
        nodes = max(1, placed.ranks.size // cluster.gpus_per_node) if placed.sharding == HYBRID else 1
        require(placed.nodes == nodes, f"{where}.nodes", placed.nodes, f"{nodes} with sharding={placed.sharding}")
        shape = (placed.dp, placed.pp, placed.ranks_per_block)
        require(placed.ranks.shape == shape, f"{where}.ranks", placed.ranks.shape, f"of shape {shape}")
        held_in_turn = _goes_round(placed.ranks) or _goes_back(placed.ranks)
        require(held_in_turn, f"{where}.ranks", "repeated", "distinct, or those of the stages before in turn or back")
        # Tensor and context parallelism are priced by the links of aligned blocks of consecutive ranks.
        first = placed.ranks[:, :, :1]
        aligned = np.all(placed.ranks == first + np.arange(placed.ranks_per_block)) and not np.any(first % placed.tp)
        require(bool(aligned), f"{where}.ranks", "scattered", "consecutive in each block, from a multiple of tp")
        low = int(placed.ranks.min())
        high = int(placed.ranks.max())
        within = low >= 0 and high < cluster.num_ranks
        require(within, f"{where}.ranks", f"{low}..{high}", f"within the {cluster.num_ranks} ranks of {cluster.name}")


def check_experts(placed: ModuleLayout, module: ModuleSpec) -> None:
    """Raise ``UserError`` for an expert parallelism that a module's experts or ranks cannot have."""
    if placed.ep == 1:
        return
    key = "layout.ep"
    experts = module.config.experts
    if experts is None:
        raise UserError(f"{key}={placed.ep}: must be 1: module {module.name} has no experts")
    copies = placed.dp * placed.cp
    for count in (experts.count, experts.visual_count):
        require(count % placed.ep == 0, key, placed.ep, f"a divisor of the {count} experts")
    require(copies % placed.ep == 0, key, placed.ep, f"a divisor of dp x cp={copies}")
    whole = placed.ep % placed.cp == 0 or placed.cp % placed.ep == 0
    require(whole, key, placed.ep, f"a multiple or a divisor of layout.cp={placed.cp}")
    for what, clashes, why in (
        ("layout.sharding=hybrid", placed.sharding == HYBRID, "because every node holds all weights"),
        ("groups of several widths", bool(placed.widths), "because groups of other widths run other passes"),
        ("offload", placed.offload, "because ranks offload whole layers"),
    ):
        require(not clashes, key, placed.ep, f"1 with {what} of module {module.name}, {why}")


def _check_widths(placed: ModuleLayout, module: ModuleSpec, cluster: ClusterSpec) -> None:
    if not placed.widths:
        return
    where = f"layout.{placed.module}.widths"
    sizes = [tp * cp for tp, cp in placed.widths]
    listed = [f"{tp}x{cp}" for tp, cp in placed.widths]
    require(len({*placed.widths}) == len(sizes) and sizes == sorted(sizes), where, listed, "different, narrow to wide")
    ranks = placed.plane.shape[1]
    require(sizes[-1] <= ranks and ranks % sizes[0] == 0, where, listed, f"up to {ranks} ranks, the first a divisor")
    for (tp, cp), size in zip(placed.widths, sizes, strict=True):
        check_tensor_parallel(module, tp)
        require(size & (size - 1) == 0, where, f"{tp}x{cp}", "of 1, 2, 4, ... ranks")
        require(tp % placed.tp == 0, where, f"{tp}x{cp}", f"with a TP that tp={placed.tp} divides")
        require(cluster.gpus_per_node % tp == 0, where, f"{tp}x{cp}", f"with a TP that divides {cluster.gpus_per_node}")
    steps = np.diff(placed.plane, axis=1)
    first = placed.plane[:, 0] % sizes[-1]
    require(not np.any(steps != 1), where, listed, "only where each stage holds consecutive ranks")
    require(not np.any(first), where, listed, f"only where the ranks of a stage begin at a multiple of {sizes[-1]}")
    require(not placed.offload, f"layout.{placed.module}.offload", placed.offload, "false with widths")


def _goes_round(ranks: IntArray) -> bool:
    """Return whether stages cycle over a replica's blocks, equally in all replicas; ranks are ``[dp, pp, width]``."""
    num_blocks = max(1, len({*ranks[0].ravel().tolist()}) // ranks.shape[2])
    once = ranks[:, :num_blocks]
    in_turn = np.array_equal(ranks, once[:, np.arange(ranks.shape[1]) % num_blocks])
    return in_turn and len({*once.ravel().tolist()}) == once.size


def _goes_back(ranks: IntArray) -> bool:
    """Return whether stages form a V: they reverse once, on the previous stage's ranks, and retrace their path."""
    stages = ranks.shape[1]
    again = np.flatnonzero(np.all(ranks[:, 1:] == ranks[:, :-1], axis=(0, 2)))
    if len(again) != 1:
        return False
    turn = 1 + int(again[0])
    back = ranks[:, turn:]
    common = min(turn, stages - turn)
    longer = ranks[:, :turn] if turn >= stages - turn else back
    same = np.array_equal(back[:, :common], ranks[:, turn - common : turn][:, ::-1])
    return same and np.unique(ranks).size == longer.size


def layout_values(layout: Layout) -> dict[str, Any]:
    """A layout as plain values, complete and comparable: its fields, and those of each module under ``modules``."""
    modules = [
        {f.name: getattr(module, f.name) for f in fields(ModuleLayout)}
        | {"layers_per_stage": [*module.layers_per_stage], "ranks": module.ranks.tolist()}
        for module in layout.modules
    ]
    rest = {f.name: getattr(layout, f.name) for f in fields(Layout) if f.init and f.name != "modules"}
    return {"modules": modules, **rest}


def module_values(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's values in the current format; older plan files have ``sharded`` instead of ``sharding``."""
    values = {**written}
    if "sharded" in values:
        values["sharding"] = ZERO3 if values.pop("sharded") else ZERO1
    return values


def layout_to_json(layout: Layout) -> str:
    """A layout as text, complete and comparable."""
    return json.dumps(layout_values(layout), sort_keys=True)


def layout_from_json(text: str) -> Layout:
    """The layout that ``layout_to_json`` wrote."""
    values = json.loads(text)
    values["modules"] = [*map(module_values, values["modules"])]
    for module in values["modules"]:
        module["layers_per_stage"] = tuple(module["layers_per_stage"])
        module["ranks"] = np.array(module["ranks"])
        module["widths"] = tuple(map(tuple, module.get("widths", ())))
    modules = tuple(ModuleLayout(**module) for module in values["modules"])
    return Layout(**{**values, "modules": modules, "options": tuple(values.get("options", ()))})


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of DP degrees: encoder u feeds LLM v if ``u // fan_in == v // fan_out``; at least one of both is 1."""

    fan_in: int  # encoder replicas whose shards one LLM replica concatenates
    fan_out: int  # LLM replicas among which one encoder replica's shard is sliced


def is_integer_ratio(encoder_dp: int, llm_dp: int) -> bool:
    """Whether one degree is a multiple of the other."""
    return encoder_dp % llm_dp == 0 or llm_dp % encoder_dp == 0


def find_ratio(encoder: ModuleLayout, llm: ModuleLayout) -> Ratio:
    """The ratio of two layouts; ``IncompatibleError`` if it is no integer."""
    if not is_integer_ratio(encoder.dp, llm.dp):
        raise IncompatibleError(
            f"layout: {encoder.module} has dp={encoder.dp}, {llm.module} has dp={llm.dp}: "
            "the batch-dimension transform needs one to be a multiple of the other"
        )
    return Ratio(max(1, encoder.dp // llm.dp), max(1, llm.dp // encoder.dp))


def is_colocated(encoder: ModuleLayout, llm: ModuleLayout) -> bool:
    """Whether both modules occupy exactly the same ranks."""
    return np.array_equal(np.unique(encoder.ranks), np.unique(llm.ranks))


def is_disjoint(encoder: ModuleLayout, llm: ModuleLayout) -> bool:
    """Whether the modules share no rank."""
    return not np.intersect1d(encoder.ranks, llm.ranks).size


def are_grids(encoder: ModuleLayout, llm: ModuleLayout) -> bool:
    """Whether both are grids over the same ranks and groups, the encoder in one stage (arXiv:2605.27678, section 1)."""
    if encoder.widths or llm.widths:
        return False
    if encoder.pp > 1 or not is_integer_ratio(encoder.dp, llm.dp) or not is_colocated(encoder, llm):
        return False
    groups = min(encoder.dp, llm.dp)
    ours, theirs = (np.sort(module.ranks.reshape(groups, -1), axis=1) for module in (encoder, llm))
    return np.array_equal(ours, theirs)
