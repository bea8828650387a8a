"""The interpreter: runs one rank's actions, one autograd graph a chunk and stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Pass, Program
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.measuring.metrics import RankResult
from entrain_bench.train.messages.channels import lane_of_rank
from entrain_bench.train.messages.rank_plan import EmptyPass, RankPlan, Step, empty_passes, plan_rank
from entrain_bench.train.messages.transfers import Transfers, cut_rows, gather_rows
from entrain_bench.train.modules import Pack
from entrain_bench.train.modules.kernels import Kernels
from entrain_bench.train.modules.split import WeightPass
from entrain_bench.train.running.content import Content
from entrain_bench.train.running.data import Inputs, SampleData
from entrain_bench.train.running.groups import Groups
from entrain_bench.train.running.loader import Loader, MakeInputs
from entrain_bench.train.running.sharded import ShardedStage
from entrain_bench.train.running.step import OptimizerSettings, TrainedStage, global_norm
from entrain_bench.train.weights.naming import Roots


@dataclass(slots=True)
class Graph:
    """Autograd state that a forward keeps for its backward.

    ``leaf`` is the input that wants a gradient. The output itself is gone as soon as it is sent; ``output`` is None
    where nothing that led to it learns.
    """

    leaf: Tensor | None
    output: GradientEdge | None
    shape: torch.Size
    splits: bool

    @staticmethod
    def of(leaf: Tensor | None, output: Tensor, pack: Pack) -> Graph:
        """Return the state of a pack's forward, from its input and output."""
        own = leaf if leaf is not None and leaf.requires_grad else None
        edge = get_gradient_edge(output) if output.requires_grad else None
        return Graph(own, edge, output.shape, pack.splits_backward)


@dataclass(frozen=True, slots=True)
class Work:
    """A rank's work in an iteration; ``empty`` holds passes without an own chunk, by the index of the next step."""

    program: Program
    plan: RankPlan
    num_loss_tokens: int
    inputs: Iterator[Inputs]
    empty: Mapping[int, Sequence[EmptyPass]] = field(default_factory=dict)


@dataclass(slots=True)
class Runtime:
    """Executes programs on this rank; ``stages`` by module and stage, ``roots`` of published weights' names."""

    stages: Mapping[tuple[int, int], TrainedStage | ShardedStage]
    groups: Groups
    settings: OptimizerSettings
    dtype: torch.dtype
    device: torch.device
    content: Content
    loader: Loader
    roots: Roots = field(default_factory=dict)
    kernels: Kernels = field(default_factory=Kernels)

    def prepare(self, program: Program, order: IntArray | None = None) -> Work:
        """This rank's work for a program, whose inputs are made from now on; ``order`` as of ``plan_rank``.

        Works are run in the order in which they were prepared. A thread may prepare one while another runs.
        """
        plan = plan_rank(program, dist.get_rank(), self.settings.framework, order)
        data = SampleData(program.shapes, self.content, pinned=self.loader.pins)
        makers = [
            MakeInputs(
                data,
                program.model.modules[step.place.module],
                step.place.stage,
                program.chunks[step.place.module].units(step.chunk),
                int(program.remade[step.place.module][step.chunk, step.place.stage]) if program.remade else 0,
                program.splits_backward(step.place.module),
            )
            for step in plan.steps
            if step.kind is Pass.FORWARD
        ]
        empty = empty_passes(program, plan.steps)
        return Work(program, plan, data.num_loss_tokens, self.loader.load(makers), empty)

    def run(self, work: Work, clock: Clock) -> RankResult:
        """One iteration: every action of this rank in the program's order; collective over all ranks.

        Raises:
            OutOfMemoryError: naming the action and the bytes it was predicted to need.
        """
        self.groups.channels.open(work.plan.channels)
        framework = self.settings.framework
        transfers = Transfers(work.plan, self.groups.channels, self.dtype, self.device, framework)
        iteration = _Iteration(self, work, transfers)
        # What is opened once is none of the iteration's; gradients are zeroed in each.
        clock.start_together(self.groups.control)
        for stage in self.stages.values():
            stage.zero_grad()
        for index, step in enumerate(work.plan.steps):
            try:
                iteration.begin(step)
                iteration.take_part(work.empty.get(index, ()))
                iteration.execute(step, clock)
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(work, index) from error
        iteration.transfers.finish()
        return RankResult(tuple(iteration.losses), iteration.norm(), iteration.input_stall_s)

    def _out_of_memory(self, work: Work, index: int) -> OutOfMemoryError:
        program = work.program
        plan = work.plan
        lane = lane_of_rank(program.layout, plan.rank)
        assert lane is not None
        action = plan.steps[index].action
        during, _ = Memory(program.model, self.settings.framework, self.dtype.itemsize).over_program(program)
        predicted = during[program.lane_offsets[lane] + index]
        return OutOfMemoryError(
            f"memory: rank {plan.rank} ran out of memory at {program.view(action)} (action {action}); predicted need: "
            f"{predicted / 2**30:.2f} GiB. To plan with less, lower memory_fraction"
        )


@dataclass(slots=True)
class _Iteration:
    """The state of one iteration on one rank."""

    runtime: Runtime
    work: Work
    transfers: Transfers
    graphs: dict[tuple[int, int, int], Graph] = field(default_factory=dict)
    weight_passes: dict[tuple[int, int, int], WeightPass] = field(default_factory=dict)
    losses: list[tuple[int, Tensor]] = field(default_factory=list)
    input_stall_s: float = 0.0
    empty: dict[tuple[int, int, int], Iterator[None]] = field(default_factory=dict)
    _norm: float | None = None

    def begin(self, step: Step) -> None:
        """Begin what other ranks wait for before this one's action ends, in the order of all actions."""
        for start in step.starts:
            self.transfers.post_receives(start.place)
            trained = self.runtime.stages[start.module, start.stage]
            assert isinstance(trained, TrainedStage)
            if start.sums:
                trained.start_sums()
            else:
                trained.start_gather()
        self.transfers.post_receives(int(self.work.plan.order[step.action]))

    def execute(self, step: Step, clock: Clock) -> None:
        """Run one action."""
        if step.kind is Pass.GRAD_SYNC:
            with clock.action(step.action):
                self._stage(step).sync_gradients(*self._tied(step))
        elif step.kind is Pass.OPTIMIZER:
            with clock.action(step.action):
                norm = self.norm()
                if isfinite(norm):
                    self._stage(step).step(self.runtime.settings.clip_grad, norm)
        elif step.kind is Pass.WEIGHT:
            # A stage that learns nothing, with nothing before it that does, had no backward.
            with clock.action(step.action):
                if left := self.weight_passes.pop(_key(step), None):
                    trained = self._stage(step)
                    assert isinstance(trained, TrainedStage)
                    trained.backward_weights(left, last=step.ends_gradients, closes=step.closes)
        else:
            received = {message.key: self.transfers.receive(message) for message in step.receives}
            started = perf_counter()
            inputs = next(self.work.inputs) if step.kind is Pass.FORWARD else None
            self.input_stall_s += perf_counter() - started
            # At hand before the clock starts, as where passes are emulated: it is no part of what a stage computes.
            given = self._start(step, received, inputs) if inputs else self._gradient(step, received)
            with clock.action(step.action):
                output = self._forward(step, given, inputs) if inputs else self._backward(step, given)
            if output is not None:
                self.transfers.send(step, lambda message: cut_rows(output, message))

    def take_part(self, passes: Sequence[EmptyPass]) -> None:
        """Run passes of other replicas, whose collectives need this one."""
        for one in passes:
            key = one.module, one.microbatch, one.part
            if one.kind is Pass.FORWARD:
                stage = self.runtime.stages[one.module, 0]
                assert isinstance(stage, ShardedStage)
                self.empty[key] = stage.empty_pass()
            next(self.empty[key])

    def norm(self) -> float:
        """Norm of all gradients, not a number if a loss is not finite; computed once, by all ranks together."""
        if self._norm is None:
            # 0, or not a number if a loss is not finite; found out without asking the device for each.
            spoilt = sum(loss * 0.0 for _, loss in self.losses)
            self._norm = global_norm(self.runtime.stages, self.runtime.groups.world, self.runtime.device, spoilt)
        return self._norm

    def _forward(self, step: Step, leaf: Tensor | None, inputs: Inputs) -> Tensor | None:
        output = self._stage(step).forward(leaf, inputs.pack, self._degree(step))
        if self._is_loss(step):
            output = output / self.work.num_loss_tokens
            self.losses.append((step.action, output.detach()))
        self.graphs[_key(step)] = Graph.of(leaf, output, inputs.pack)
        return None if self._is_loss(step) else output.detach()

    def _backward(self, step: Step, gradient: Tensor | None) -> Tensor | None:
        graph = self.graphs.pop(_key(step))
        if graph.output is None or gradient is None:
            return None
        trained = self._stage(step)
        if graph.splits:
            computing = trained.computing(self._degree(step))
            given, self.weight_passes[_key(step)] = computing.backward_inputs(graph.output, gradient, graph.leaf)
            return given
        trained.backward(graph.output, gradient, last=step.ends_gradients, closes=step.closes)
        return None if graph.leaf is None else graph.leaf.grad

    def _gradient(self, step: Step, received: Mapping[tuple[int, int], Tensor]) -> Tensor | None:
        """What a backward begins with; None if its forward has no graph."""
        graph = self.graphs[_key(step)]
        if graph.output is None:
            return None
        dtype = self.runtime.dtype
        device = self.runtime.device
        if self._is_loss(step):
            return torch.ones(graph.shape, device=device)
        return gather_rows(step, received, lambda: torch.zeros(graph.shape, dtype=dtype, device=device))

    def _start(self, step: Step, received: Mapping[tuple[int, int], Tensor], inputs: Inputs) -> Tensor | None:
        """Inputs of a forward: features, received hidden states, or projected tokens from several encoders."""
        trained = self._stage(step)
        features = inputs.features_on(self.runtime.device, trained.stage.module)
        if features is not None:
            return features
        wants_gradient = trained.stage.passes_gradients
        if step.place.stage:
            return received[step.receives[0].key].requires_grad_(wants_gradient)
        assert inputs.pack.token_ids is not None
        # Tokens that encoders hand over; counted on the CPU, where the ids are.
        num_rows = int((inputs.pack.token_ids < 0).sum())
        # A backward of sharded weights is a collective: a chunk of text alone has one where others' want gradients.
        if not num_rows and not (wants_gradient and isinstance(trained, ShardedStage)):
            return None
        shape = num_rows, self.work.program.model.llm.config.hidden_size
        dtype = self.runtime.dtype
        device = self.runtime.device
        rows = gather_rows(step, received, lambda: torch.zeros(shape, dtype=dtype, device=device))
        return rows.requires_grad_(wants_gradient)

    def _stage(self, step: Step) -> TrainedStage | ShardedStage:
        return self.runtime.stages[step.place.module, step.place.stage]

    def _degree(self, step: Step) -> int:
        """Entry of ``ModuleLayout.degrees`` at which a pass runs."""
        return int(self.work.program.layout.modules[step.place.module].degree_of_copy[step.place.replica])

    def _tied(self, step: Step) -> tuple[dist.ProcessGroup | None, Parameter | None]:
        """Ranks with the copies of a tied embedding; the first if virtual stages have both here, the second at hand."""
        module = step.place.module
        stage = step.place.stage
        last = self.work.program.layout.modules[module].pp - 1
        first = self.runtime.stages.get((module, 0)) if last and stage == last else None
        group = self.runtime.groups.tied.get(module) if stage in (0, last) else None
        return group, first.stage.tied_embedding() if first else None

    def _is_loss(self, step: Step) -> bool:
        module = self.work.program.model.modules[step.place.module]
        return not module.is_encoder and step.place.stage == self.work.program.layout.modules[step.place.module].pp - 1


def _key(step: Step) -> tuple[int, int, int]:
    """Identifies a chunk on a stage."""
    return step.place.module, step.place.stage, step.chunk
