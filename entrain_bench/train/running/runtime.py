"""The interpreter: builds a rank's stages and runs its actions, with one autograd graph per chunk and stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.costs.experts import meeting_chunks
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.device import dtype_on
from entrain_bench.train.measuring import Clock, Seen, see
from entrain_bench.train.messages.rank_plan import (
    RankPlan,
    Step,
    plan_rank,
)
from entrain_bench.train.messages.transfers import Transfers, cut_rows, gather_rows
from entrain_bench.train.modules.split import WeightPass
from entrain_bench.train.modules.stage import build_stage
from entrain_bench.train.running.data import Data, Inputs, MadeUp, Request, SampleData, ThreadLoader
from entrain_bench.train.running.groups import GroupMaker, Groups, make_groups
from entrain_bench.train.running.learning import LearningStage, OptimizerSettings, global_norm
from entrain_bench.train.running.stages import ShardedStage, TrainedStage, shard_stage, train_stage
from entrain_bench.train.settings import TrainSettings, check_trained


@dataclass(slots=True)
class Graph:
    """Autograd state that a forward keeps for its backward; ``output`` is None if nothing before it learns."""

    leaf: Tensor | None
    output: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype
    splits: bool


@dataclass(frozen=True, slots=True)
class Work:
    """A rank's work in an iteration."""

    program: Program
    plan: RankPlan
    data: Data
    inputs: Iterator[Inputs]


@dataclass(slots=True)
class Runtime[S: LearningStage]:
    """Executes programs on this rank, with any provider's ``stages`` by module and stage.

    ``data_of`` makes the data of a batch, ``sized`` sets the sizes of messages.
    """

    stages: Mapping[tuple[int, int], S]
    groups: Groups
    settings: OptimizerSettings
    dtype: torch.dtype
    device: torch.device
    data_of: Callable[[SampleShapes], Data]
    sized: Callable[[Program, RankPlan], RankPlan] = lambda _, plan: plan
    loader: ThreadLoader = field(init=False)

    def __post_init__(self) -> None:
        self.loader = ThreadLoader(self.device)

    def prepare(self, program: Program, order: IntArray | None = None) -> Work:
        """This rank's work for a program, ``order`` as of ``plan_rank``; works run in the order of preparation."""
        plan = self.sized(program, plan_rank(program, dist.get_rank(), self.settings.framework, order))
        data = self.data_of(program.shapes)
        forwards = (step for step in plan.steps if step.kind is Pass.FORWARD and not step.is_empty)
        requests = [_forward_request(program, step) for step in forwards]
        inputs = self.loader.load(data, requests)
        return Work(program, plan, data, inputs)

    def run(self, work: Work, clock: Clock) -> Seen:
        """Run every action of this rank in the program's order; collective. ``OutOfMemoryError`` names the action."""
        self.groups.channels.open(work.plan.channels)
        framework = self.settings.framework
        transfers = Transfers(work.plan, self.groups.channels, self.dtype, self.device, framework)
        iteration = Iteration(self, work, transfers)
        clock.start_together(self.groups.control)
        for stage in self.stages.values():
            stage.zero_grad()
        for step in work.plan.steps:
            try:
                iteration.begin(step)
                if step.is_empty:
                    iteration.take_part(step)
                else:
                    iteration.execute(step, clock)
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(work, step) from error
        iteration.transfers.finish()
        return see(iteration.losses, iteration.norm(), iteration.input_stall_s, clock)

    def _out_of_memory(self, work: Work, step: Step) -> OutOfMemoryError:
        program = work.program
        during, _ = Memory(program.model, self.settings.framework, self.dtype.itemsize).over_program(program)
        predicted = during[program.lane_actions == step.action].max()
        return OutOfMemoryError(
            f"memory: rank {work.plan.rank} ran out of memory at {program.view(step.action)} (action {step.action}); "
            f"predicted need: {predicted / 2**30:.2f} GiB. To plan with less, lower memory_fraction"
        )


@dataclass(slots=True)
class Iteration:
    """State of a rank while it runs its actions."""

    runtime: Runtime[Any]
    work: Work
    transfers: Transfers
    graphs: dict[tuple[int, int, int], Graph] = field(default_factory=dict)
    weight_passes: dict[tuple[int, int, int], WeightPass] = field(default_factory=dict)
    losses: list[tuple[int, Tensor]] = field(default_factory=list)
    input_stall_s: float = 0.0
    empty: dict[tuple[int, int, int, int], Iterator[None]] = field(default_factory=dict)
    _norm: float | None = None

    def begin(self, step: Step) -> None:
        """Begin communication that other ranks wait for before this rank's action ends, in the order of all actions."""
        for start in step.starts:
            self.transfers.post_receives(start.place)
            trained = self.runtime.stages[start.module, start.stage]
            if start.sums:
                trained.start_sums()
            else:
                trained.start_gather()
        self.transfers.post_receives(int(self.work.plan.order[step.action]))

    def execute(self, step: Step, clock: Clock) -> None:
        """Run one action."""
        if step.kind in (Pass.FORWARD, Pass.BACKWARD):
            received = {message.key: self.transfers.receive(message) for message in step.receives}
            started = perf_counter()
            inputs = next(self.work.inputs) if step.kind is Pass.FORWARD else None
            self.input_stall_s += perf_counter() - started
            # Before the clock starts, as where passes are emulated: a stage does not compute it.
            given = self._start(step, received, inputs) if inputs else self._gradient(step, received)
            with clock.action(step.action):
                output = self._forward(step, given, inputs) if inputs else self._backward(step, given)
            if output is not None:
                self.transfers.send(step, lambda message: cut_rows(output, message))
            return
        trained = self._stage(step)
        with clock.action(step.action):
            if step.kind is Pass.GRAD_SYNC:
                trained.sync_gradients()
            elif step.kind is Pass.OPTIMIZER:
                if isfinite(norm := self.norm()):
                    trained.step(self.runtime.settings.clip_grad, norm)
            # A frozen stage after frozen stages had no backward.
            elif left := self.weight_passes.pop(_key(step), None):
                trained.backward_weights(left, last=step.ends_gradients, closes=step.closes)

    def take_part(self, step: Step) -> None:
        """Run a pass of other replicas, whose collectives need this one."""
        module, number, chunk = _key(step)
        chunks = self.work.program.chunks[module]
        key = module, number, int(chunks.microbatch[chunk]), int(chunks.part[chunk])
        if step.kind is Pass.FORWARD or key not in self.empty:
            example = partial(self._example, module, number, chunks.units(chunk)[:1])
            self.empty[key] = self._stage(step).empty_pass(_remade_layers(self.work.program, *_key(step)), example)
            if step.kind is not Pass.FORWARD:
                # Forwards without collectives have no steps of their own.
                next(self.empty[key])
        next(self.empty[key])
        if step.kind is not Pass.FORWARD:
            del self.empty[key]

    def norm(self) -> float:
        """Norm of all gradients, not a number if a loss is not finite; computed once, by all ranks together."""
        if self._norm is None:
            # 0, or not a number if a loss is not finite; found out without asking the device for each.
            spoilt = sum(loss * 0.0 for _, loss in self.losses)
            self._norm = global_norm(self.runtime.stages, self.runtime.device, spoilt)
        return self._norm

    def _example(self, module: int, number: int, members: IntArray) -> Any:
        return self.work.data.inputs(self.work.program.model.modules[module], number, members).pack

    def _forward(self, step: Step, leaf: Tensor | None, inputs: Inputs) -> Tensor | None:
        trained = self._stage(step)
        output = trained.forward(leaf, inputs.pack, self._degree(step))
        is_loss = self._is_loss(step)
        if is_loss:
            output = output / self.work.data.num_loss_tokens
            # Tensor parallel ranks have copies of it, context parallel ranks parts.
            if trained.at(self._degree(step)).tp.rank() == 0:
                self.losses.append((step.action, output.detach()))
        learning = leaf if leaf is not None and leaf.requires_grad else None
        edge = get_gradient_edge(output) if output.requires_grad else None
        self.graphs[_key(step)] = Graph(learning, edge, output.shape, output.dtype, inputs.splits_backward)
        return None if is_loss else output.detach()

    def _backward(self, step: Step, gradient: Tensor | None) -> Tensor | None:
        graph = self.graphs.pop(_key(step))
        if graph.output is None or gradient is None:
            return None
        trained = self._stage(step)
        degree = self._degree(step)
        if graph.splits:
            given, self.weight_passes[_key(step)] = trained.backward_inputs(graph.output, gradient, graph.leaf, degree)
            return given
        ends = {"last": step.ends_gradients, "closes": step.closes}
        return trained.backward(graph.output, gradient, graph.leaf, degree, **ends)

    def _gradient(self, step: Step, received: Mapping[tuple[int, int], Tensor]) -> Tensor | None:
        """The gradient that a backward begins with; None if its forward has no graph."""
        graph = self.graphs[_key(step)]
        if graph.output is None:
            return None
        if self._is_loss(step):
            return torch.ones(graph.shape, dtype=graph.dtype, device=self.runtime.device)
        return gather_rows(step, received, partial(self._zeros, graph.shape))

    def _start(self, step: Step, received: Mapping[tuple[int, int], Tensor], inputs: Inputs) -> Tensor | None:
        """Inputs of a forward: features, received hidden states, or projected tokens from several encoders."""
        trained = self._stage(step)
        features = inputs.features_on(self.runtime.device)
        if features is not None:
            return features
        wants_gradient = trained.stage.passes_gradients
        if step.place.stage:
            return received[step.receives[0].key].requires_grad_(wants_gradient)
        if self.work.program.model.modules[step.place.module].is_encoder:
            return None
        # Tokens that encoders hand over.
        program = self.work.program
        members = program.chunks[step.place.module].units(step.chunk)
        num_rows = int((program.shapes.llm_tokens - program.shapes.text_tokens)[members].sum())
        # If replicas meet in backwards, a chunk of text alone has one where others' want gradients.
        if not num_rows and not (wants_gradient and trained.meets):
            return None
        width = step.receives[0].width if step.receives else program.model.llm.config.hidden_size
        return gather_rows(step, received, partial(self._zeros, (num_rows, width))).requires_grad_(wants_gradient)

    def _zeros(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self.runtime.dtype, device=self.runtime.device)

    def _stage(self, step: Step) -> LearningStage:
        trained: LearningStage = self.runtime.stages[step.place.module, step.place.stage]
        return trained

    def _degree(self, step: Step) -> int:
        """Entry of ``ModuleLayout.degrees`` at which a pass runs."""
        return int(self.work.program.layout.modules[step.place.module].degree_of_copy[step.place.replica])

    def _is_loss(self, step: Step) -> bool:
        program = self.work.program
        module, stage, _ = _key(step)
        return not program.model.modules[module].is_encoder and stage == program.layout.modules[module].pp - 1


def _forward_request(program: Program, step: Step) -> Request:
    """Arguments of ``SampleData.inputs`` for a forward."""
    module, stage, chunk = _key(step)
    remade = _remade_layers(program, module, stage, chunk)
    members = program.chunks[module].units(chunk)
    return program.model.modules[module], stage, members, remade, program.splits_backward(module)


def _remade_layers(program: Program, module: int, stage: int, chunk: int) -> int:
    """Layers that a chunk's backward runs again: the most of all chunks that it shares experts with."""
    if not program.remade:
        return 0
    remade = program.remade[module][:, stage]
    meeting = meeting_chunks(program.layout.modules[module], program.chunks[module])
    return int(remade[chunk] if meeting is None else remade[meeting == meeting[chunk]].max())


def _key(step: Step) -> tuple[int, int, int]:
    return step.place.module, step.place.stage, step.chunk


def optimizer_settings(settings: TrainSettings) -> OptimizerSettings:
    """Adam's settings of a run."""
    rest = settings.weight_decay, settings.epsilon, settings.clip_grad, settings.truth.framework
    return OptimizerSettings(settings.learning_rate, (settings.betas[0], settings.betas[1]), *rest)


def build_runtime(
    layout: Layout,
    settings: TrainSettings,
    device: torch.device,
    seed: int,
    control: dist.ProcessGroup,
    maker: GroupMaker | None = None,
) -> Runtime[TrainedStage | ShardedStage]:
    """The runtime of this rank; collective over all ranks. Initial weights do not depend on the layout.

    ``IncompatibleError`` for a layout that only the simulator runs.
    """
    model = settings.truth.model
    framework = settings.truth.framework
    check_trained(layout, model, framework)
    dtype = dtype_on(device, settings.dtype)
    maker = maker or GroupMaker(control, settings.timeout_s, device)
    groups = make_groups(model, framework, layout, maker)
    adam = optimizer_settings(settings)
    build = partial(build_stage, model, dtype=dtype, seed=seed, device=device)
    stages: dict[tuple[int, int], TrainedStage | ShardedStage] = {}
    for index, number in sorted(groups.stages):
        module = model.modules[index]
        placed = layout.modules[index]
        holders = groups.stages[index, number]
        first = sum(placed.layers_per_stage[:number])
        layers = range(first, first + placed.layers_per_stage[number])
        stage = build(module, layers, holders, recompute=placed.recomputes_layers)
        stage.recompute_whole = placed.recompute_whole
        widths = groups.widths[index, number]
        if placed.scatters:
            stages[index, number] = shard_stage(stage, holders, adam, widths, keeps=placed.keeps_weights)
        else:
            is_last = number == placed.pp - 1
            tied = groups.tied.get(index) if is_last or not number else None
            first_stage = stages.get((index, 0)) if is_last and number else None
            first_copy = first_stage.stage.tied_embedding() if first_stage else None
            stages[index, number] = train_stage(stage, holders, groups.alone, adam, widths, tied, first_copy)
    data_of = partial(SampleData, content=MadeUp(seed, model.llm.config.vocab_size))
    return Runtime(stages, groups, adam, dtype, device, data_of)
