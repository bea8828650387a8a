"""The hidden cost model of a program: seconds of passes, delays of dependencies, bytes of memory."""

from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np

from entrain_bench.base.arithmetic import GOLDEN, mix, uniform
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.edges import (
    Edges,
    LinkTransfers,
    both,
    colocated_transforms,
    derive_edges,
    held_s,
    moved_s,
    relay_between_modules,
    transfers_between_blocks,
)
from entrain_bench.costs.experts import in_step, meeting_chunks, shared_out
from entrain_bench.costs.layer_times import (
    PassTimes,
    least_times,
    placed_stages,
    priced_by_width,
)
from entrain_bench.costs.loads import Loads
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.profiled.times import LayerTimes, ProfiledTimes
from entrain_bench.costs.roofline import Roofline
from entrain_bench.costs.sharding import exposed_s, passes_together, price_layers, sharded_modules
from entrain_bench.costs.steps import StepCosts, Steps
from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# Half of the width of a uniform distribution in its standard deviations.
HALF_WIDTH = 3.0**0.5


@dataclass(frozen=True, slots=True)
class ActionNoise:
    """Independent factors of ranks on forwards and backwards, uniform around 1; the slowest rank of a group decides."""

    relative_std: float = 0.0  # in [0, 0.5]
    seed: int = 0  # with the action's labels and its batch's samples, it fixes the action's factor

    def factors(self, program: Program) -> FloatArray:
        """The greatest factor of every action's ranks; 1 for steps at the end of the iteration ``[actions]``."""
        factors = np.ones(program.num_actions)
        if not self.relative_std:
            return factors
        batch = int(program.shapes.sample_ids[0])
        widths = np.concatenate([blocks.width for blocks in program.layout.blocks])
        for index, (module, chunks) in enumerate(zip(program.model.modules, program.chunks, strict=True)):
            mine = slice(int(program.first_action[index]), int(program.first_action[index + 1]))
            chunk = program.chunk[mine]
            # The batch changes it in every iteration.
            bits = np.full(len(chunk), np.uint64((crc32(module.name.encode()) << 31) ^ self.seed))
            labels = (np.full(len(chunk), batch), chunks.replica[chunk], chunks.microbatch[chunk], chunks.part[chunk])
            for label in (*labels, program.stage[mine], program.kind[mine]):
                bits = mix(bits ^ (label.astype(np.uint64) + np.uint64(1)) * GOLDEN)
            width = widths[program.blocks(np.arange(mine.start, mine.stop))]
            greatest = uniform(bits)
            for rank in range(1, int(width.max(initial=1))):
                rows = np.flatnonzero(width > rank)
                own = mix(bits[rows] ^ np.full(len(rows), rank, np.uint64) * GOLDEN)
                greatest[rows] = np.maximum(greatest[rows], uniform(own))
            factors[mine] = 1.0 + self.relative_std * HALF_WIDTH * (2.0 * greatest - 1.0)
        return factors


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that computes slower than the others, and with it the group that it works in."""

    rank: int
    factor: float  # on the computation of passes; communication and optimizer steps take as long as elsewhere

    def slowed(self, program: Program, prices: "Prices") -> "Prices":
        """The prices with slower passes on the blocks that hold the rank."""
        passes = np.flatnonzero(program.is_pass)
        block = program.blocks(passes)
        low, high = (np.concatenate([getattr(b, name) for b in program.layout.blocks]) for name in ("low", "high"))
        slow = passes[(low[block] <= self.rank) & (self.rank <= high[block])]
        duration = prices.duration_s.copy()
        duration[slow] += (self.factor - 1.0) * (duration[slow] - prices.comm_s[slow])
        return replace(prices, duration_s=duration)


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds that an executor charges for the parts of a program."""

    duration_s: FloatArray  # of each pass with its communication; 0 for steps [actions]
    comm_s: FloatArray  # communication inside each pass or step [actions]
    hold_s: FloatArray  # after an action, during which transfers occupy its lanes [actions]
    release_s: FloatArray  # earliest start of an action whose weights are gathered in the background [actions]
    stall_s: FloatArray  # that an action waits for its weights after everything else is ready [actions]
    delay_s: FloatArray  # from the end of the source, or of its transfer, until the data arrive [dependencies]
    transfers: LinkTransfers | None  # that queue for links
    steps: Steps
    together: IntArray | None = None  # group of passes that start at the same time, -1: none [actions]


@dataclass(frozen=True, slots=True)
class Handovers:
    """Transfer times of a program on idle links (no contention), in seconds."""

    send_s: FloatArray  # that sends occupy an action's lanes after it; 0 unless transfers block [actions]
    receive_s: FloatArray  # that receives occupy an action's lanes before it; 0 unless transfers block [actions]
    delay_s: FloatArray  # from an action's end until its data have arrived for a dependency [dependencies]


@dataclass(frozen=True, slots=True)
class CostTruth:
    """The cost model of a model on a cluster. Executors charge it; strategies see only estimates (``Profile``)."""

    model: ModelSpec
    cluster: ClusterSpec
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    noise: ActionNoise = field(default_factory=ActionNoise)
    measured: ProfiledTimes | None = None  # from a device profile; None: roofline
    slow_rank: SlowRank | None = None  # None: all ranks are equally fast
    exchanges: bool = True  # False: tokens reach their experts in no time, to measure how long they take
    layer_times: LayerTimes = field(init=False, repr=False, compare=False)
    memory: Memory = field(init=False, repr=False, compare=False)
    step_costs: StepCosts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        roofline = Roofline(self.cluster, self.framework, self.exchanges)
        object.__setattr__(self, "layer_times", self.measured or roofline)
        object.__setattr__(self, "memory", Memory(self.model, self.framework, device=self.cluster.device))
        object.__setattr__(self, "step_costs", StepCosts(self.memory, self.layer_times, self.cluster))

    @property
    def beyond(self) -> "CostTruth":
        """The same costs with layer times extrapolated outside the measured range; only estimates may use them."""
        return replace(self, measured=self.measured.beyond) if self.measured else self

    def unit_times(self, module: ModuleSpec, placed: ModuleLayout, lengths: IntArray, split: bool = False) -> PassTimes:
        """Return the times of sequences that each form one chunk ``[sequences, stages]``, the least over widths."""
        loads = self.layer_times.loads(module, lengths)
        if placed.expert_span > 1:
            # Even alone, it has the experts of all ranks of its group.
            loads = replace(loads, routed=loads.tokens / placed.expert_span)
        placements = [placed_stages(module, placed.at(degree)) for degree in range(len(placed.degrees))]
        return least_times([self.layer_times.stages_s(module, loads, stages, split) for stages in placements])

    def chunk_times(
        self,
        module: ModuleSpec,
        placed: ModuleLayout,
        shapes: SampleShapes,
        chunks: Chunks,
        remade: IntArray | None = None,
        split: bool = False,
    ) -> PassTimes:
        """Return the times of packed chunks ``[chunks, stages]``, of which ``remade`` layers of each are recomputed."""
        loads = self.layer_times.loads(module, module.lengths(shapes, chunks.members), chunks.offsets)
        meeting = meeting_chunks(placed, chunks)
        loads = shared_out(loads, placed, meeting)
        return in_step(self._times(module, placed, chunks.replica, loads, remade, split), meeting)

    def _times(
        self,
        module: ModuleSpec,
        placed: ModuleLayout,
        replica: IntArray,
        loads: Loads,
        remade: IntArray | None,
        split: bool,
    ) -> PassTimes:

        def priced(group: ModuleLayout, part: Loads, rows: IntArray | slice) -> list[PassTimes]:
            stages = placed_stages(module, group, None if remade is None else remade[rows])
            return [self.layer_times.stages_s(module, part, stages, split)]

        return priced_by_width(placed, replica, loads, priced)[0]

    def charge(self, program: Program) -> Prices:
        """Return the costs of one execution: the program's prices with a slow rank and noise on its passes."""
        prices = self.price(program)
        if self.slow_rank is not None:
            prices = self.slow_rank.slowed(program, prices)
        factors = self.noise.factors(program)
        return replace(prices, duration_s=factors * prices.duration_s, comm_s=factors * prices.comm_s)

    def price(self, program: Program) -> Prices:
        """Return durations and delays of a whole program without noise."""
        duration = np.zeros(program.num_actions)
        comm = np.zeros(program.num_actions)
        layout = program.layout
        loads = []
        for index, (module, placed) in enumerate(zip(self.model.modules, layout.modules, strict=True)):
            remade = program.remade[index] if program.remade else None
            split = program.splits_backward(index)
            chunks = program.chunks[index]
            lengths = module.lengths(program.shapes, chunks.members)
            meeting = meeting_chunks(placed, chunks)
            loads.append(shared_out(self.layer_times.loads(module, lengths, chunks.offsets), placed, meeting))
            times = in_step(self._times(module, placed, chunks.replica, loads[index], remade, split), meeting)
            forward, backward, weight = program.spans(index)
            comm[forward] = times.forward_comm_s.ravel()
            comm[backward] = times.backward_comm_s.ravel()
            duration[forward] = times.forward_s.ravel()
            duration[backward] = times.backward_s.ravel()
            if times.weight_s is not None:
                duration[weight] = times.weight_s.ravel()
        comm += self.memory.offload_bytes(program) / self.cluster.device.host_bandwidth_bytes_per_s
        layers_s = [price_layers(program, index, self.layer_times, part) for index, part in enumerate(loads)]
        if sharded := sharded_modules(program):
            comm += exposed_s(program, {index: layers_s[index] for index in sharded}, self.cluster, self.framework)
        hold, delay, transfers = self._transfers(program)
        costs = self.step_costs
        ends = [costs.ends(program, index, module_s) for index, module_s in enumerate(layers_s)]
        release, stall = costs.gathers(program, ends)
        steps = costs.steps(program, ends)
        duration += comm
        comm[program.first_action[-1] :] = steps.comm_s
        together = passes_together(program)
        return Prices(duration, comm, hold, release, stall, delay, transfers, steps, together)

    def handovers(self, program: Program) -> Handovers:
        """Return the transfer times of a program's results; they do not depend on the order of passes."""
        _, delay, link = self._edges(program)
        send, receive = self._moved_s(program, link, delay)
        return Handovers(send, receive, delay + link)

    def _moved_s(self, program: Program, link: FloatArray, delay: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return how long transfers keep lanes from computing; overlapped ones slow computation ``[actions]``."""
        if self.framework.p2p == "blocking":
            return moved_s(program, link, delay)
        return moved_s(program, self.cluster.device.overlap_cost * link, np.zeros_like(delay))

    def _edges(self, program: Program) -> tuple[Edges, FloatArray, FloatArray]:
        """Return transfers along dependencies, delays besides links, and busy times of links ``[dependencies]``."""
        edges = derive_edges(program, self.cluster, self.framework)
        delay = edges.fixed_s.copy()
        link = edges.link_s.copy()
        collective, seconds = colocated_transforms(program, self.cluster)
        delay[collective] = seconds
        link[collective] = 0.0
        return edges, np.where(edges.travels, delay, 0.0), link

    def _transfers(self, program: Program) -> tuple[FloatArray, FloatArray, LinkTransfers | None]:
        """Return the time lanes are held after each action, delays of dependencies, and transfers that queue."""
        layout = program.layout
        transfers = None
        edges, delay, link = self._edges(program)
        if layout.single_rank_boundary:
            tier = self.cluster.group_tier(np.concatenate([placed.ranks.ravel() for placed in layout.modules]))
            transfers = relay_between_modules(program, edges.travels, tier)
            relayed = transfers.first >= 0
            delay[relayed] = link[relayed] = 0.0
        hold = held_s(program, *self._moved_s(program, link, delay))
        if self.framework.p2p == "blocking":
            return hold, delay + link, transfers
        queued = transfers_between_blocks(layout, edges.source, edges.target, edges.tier, link)
        return hold, delay, queued if transfers is None else both(transfers, queued)
