"""The stages of a rank built and timed on this device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import sleep, thread_time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import ExecutionError, OutOfMemoryError, UserError
from entrain_bench.program import Pass, Program
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.device import find_device
from entrain_bench.train.emulate.work import LaneOrder, StageShape
from entrain_bench.train.measuring import Clock
from entrain_bench.train.modules import build_stage
from entrain_bench.train.modules.packing import first_groups, shares_of
from entrain_bench.train.modules.split import WeightPass
from entrain_bench.train.platform import rank_of_many
from entrain_bench.train.running.data import Inputs, MadeUp, SampleData
from entrain_bench.train.running.runtime import Graph, forward_request, is_loss
from entrain_bench.train.running.stages import OptimizerSettings, TrainedStage, train_stage


@dataclass(slots=True)
class Bench:
    """Measures the passes of one rank after the other, as rank 0 of a world whose other ranks are absent."""

    device_name: str
    dtype: str
    num_warm_ups: int
    num_repetitions: int
    framework: FrameworkOptions
    device: torch.device = field(init=False)
    _at: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.device = find_device(self.device_name, "harness.device")
        if self.device.type == "cpu" and torch.cuda.is_available():
            why = "megatron-core uses a visible GPU"
            raise UserError(f"harness.device=cpu: {why}. Hide it with CUDA_VISIBLE_DEVICES= before the command")
        if dist.is_initialized():
            raise ExecutionError("harness=emulate: torch.distributed is already initialized in this process")

    def measure(
        self, program: Program, shapes: Sequence[StageShape], orders: Sequence[LaneOrder]
    ) -> tuple[list[FloatArray], list[float]]:
        """Time passes in the order in which ranks run them, and optimizer steps.

        Returns seconds of each pass ``[repetitions, actions]`` by order, and of steps by stage. ``OutOfMemoryError``
        names what does not fit.
        """
        self._at = f"the weights of {', '.join(dict.fromkeys(shape.module for shape in shapes))}"
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with rank_of_many(max(shape.tp * shape.cp * shape.dp for shape in shapes)):
                stages = self.build(program.model, shapes)
                seconds = [self.time_order(stages, program, order) for order in orders]
                self._at = "an optimizer step"
                return seconds, [self._time_optimizer(trained) for trained in stages]
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"memory: the device ran out of memory in {self._at} (harness=emulate)") from error
        finally:
            torch.set_num_threads(num_threads)

    def build(self, model: ModelSpec, shapes: Sequence[StageShape]) -> list[TrainedStage]:
        """The stages that a rank holds, with collectives that return at once; inside ``rank_of_many``."""
        alone = dist.new_group([0])
        settings = OptimizerSettings(framework=self.framework)
        chunk = self.framework.logit_chunk
        build = partial(build_stage, dtype=getattr(torch, self.dtype), device=self.device, logit_chunk_tokens=chunk)
        stages = []
        for shape in shapes:
            module = model.module(shape.module)
            holders = dist.new_group([*range(0, shape.tp * shape.cp * shape.dp, shape.tp)])
            split = self.framework.of(module).sequence_parallel
            how = (split, self.framework.cp_split, shape.tp)
            degrees = ((shape.tp, shape.cp), *shape.widths)
            groups, *widths = (first_groups(tp, cp, holders, *how) for tp, cp in degrees)
            stage = build(model, module, shape.layers, groups, recompute=shape.recompute)
            stages.append(train_stage(stage, groups, alone, settings, dict(enumerate(widths))))
        return stages

    def time_order(self, stages: Sequence[TrainedStage], program: Program, order: LaneOrder) -> FloatArray:
        """Seconds of every pass of an order ``[repetitions, actions]``."""
        runs = _pass_runs(program, order.actions)
        waits_s = order.waits_s.tolist()
        held = dict(zip(sorted({run.key[:2] for run in runs}), stages, strict=True))
        clock = self._start_clock()
        for _ in range(self.num_warm_ups + self.num_repetitions):
            for trained in stages:
                trained.zero_grad()
            graphs: dict[tuple[int, int, int], Graph] = {}
            left: dict[tuple[int, int, int], WeightPass] = {}
            for run, wait_s in zip(runs, waits_s, strict=True):
                self._at = str(program.view(run.action))
                if wait_s:
                    sleep(wait_s)
                trained = held[run.key[:2]]
                if run.inputs is not None:
                    leaf = self._leaf(trained, program, run)
                    with clock.action(run.action):
                        output = trained.forward(leaf, run.inputs.pack, run.degree)
                        output = output / run.num_loss_tokens if run.num_loss_tokens else output
                    graphs[run.key] = Graph.of(leaf, output, run.inputs.pack)
                elif run.kind is Pass.BACKWARD:
                    graph = graphs.pop(run.key)
                    dtype = torch.float32 if run.num_loss_tokens else getattr(torch, self.dtype)
                    gradient = torch.ones(graph.shape, dtype=dtype, device=self.device)
                    with clock.action(run.action):
                        if graph.output is not None and graph.splits:
                            computing = trained.computing(run.degree)
                            _, left[run.key] = computing.backward_inputs(graph.output, gradient, graph.leaf)
                        elif graph.output is not None:
                            trained.backward(graph.output, gradient, last=False)
                else:
                    with clock.action(run.action):
                        if weights := left.pop(run.key, None):
                            trained.backward_weights(weights, last=False)
        return self._measured_s(clock, len(runs))

    def _leaf(self, trained: TrainedStage, program: Program, run: _PassRun) -> Tensor | None:
        assert run.inputs is not None
        pack = run.inputs.pack
        features = run.inputs.features_on(self.device, trained.stage.module)
        if features is not None:
            return features
        if trained.stage.held.start:
            num_rows = shares_of(pack.lengths, trained.widths.get(run.degree, trained.groups)).hidden.size
            width = trained.stage.config.hidden_size
        else:
            assert pack.token_ids is not None
            num_rows = int((pack.token_ids < 0).sum())
            width = program.model.llm.config.hidden_size
        if not num_rows:
            return None
        generator = torch.Generator(self.device).manual_seed(0)
        states = torch.randn(num_rows, width, generator=generator, device=self.device).to(getattr(torch, self.dtype))
        return states.requires_grad_(trained.stage.passes_gradients)

    def _time_optimizer(self, trained: TrainedStage) -> float:
        clock = self._start_clock()
        for _ in range(self.num_warm_ups + self.num_repetitions):
            with clock.action(0):
                norm = float(trained.gradient_square().sqrt())
                trained.step(1.0, norm)
        return float(np.median(self._measured_s(clock, 1)))

    def _start_clock(self) -> Clock:
        # On a CPU the seconds of this thread alone, whatever else the machine does.
        clock = Clock(self.device, thread_time)
        clock.start()
        return clock

    def _measured_s(self, clock: Clock, num_actions: int) -> FloatArray:
        """Seconds of repeated actions, without warm-ups ``[repetitions, actions]``."""
        return clock.seconds().reshape(-1, num_actions)[self.num_warm_ups :]


@dataclass(frozen=True, slots=True)
class _PassRun:
    """A pass of a chunk (``key``: module, stage, chunk) in groups of entry ``degree``; 0 loss tokens if no loss."""

    action: int
    kind: Pass
    key: tuple[int, int, int]
    inputs: Inputs | None
    num_loss_tokens: int
    degree: int


def _pass_runs(program: Program, order: IntArray) -> list[_PassRun]:
    data = SampleData(program.shapes, MadeUp(0, program.model.llm.config.vocab_size))
    runs = []
    for action in order.tolist():
        module, stage, chunk = (int(column[action]) for column in (program.module, program.stage, program.chunk))
        kind = Pass(int(program.kind[action]))
        inputs = data.inputs(*forward_request(program, module, stage, chunk)) if kind is Pass.FORWARD else None
        degree = int(program.layout.modules[module].degree_of_copy[program.chunks[module].replica[chunk]])
        num_tokens = data.num_loss_tokens if is_loss(program, module, stage) else 0
        runs.append(_PassRun(action, kind, (module, stage, chunk), inputs, num_tokens, degree))
    return runs
