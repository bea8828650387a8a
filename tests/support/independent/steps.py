"""Buckets of gradients and weights, and what follows the last backward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from entrain_bench.program import Pass
from support.independent.job import Action, Job
from support.independent.layers import BF16, FP32


@dataclass(frozen=True)
class Stage:
    """A stage of a module, all replicas.

    Attributes:
        buckets: parameters that learn on a rank of each bucket, in the order of a backward.
        ring: ranks that hold the same of its weights, the first of each tensor-parallel group.
        instances: groups of them, each of which shares out all that is shared out.
        scattered: whether passes reduce its gradients; ``gathered``: whether they gather its weights.
    """

    module: int
    stage: int
    scattered: bool
    gathered: bool
    lanes: tuple[int, ...]
    layer_parameters: list[float]
    buckets: list[float]
    ring: list[int]
    instances: int
    ep: int = 1
    expert_share: float = 0.0  # of a rank's parameters

    @property
    def copies(self) -> int:
        """How many ranks hold the same."""
        return len(self.ring)

    @property
    def sharing(self) -> int:
        """How many of them share out the states of one optimizer."""
        return self.copies // self.instances


def placed_stages(job: Job) -> list[Stage]:
    """All stages in the order of a forward."""
    stages = []
    for module, placed in enumerate(job.placed):
        for stage in range(placed.pp):
            held, copies = job.learning(module, stage), placed.dp * placed.cp
            left, buckets = sum(held), []
            split = job.framework["overlap_grad_reduce"] and stage == 0
            size = max(40_000_000, 1_000_000 * copies) if split else left
            while left > 0:
                buckets.append(min(size, left))
                left -= buckets[-1]
            ranks = sorted(set(placed.ranks[:, stage].ravel().tolist()))
            ring = job.sharing(module, stage)
            asked = job.framework["encoder_optimizers"] if job.configs[module]["role"] == "encoder" else 1
            instances = max(n for n in range(1, asked + 1) if asked % n == 0 and copies % n == 0)
            shared = job.shares_gradients(module), job.shares_weights(module)
            if shared[0]:
                instances = job.nodes(module)
            lanes = _lanes(job, ranks)
            own = job.of_experts(module, stage) / sum(held) if placed.ep > 1 and sum(held) else 0.0
            stages.append(Stage(module, stage, *shared, lanes, held, buckets, ring, instances, placed.ep, own))
    return stages


def _lanes(job: Job, ranks: list[int]) -> tuple[int, ...]:
    layout = job.program.layout
    return tuple(lane for lane in range(layout.num_lanes) if int(layout.lane_first_rank[lane]) in ranks)


def sync_s(job: Job, stage: Stage, parameters: float) -> float:
    """Reduction of the gradients of some parameters over all copies; nothing is left of it if passes reduce them."""
    if stage.copies == 1 or stage.scattered:
        return 0.0
    if not job.framework["distributed_optimizer"]:
        own = job.gradient_bytes * parameters * stage.expert_share
        others = job.machine.reduce_s(job.gradient_bytes * parameters - own, stage.ring, ring=True)
        same = stage.ring[:: stage.ep]
        return others + (job.machine.reduce_s(own, same, ring=True) if stage.ep > 1 and len(same) > 1 else 0.0)
    inside, across = stage.ring[: stage.sharing], stage.ring[:: stage.sharing]
    size = job.gradient_bytes * parameters
    if stage.ep > 1:
        own = size * stage.expert_share
        return job.machine.ring_s(size - own, stage.ring) + job.machine.ring_s(own, stage.ring[:: stage.ep])
    return job.machine.ring_s(size, inside) + job.machine.reduce_s(size / stage.sharing, across, ring=True)


def gather_s(job: Job, stage: Stage, parameters: float) -> float:
    """Gather of some weights that the optimizer's ranks hold a part of each."""
    if stage.copies == 1 or stage.gathered or not job.framework["distributed_optimizer"]:
        return 0.0
    if stage.ep > 1:
        own = BF16 * parameters * stage.expert_share
        return job.machine.ring_s(BF16 * parameters - own, stage.ring) + job.machine.ring_s(
            own, stage.ring[:: stage.ep]
        )
    return job.machine.ring_s(BF16 * parameters, stage.ring[: stage.sharing])


def first_passes(job: Job, stage: Stage) -> list[Action]:
    """The first forward of every lane on a stage."""
    return _outermost(job, stage, Pass.FORWARD, 1)


def last_passes(job: Job, stage: Stage) -> list[Action]:
    """The last pass of every lane on a stage that makes gradients of weights."""
    return _outermost(job, stage, Pass.WEIGHT if stage.module in job.split else Pass.BACKWARD, -1)


def _outermost(job: Job, stage: Stage, kind: Pass, way: int) -> list[Action]:
    wanted = stage.module, kind, stage.stage
    ends = (next((a for a in order[::way] if (a.module, a.kind, a.stage) == wanted), None) for order in job.orders)
    return list(dict.fromkeys(action for action in ends if action))


def edges_s(seconds: list[float], parameters: list[float], buckets: list[float]) -> tuple[list[float], list[float]]:
    """When a pass comes to the first and is through with the last of each bucket; layers in the pass's order."""

    def reached(amount: float, next_one: bool) -> float:
        """When so many are through; with ``next_one`` when the next one begins, which idle layers may precede."""
        clock = 0.0
        for took, held in zip(seconds, parameters, strict=True):
            if amount < held or (amount == held and not next_one):
                return clock + took * (amount / held if held else 0.0)
            clock, amount = clock + took, amount - held
        return clock

    begins = [sum(buckets[:place]) for place in range(len(buckets))]
    ends = [begin + bucket for begin, bucket in zip(begins, buckets, strict=True)]
    return [reached(begin, True) for begin in begins], [reached(end, False) for end in ends]


def weights_ready(job: Job) -> tuple[dict[Action, float], dict[Action, float]]:
    """Earliest start of every stage's first forwards, and how long they wait beyond what else they need."""
    release, stall = {}, {}
    free: dict[int, float] = defaultdict(float)
    if not job.framework["overlap_param_gather"]:
        return release, stall
    for stage in placed_stages(job):
        buckets = stage.buckets[::-1]
        took = [gather_s(job, stage, bucket) for bucket in buckets]
        if not sum(took):
            continue
        begin = max(free[lane] for lane in stage.lanes)
        for action in first_passes(job, stage):
            needed, _ = edges_s(job.seconds(action), stage.layer_parameters, buckets)
            if job.framework["align_param_gather"]:
                there = [begin + sum(took[: place + 1]) for place in range(len(took))]
                lead = max(at - begin - need for at, need in zip(there, needed, strict=True))
                release[action] = begin + lead + job.machine.slowing * (sum(took) - lead)
                continue
            # Each gather is launched when the forward has had to have the one before.
            waited = took[0]
            for place in range(1, len(took)):
                waited += max(0.0, took[place] - (needed[place] - needed[place - 1]))
            stall[action] = waited + job.machine.slowing * (sum(took) - waited)
        free |= dict.fromkeys(stage.lanes, begin + sum(took))
    return release, stall


@dataclass
class StepTimes:
    """Start and end of each synchronisation and each optimizer step, in the order of a forward."""

    sync: list[tuple[float, float]]
    optimizer: list[tuple[float, float]]


def place_steps(job: Job, end: dict[Action, float], hold_s: dict[Action, float]) -> StepTimes:
    """Steps after the passes."""
    stages, free = placed_stages(job), defaultdict(float)
    for action, lanes in job.lanes.items():
        for lane in lanes:
            free[lane] = max(free[lane], end[action] + hold_s[action])
    sync = _beside(job, stages, end) if job.framework["overlap_grad_reduce"] else _after(job, stages, free)
    ready = max([*end.values(), *(done for _, done in sync)])
    for module in range(len(job.placed)):
        mine = [place for place, stage in enumerate(stages) if stage.module == module]
        if job.is_tied(module) and not job.ends_meet(module) and job.layers[module][0].learns:
            ends = job.placed[module].ranks[0, [0, -1]].ravel().tolist()
            shared = job.layers[module][0].parameters / job.placed[module].tp
            both = 2 * job.machine.gather_s(job.gradient_bytes * shared, ends, 2) - job.machine.collective(ends)[0]
            ready = max(ready, sync[mine[0]][1] + both, sync[mine[-1]][1] + both)
    optimizer = []
    for stage in stages:
        begin = max(ready, *(free[lane] for lane in stage.lanes))
        shards = stage.sharing if stage.scattered or job.framework["distributed_optimizer"] else 1
        own = sum(stage.layer_parameters) * stage.expert_share
        same = stage.copies // stage.ep if stage.scattered or job.framework["distributed_optimizer"] else 1
        shard = (sum(stage.layer_parameters) - own) / shards + own / same
        done = begin + job.machine.moved_s(_step_bytes(job) * shard)
        if not job.framework["overlap_param_gather"]:
            done += sum(gather_s(job, stage, bucket) for bucket in stage.buckets)
        free |= dict.fromkeys(stage.lanes, done)
        optimizer.append((begin, done))
    return StepTimes(sync, optimizer)


def _beside(job: Job, stages: list[Stage], end: dict[Action, float]) -> list[tuple[float, float]]:
    """Buckets queue for the links of their lanes, last stages first; each needs the gradients of all replicas."""
    links: dict[int, float] = defaultdict(float)
    through = []
    for stage in reversed(stages):
        last = last_passes(job, stage)
        took = [sync_s(job, stage, bucket) for bucket in stage.buckets]
        clock = max(links[lane] for lane in stage.lanes)
        clock += sum(took)
        for action in last if sum(took) else ():
            seconds, done = job.seconds(action)[::-1], -float("inf")
            _, made = edges_s(seconds, stage.layer_parameters[::-1], stage.buckets)
            for at, each in zip(made, took, strict=True):
                done = max(done, at) + each
            late = done - sum(seconds)
            # What goes on beside the pass slows it.
            clock = max(clock, end[action] + late + job.machine.slowing * (sum(took) - late))
        if sum(took):
            links |= dict.fromkeys(stage.lanes, clock)
        else:
            clock = max((end[action] for action in last), default=0.0)
        through.append((clock, clock))
    return through[::-1]


def _after(job: Job, stages: list[Stage], free: dict[int, float]) -> list[tuple[float, float]]:
    """Stage after stage on the lanes themselves."""
    through = []
    for stage in stages:
        begin = max(free[lane] for lane in stage.lanes)
        done = begin + sum(sync_s(job, stage, bucket) for bucket in stage.buckets)
        free |= dict.fromkeys(stage.lanes, done)
        through.append((begin, done))
    return through


def _step_bytes(job: Job) -> float:
    """Bytes of a parameter that Adam moves.

    One kernel reads gradient, weight and both moments in fp32, and writes weight, both moments and the bf16 weight.
    """
    moved = 4 * FP32 + 3 * FP32 + BF16
    return moved + (BF16 + FP32 if job.gradient_bytes == BF16 else 0)
