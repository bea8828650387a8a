"""The step at an iteration's end, also where it overlaps the next one: gradients, optimizer, weights, in buckets."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, freeze, rows_of
from entrain_bench.base.remembered import remembered
from entrain_bench.costs.links import all_gather_s, all_reduce_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.profiled.times import LayerTimes
from entrain_bench.costs.sharding import layer_parameters
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import ModuleSpec

# Parameters of a bucket: the larger of a constant and a number for each rank that holds the same weights
# (megatron-core 0.19.2, distributed_data_parallel.py).
BUCKET_PARAMETERS = 40_000_000
BUCKET_PARAMETERS_PER_COPY = 1_000_000


@dataclass(frozen=True, slots=True)
class Steps:
    """Times of the step, for every stage of every module in their order ``[stages]``."""

    overlapped: bool  # gradients are synchronized during other work, not after it
    sync_s: FloatArray  # how long the gradients of a stage occupy the links
    optimizer_s: FloatArray
    gather_s: FloatArray  # of the weights right after it; 0 if it overlaps the first forwards
    last_backwards: tuple[IntArray, ...]  # last pass of each replica that makes gradients of the stage's weights
    lag_s: tuple[FloatArray, ...]  # from the end of each of them to the end of the synchronization on idle links
    tied: tuple[tuple[int, int, float], ...]

    @property
    def comm_s(self) -> FloatArray:
        """Return communication seconds inside steps, first of synchronizations, then of optimizers ``[2 stages]``."""
        return np.concatenate([np.zeros_like(self.sync_s) if self.overlapped else self.sync_s, self.gather_s])


@dataclass(frozen=True, slots=True)
class ExposedStep:
    """Least seconds after the last backward of a stage, and before its first forward ``[stages]``."""

    gather_s: FloatArray
    sync_s: FloatArray
    optimizer_s: FloatArray


@dataclass(frozen=True, slots=True)
class Traffic:
    """Gradient and weight traffic of a stage, in buckets in the order of a backward."""

    layer_parameters: FloatArray  # that learn on a rank; tied weights on one rank count once [layers]
    parameters: FloatArray  # of each bucket [buckets]
    sync_s: FloatArray  # reduction of its gradients [buckets]
    gather_s: FloatArray  # all-gather of its bf16 weights; 0 if they are not sharded [buckets]


@dataclass(frozen=True, slots=True)
class PassEnds:
    """Where the passes of a module begin and end on each of its stages; lists of one array per stage."""

    traffic: list[Traffic]  # part of its weights whose transfer is then exposed
    exposed: ExposedStep  # exposed part of it
    firsts: list[IntArray]  # first forward of every lane, those of several lanes once [passes]
    lasts: list[IntArray]  # last backward, or weight pass, of every lane [passes]
    forward_s: list[FloatArray]  # time of each layer in the former, communication included [passes, layers]
    backward_s: list[FloatArray]  # time of each layer in the latter, communication included [passes, layers]


MAX_KNOWN = 512
MAX_BESIDE = 2048


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Times of steps on the cluster under the framework's settings."""

    memory: Memory
    layer_times: LayerTimes
    cluster: ClusterSpec
    _known: dict[tuple[object, ...], tuple[ModuleSpec, list[Traffic], ExposedStep]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _beside: dict[tuple[object, ...], tuple[ModuleSpec, ExposedStep]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def optimizer_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Optimizer step of each stage ``[stages]``; a distributed optimizer steps a shard on every rank."""
        sharded = self.memory.framework.distributed_optimizer or placed.scatters
        shard = self.memory.sharing(module, placed) if sharded else 1
        if placed.ep > 1:
            experts = self._expert_parameters(module, placed)
            copies = self.memory.expert_sharing(module, placed) if sharded else 1
            others = self._parameters(module, placed) - experts
            return self.layer_times.optimizer_s(others / shard + experts / (placed.ep * copies))
        return self.layer_times.optimizer_s(self._parameters(module, placed) / shard)

    def sync_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """How long the gradients of each stage occupy the links, in their buckets ``[stages]``."""
        return np.array([stage.sync_s.sum() for stage in self._of(module, placed)[1]])

    def gather_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """All-gather of the bf16 weights of each stage, in their buckets ``[stages]``; none if they are not sharded."""
        return np.array([stage.gather_s.sum() for stage in self._of(module, placed)[1]])

    def tied_s(self, module: ModuleSpec, placed: ModuleLayout) -> float:
        """All-reduce of a tied embedding between the two blocks that hold it, after all other gradients are reduced."""
        if not module.config.tied_embeddings or placed.is_closed or not module.layers[0].learns:
            return 0.0
        tier = self.cluster.group_tier(placed.ranks[0, [0, -1]])
        embedding = module.padded(placed.tp).layers[0].parameters / placed.tp
        return float(all_reduce_s(self.memory.gradient_bytes * embedding, 2, tier))

    def exposed(self, module: ModuleSpec, placed: ModuleLayout) -> ExposedStep:
        """Return the step that no overlap hides: only the bucket with a stage's first layers; read-only."""
        return self._of(module, placed)[2]

    def exposed_beside(
        self, module: ModuleSpec, placed: ModuleLayout, forward_s: FloatArray, backward_s: FloatArray
    ) -> ExposedStep:
        """Return the step that the layers of the first forward and the last backward ``[layers]`` do not hide."""

        def made() -> tuple[ModuleSpec, ExposedStep]:
            framework = self.memory.framework
            _, traffic, least = self._of(module, placed)
            gather_s = least.gather_s.copy()
            sync_s = least.sync_s.copy()
            bounds = np.cumsum(placed.layers_per_stage[:-1])
            layers = np.split(forward_s, bounds), np.split(backward_s, bounds)
            tied_s = np.zeros(placed.pp)
            tied_s[[0, -1]] += self.tied_s(module, placed)
            for stage, (stage_traffic, forward, backward) in enumerate(zip(traffic, *layers, strict=True)):
                if len(stage_traffic.parameters) < 2:
                    continue
                if framework.overlap_grad_reduce and stage_traffic.sync_s.any():
                    sync_s[stage] = self._lag_s(backward[None], stage_traffic)[0] + tied_s[stage]
                if framework.overlap_param_gather and stage_traffic.gather_s.any():
                    gather_s[stage] = self._wait_s(forward[None], stage_traffic)[0]
            freeze(gather_s, sync_s)
            return module, ExposedStep(gather_s, sync_s, least.optimizer_s)

        key = *_key_of(module, placed), forward_s.tobytes(), backward_s.tobytes()
        return remembered(self._beside, key, made, MAX_BESIDE)[1]

    def _lag_s(self, layer_s: FloatArray, traffic: Traffic) -> FloatArray:
        """Return seconds from backwards' ends to the end of their synchronization on idle links ``[passes]``."""
        return self._slowed_s(sync_lag_s(layer_s, traffic), traffic.sync_s)

    def _wait_s(self, layer_s: FloatArray, traffic: Traffic) -> FloatArray:
        """Return seconds from the launch of aligned gathers to the forward; for others, the stall ``[passes]``."""
        waited_s = gather_lead_s if self.memory.framework.align_param_gather else gather_stall_s
        return self._slowed_s(waited_s(layer_s, traffic), traffic.gather_s)

    def _slowed_s(self, exposed_s: FloatArray, bucket_s: FloatArray) -> FloatArray:
        """Return seconds that buckets add to a pass: ``exposed_s`` exceed it, the rest slows it ``[passes]``."""
        return exposed_s + self.cluster.device.overlap_cost * (bucket_s.sum() - exposed_s)

    def _of(self, module: ModuleSpec, placed: ModuleLayout) -> tuple[ModuleSpec, list[Traffic], ExposedStep]:

        def made() -> tuple[ModuleSpec, list[Traffic], ExposedStep]:
            traffic = self._traffic(module, placed)
            return module, traffic, self._exposed(module, placed, traffic)

        return remembered(self._known, _key_of(module, placed), made, MAX_KNOWN)

    def _exposed(self, module: ModuleSpec, placed: ModuleLayout, traffic: Sequence[Traffic]) -> ExposedStep:
        framework = self.memory.framework

        def shown(bucket_s: FloatArray, hides: bool, stage: Traffic) -> float:
            # First layers without parameters hide a part of their bucket.
            last = bucket_s[-1:] if stage.layer_parameters[0] else bucket_s[:0]
            return float((last if hides else bucket_s).sum())

        gather_s = np.array([shown(stage.gather_s, framework.overlap_param_gather, stage) for stage in traffic])
        sync_s = np.array([shown(stage.sync_s, framework.overlap_grad_reduce, stage) for stage in traffic])
        sync_s[[0, -1]] += self.tied_s(module, placed)
        exposed = ExposedStep(gather_s, sync_s, self.optimizer_s(module, placed))
        freeze(exposed.gather_s, exposed.sync_s, exposed.optimizer_s)
        return exposed

    def _traffic(self, module: ModuleSpec, placed: ModuleLayout) -> list[Traffic]:
        framework = self.memory.framework
        sharing = self.memory.sharing(module, placed)
        copies = module.weight_copies(placed.tp, placed.dp * placed.cp)
        # Rings go through the ranks that hold the same weights of a stage, or share out its optimizer states.
        rings = placed.ranks[:, :, :: module.weight_shards(placed.tp)].swapaxes(0, 1).reshape(placed.pp, -1)
        tp = placed.tp
        learning = layer_parameters(module, tp, learning=True, closed=placed.is_closed) / module.weight_shards(tp)
        if placed.ep > 1:
            return self._traffic_of_experts(module, placed, learning, (sharing, copies))
        inside = self.cluster.ring_tiers(rings[:, :sharing] if framework.distributed_optimizer else rings)
        across = self.cluster.ring_tiers(rings[:, ::sharing]) if sharing < copies else inside
        bounds = np.cumsum(placed.layers_per_stage[:-1])
        held = self._parameters(module, placed).tolist()
        stages = zip(np.split(learning, bounds), held, inside, across, strict=True)
        stages_traffic = list[Traffic]()
        size = self.memory.gradient_bytes
        # Sharded weights and gradients travel within their passes (``sharding``).
        travels = copies > 1 and not placed.sharded
        for stage_learning, total, ring, instances in stages:
            # megatron-core splits the first stage of a pipeline only: later ones have its backwards to hide behind.
            parameters = bucket_parameters(total, copies, framework.overlap_grad_reduce and not stages_traffic)
            sync_s = gather_s = np.zeros(len(parameters))
            if travels and framework.distributed_optimizer:
                # Scattered inside an instance of the optimizer, each shard then reduced over all of them.
                if not placed.scatters:
                    sync_s = all_gather_s(size * parameters, sharing, ring)
                    sync_s = sync_s + all_reduce_s(size * parameters / sharing, copies // sharing, instances)
                gather_s = all_gather_s(BF16_BYTES * parameters, sharing, ring)
            elif travels:
                sync_s = all_reduce_s(size * parameters, copies, ring)
            traffic = stage_learning, parameters, sync_s, gather_s
            freeze(*traffic)
            stages_traffic.append(Traffic(*traffic))
        return stages_traffic

    def _traffic_of_experts(
        self, module: ModuleSpec, placed: ModuleLayout, learning: FloatArray, degrees: tuple[int, int]
    ) -> list[Traffic]:
        """The traffic of stages with expert parallelism: every bucket holds the stage's mean share of experts.

        Gradients of experts are reduced over the ranks that hold them, which are ``ep`` places apart.
        """
        framework = self.memory.framework
        sharing, copies = degrees
        same = self.memory.expert_sharing(module, placed)
        size = self.memory.gradient_bytes
        held = placed.ranks[:, :, :: module.weight_shards(placed.tp)].swapaxes(0, 1).reshape(placed.pp, -1)
        rings = self.cluster.ring_tiers(held[:, :sharing])
        of_experts = self.cluster.ring_tiers(held[:, :: placed.ep])
        whole = np.array([layer.trained_expert_parameters for layer in module.layers], np.float64)
        whole = whole / module.weight_shards(placed.tp)
        bounds = np.cumsum(placed.layers_per_stage[:-1])
        stages = zip(np.split(learning, bounds), np.split(whole, bounds), rings, of_experts, strict=True)
        traffic = list[Traffic]()
        for layers, experts, ring, expert_ring in stages:
            held_layers = layers - experts + experts / placed.ep
            total = float(held_layers.sum())
            parameters = bucket_parameters(total, copies, framework.overlap_grad_reduce and not traffic)
            own = float(experts.sum()) / placed.ep / max(total, 1.0)
            parts = ((1.0 - own) * parameters, sharing, ring), (own * parameters, same, expert_ring)
            reduce_s = all_gather_s if framework.distributed_optimizer else all_reduce_s
            sync_s, gather_s = np.zeros((2, len(parameters)))
            for part, ranks, tier in parts:
                if not placed.scatters:
                    sync_s = sync_s + reduce_s(size * part, ranks, tier)
                if framework.distributed_optimizer and not placed.sharded:
                    gather_s = gather_s + all_gather_s(BF16_BYTES * part, ranks, tier)
            columns = held_layers, parameters, sync_s, gather_s
            freeze(*columns)
            traffic.append(Traffic(*columns))
        return traffic

    def ends(
        self,
        program: Program,
        index: int,
        layer_s: tuple[FloatArray, FloatArray],
        duration_s: FloatArray | None = None,
    ) -> PassEnds:
        """Where a module's passes begin and end, by its layers' times, scaled to those of passes ``[actions]``."""
        _, traffic, exposed = self._of(program.model.modules[index], program.layout.modules[index])
        passes = first_of_stages(program, index), last_of_stages(program, index)
        bounds = np.cumsum(program.layout.modules[index].layers_per_stage[:-1])
        sides = []
        for stage_actions, seconds in zip(passes, layer_s, strict=True):
            stages = zip(stage_actions, np.split(seconds, bounds, axis=-1), strict=True)
            if duration_s is None:
                sides.append([np.ascontiguousarray(part[program.chunk[actions]]) for actions, part in stages])
                continue
            weights = [(actions, np.maximum(part, 1e-12)) for actions, part in stages]
            sides.append([duration_s[actions][:, None] * (part / part.sum()) for actions, part in weights])
        return PassEnds(traffic, exposed, *passes, *sides)

    def steps(self, program: Program, ends: Sequence[PassEnds]) -> Steps:
        """Times of a program's step."""
        framework = self.memory.framework
        lags = list[FloatArray]()
        tied = []
        for module, placed, module_ends in zip(program.model.modules, program.layout.modules, ends, strict=True):
            if seconds := self.tied_s(module, placed):
                tied.append((len(lags), len(lags) + placed.pp - 1, seconds))
            for traffic, layer_s in zip(module_ends.traffic, module_ends.backward_s, strict=True):
                hides = framework.overlap_grad_reduce and traffic.sync_s.any()
                lags.append(self._lag_s(layer_s, traffic) if hides else np.zeros(len(layer_s)))
        stages = [traffic for module_ends in ends for traffic in module_ends.traffic]
        gather_s = np.array([traffic.gather_s.sum() for traffic in stages])
        return Steps(
            framework.overlap_grad_reduce,
            np.array([traffic.sync_s.sum() for traffic in stages]),
            np.concatenate([module_ends.exposed.optimizer_s for module_ends in ends]),
            np.zeros_like(gather_s) if framework.overlap_param_gather else gather_s,
            tuple(last for module_ends in ends for last in module_ends.lasts),
            tuple(lags),
            tuple(tied),
        )

    def gathers(self, program: Program, ends: Sequence[PassEnds]) -> tuple[FloatArray, FloatArray]:
        """Return the earliest start of each action whose weights are gathered, and how long it waits then."""
        release = np.zeros(program.num_actions)
        stall = np.zeros(program.num_actions)
        framework = self.memory.framework
        launched = np.zeros(program.layout.num_lanes)
        if not framework.overlap_param_gather:
            return release, stall
        for blocks, module_ends in zip(program.layout.blocks, ends, strict=True):
            for stage, (traffic, firsts) in enumerate(zip(module_ends.traffic, module_ends.firsts, strict=True)):
                if not traffic.gather_s.any():
                    continue
                wait_s = self._wait_s(module_ends.forward_s[stage], traffic)
                if framework.align_param_gather:
                    lanes = blocks.of_stage(stage)
                    begin = launched[lanes].max()
                    release[firsts] = begin + wait_s
                    launched[lanes] = begin + traffic.gather_s.sum()
                else:
                    stall[firsts] = wait_s
        return release, stall

    def _parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        return self.memory.learning_parameters(module, placed) / module.weight_shards(placed.tp)

    def _expert_parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        return self.memory.expert_parameters(module, placed)[1] / module.weight_shards(placed.tp)


def _key_of(module: ModuleSpec, placed: ModuleLayout) -> tuple[object, ...]:
    """The facts that decide the step of a module."""
    sharding = placed.sharding, placed.nodes, placed.ep
    return id(module), placed.tp, placed.cp, placed.layers_per_stage, placed.digest_of_ranks, *sharding


def last_of_stages(program: Program, index: int) -> list[IntArray]:
    """Return the last backward, or weight pass, of every lane, one array per stage of a module."""
    return _last(program, index, Pass.WEIGHT if program.splits_backward(index) else Pass.BACKWARD, slice(None))


def first_of_stages(program: Program, index: int) -> list[IntArray]:
    """Return the first forward of every lane, one array per stage of a module."""
    return _last(program, index, Pass.FORWARD, slice(None, None, -1))


def _last(program: Program, index: int, kind: Pass, order: slice) -> list[IntArray]:
    placed = program.layout.modules[index]
    actions = program.lane_actions[order]
    lanes = rows_of(program.lane_offsets)[order]
    mine = (program.module[actions] == index) & (program.kind[actions] == kind)
    actions = actions[mine]
    lanes = lanes[mine]
    extremes = np.full((placed.pp, program.layout.num_lanes), -1)
    # The last of several values for one place is kept.
    extremes[program.stage[actions], lanes] = actions
    return [np.unique(row[row >= 0]) for row in extremes]


def bucket_parameters(parameters: float, copies: int, overlapped: bool) -> FloatArray:
    """Parameters of each bucket in the order of a backward ``[buckets]``; all in one without overlap."""
    size = max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_COPY * copies) if overlapped else parameters
    if not parameters:
        return np.zeros(0)
    full = int(parameters // size)
    rest = parameters - full * size
    return np.array([float(size)] * full + [rest] * (rest > 0))


def _reached_s(
    layer_s: FloatArray, layer_parameters: FloatArray, parameters: FloatArray, begins: bool = False
) -> FloatArray:
    """Return when a pass has processed the given numbers of parameters, or begins the next ``[passes, points]``."""
    ends = np.cumsum(layer_parameters)
    layer = np.minimum(np.searchsorted(ends, parameters, side="right" if begins else "left"), len(ends) - 1)
    held = layer_parameters[layer]
    inside = (parameters - (ends[layer] - held)) / np.maximum(held, 1.0)
    before = np.cumsum(layer_s, axis=1) - layer_s
    return np.asarray(before[:, layer] + inside * layer_s[:, layer])


def sync_lag_s(layer_s: FloatArray, traffic: Traffic) -> FloatArray:
    """Return seconds from the end of a backward to the end of its gradient synchronization on idle links ``[passes]``.

    ``layer_s`` are times of the backward's layers, first layer first ``[passes, layers]``.
    """
    ready = _reached_s(layer_s[:, ::-1], traffic.layer_parameters[::-1], np.cumsum(traffic.parameters))
    remaining = np.cumsum(traffic.sync_s[::-1])[::-1]
    return np.asarray((ready + remaining).max(axis=1) - layer_s.sum(axis=1))


def gather_stall_s(layer_s: FloatArray, traffic: Traffic) -> FloatArray:
    """How long a forward, of ``layer_s``, waits in all if each gather follows the one before ``[passes]``."""
    needed = _needed_s(layer_s, traffic)
    bucket_s = traffic.gather_s[::-1]
    stalls = np.maximum(bucket_s[1:] - np.diff(needed, axis=1), 0.0)
    return np.asarray(bucket_s[0] + stalls.sum(axis=1))


def gather_lead_s(layer_s: FloatArray, traffic: Traffic) -> FloatArray:
    """From the launch of a stage's gathers to the earliest start of a forward that then never waits ``[passes]``."""
    return np.asarray((np.cumsum(traffic.gather_s[::-1]) - _needed_s(layer_s, traffic)).max(axis=1))


def _needed_s(layer_s: FloatArray, traffic: Traffic) -> FloatArray:
    """When a forward first needs each bucket, the first layers' bucket first ``[passes, buckets]``."""
    parameters = traffic.parameters[::-1]
    return _reached_s(layer_s, traffic.layer_parameters, np.cumsum(parameters) - parameters, begins=True)


def delayed_s(
    lanes: Sequence[IntArray], num_lanes: int, lead_s: FloatArray, link_s: FloatArray, forward_s: FloatArray
) -> FloatArray:
    """Return the delay of each lane's first forward by consecutive gathers, in seconds ``[lanes]``.

    ``lanes`` are those of every stage, in forward order. ``lead_s`` is the time from the start of a stage's gather to
    the earliest start of its first forward. It takes ``forward_s``, and the links are busy for ``link_s`` ``[stages]``.
    """
    launched, free, passed = np.zeros((3, num_lanes))
    for stage_lanes, lead, link, forward in zip(lanes, lead_s, link_s, forward_s, strict=True):
        begin = launched[stage_lanes].max()
        free[stage_lanes] = np.maximum(free[stage_lanes], begin + lead * (link > 0)) + forward
        launched[stage_lanes] = begin + link
        passed[stage_lanes] += forward
    return np.asarray(free - passed)


def trailing_s(
    lanes: Sequence[IntArray], num_lanes: int, lag_s: FloatArray, link_s: FloatArray, backward_s: FloatArray
) -> FloatArray:
    """Return seconds of synchronization after each lane's last backward, queued as in ``place_steps`` ``[lanes]``.

    ``lag_s`` is the time from the end of a stage's last backward (``backward_s``) to the end of its synchronization on
    idle links; the links are busy for ``link_s`` ``[stages]``.
    """
    left = np.zeros(num_lanes)
    ends_s = []
    for stage_lanes, backward in zip(lanes, backward_s, strict=True):
        ends_s.append(-float(left[stage_lanes].min()))
        left[stage_lanes] += backward
    links_free = np.full(num_lanes, -np.inf)
    trailing = np.zeros(num_lanes)
    for stage_lanes, end, lag, link in zip(lanes[::-1], ends_s[::-1], lag_s[::-1], link_s[::-1], strict=True):
        ready = end + lag
        if link:
            ready = max(ready, float(links_free[stage_lanes].max()) + link)
            links_free[stage_lanes] = ready
        trailing[stage_lanes] = np.maximum(trailing[stage_lanes], ready)
    return trailing
