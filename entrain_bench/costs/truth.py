"""The hidden cost model of a program: seconds of passes, delays of dependencies, bytes of memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

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
from entrain_bench.costs.layer_times import LayerTimes, chunk_loads, least_times, priced_by_width
from entrain_bench.costs.loads import Loads
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.noise import ActionNoise
from entrain_bench.costs.roofline import PassTimes, Roofline
from entrain_bench.costs.sharding import collective_passes, exposed_s, price_layers, sharded_modules
from entrain_bench.costs.steps import StepCosts, Steps
from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.columns import remade_kinds
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds that an executor charges for the parts of a program.

    Attributes:
        duration_s: duration of each pass including its communication; 0 for steps ``[actions]``.
        comm_s: communication inside each pass or step ``[actions]``.
        hold_s: time after an action during which transfers occupy its lanes ``[actions]``.
        release_s: earliest start of an action whose weights are gathered in the background ``[actions]``.
        stall_s: time that an action waits for its weights after everything else is ready ``[actions]``.
        delay_s: time from the end of the source action, or of its transfer, until the data arrive ``[dependencies]``.
        transfers: transfers that queue for links; None if there are none.
        steps: gradient synchronization and optimizer.
        together: group of passes that start at the same time, -1 for passes without a group ``[actions]``; None if
            there are no groups.
    """

    duration_s: FloatArray
    comm_s: FloatArray
    hold_s: FloatArray
    release_s: FloatArray
    stall_s: FloatArray
    delay_s: FloatArray
    transfers: LinkTransfers | None
    steps: Steps
    together: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Handovers:
    """Transfer times of a program on idle links (no contention), in seconds.

    Attributes:
        send_s: time that sends occupy an action's lanes after it ``[actions]``; 0 unless transfers block.
        receive_s: time that receives occupy an action's lanes before it ``[actions]``; 0 unless transfers block.
        delay_s: time from an action's end until its data have arrived for a dependency ``[dependencies]``.
    """

    send_s: FloatArray
    receive_s: FloatArray
    delay_s: FloatArray


@dataclass(frozen=True, slots=True)
class CostTruth:
    """The cost model of a model on a cluster. Executors charge it; strategies see only estimates (``Profile``).

    Attributes:
        framework: framework settings of the job.
        noise: random factors on executed passes.
        measured: layer times from a device profile; None: roofline.
        layer_times: layer times in use.
        memory: memory sizes under the same settings.
        step_costs: times of gradient synchronization, optimizer and weight gathering.
    """

    model: ModelSpec
    cluster: ClusterSpec
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    noise: ActionNoise = field(default_factory=ActionNoise)
    measured: LayerTimes | None = None
    layer_times: LayerTimes = field(init=False, repr=False, compare=False)
    memory: Memory = field(init=False, repr=False, compare=False)
    step_costs: StepCosts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_times", self.measured or Roofline(self.cluster, self.framework))
        object.__setattr__(self, "memory", Memory(self.model, self.framework, device=self.cluster.device))
        object.__setattr__(self, "step_costs", StepCosts(self.memory, self.layer_times, self.cluster))

    @property
    def beyond(self) -> CostTruth:
        """The same costs with layer times extrapolated outside the measured range; only estimates may use them."""
        return replace(self, measured=self.measured.beyond) if self.measured else self

    def unit_times(
        self,
        module: ModuleSpec,
        placed: ModuleLayout,
        lengths: IntArray,
        split: bool = False,
        labelled: IntArray | None = None,
    ) -> PassTimes:
        """Return the times of sequences that each form one chunk ``[sequences, stages]``; see ``chunk_times``.

        If groups have several widths, each time is the least over them.
        """
        loads = self.layer_times.loads(module, lengths, None, labelled)
        placements = range(len(placed.degrees))
        return least_times([self._stages_s(module, placed.at(degree), loads, None, split) for degree in placements])

    def chunk_times(
        self,
        module: ModuleSpec,
        placed: ModuleLayout,
        shapes: SampleShapes,
        chunks: Chunks,
        remade: IntArray | None = None,
        split: bool = False,
    ) -> PassTimes:
        """Return the times of packed chunks ``[chunks, stages]``.

        ``remade`` is the number of recomputed layers of each chunk on each stage; by default the layout decides between
        all layers that recomputation covers and none. With ``split`` a separate pass computes weight gradients.
        """
        loads = chunk_loads(self.layer_times, module, shapes, chunks.members, chunks.offsets)
        return self._times(module, placed, chunks.replica, loads, remade, split)

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
            return [self._stages_s(module, group, part, None if remade is None else remade[rows], split)]

        return priced_by_width(placed, replica, loads, priced)[0]

    def _stages_s(
        self, module: ModuleSpec, placed: ModuleLayout, loads: Loads, remade: IntArray | None, split: bool
    ) -> PassTimes:
        counts = module.kind_counts(placed.layers_per_stage)
        recompute: bool | FloatArray = placed.recompute
        if remade is not None and not recompute:
            recompute = remade_kinds(module, placed.layers_per_stage, remade)
        return self.layer_times.stages_s(module, loads, counts, placed.tp, placed.cp, recompute, split)

    def charge(self, program: Program) -> Prices:
        """Return the costs of one execution: the program's prices with noise on its passes."""
        prices = self.price(program)
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
            loads.append(chunk_loads(self.layer_times, module, program.shapes, chunks.members, chunks.offsets))
            times = self._times(module, placed, chunks.replica, loads[index], remade, split)
            forward, backward, weight = program.spans(index)
            comm[forward], comm[backward] = times.forward_comm_s.ravel(), times.backward_comm_s.ravel()
            duration[forward], duration[backward] = times.forward_s.ravel(), times.backward_s.ravel()
            if times.weight_s is not None:
                duration[weight] = times.weight_s.ravel()
        comm += self.memory.offload_bytes(program) / self.cluster.device.host_bandwidth_bytes_per_s
        together = None
        if sharded := sharded_modules(program):
            layers_s = {index: price_layers(program, index, self.layer_times) for index in sharded}
            comm += exposed_s(program, layers_s, self.cluster, self.framework)
            together = collective_passes(program)
        hold, delay, transfers = self._transfers(program)
        costs = self.step_costs
        ends = [costs.ends(program, index, module_loads) for index, module_loads in enumerate(loads)]
        release, stall = costs.gathers(program, ends)
        steps = costs.steps(program, ends)
        duration += comm
        comm[program.first_action[-1] :] = steps.comm_s
        return Prices(duration, comm, hold, release, stall, delay, transfers, steps, together)

    def handovers(self, program: Program) -> Handovers:
        """Return the transfer times of a program's results; they do not depend on the order of passes."""
        _, delay, link = self._edges(program)
        send, receive = self._moved_s(program, link, delay)
        return Handovers(send, receive, delay + link)

    def _moved_s(self, program: Program, link: FloatArray, delay: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return how long sends and receives keep an action's lanes from computing ``[actions]``.

        Overlapped transfers slow the computation beside them: they take ``overlap_cost`` of their time on the links.
        """
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
