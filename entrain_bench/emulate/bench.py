"""Stages built and timed on this device, each as one rank of its block."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import thread_time
from types import TracebackType
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from entrain_bench.emulate.work import PassSeconds, StageShape
from entrain_bench.errors import ExecutionError, OutOfMemoryError, UserError
from entrain_bench.program import Program
from entrain_bench.specs.framework import Framework
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.device import to_device
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.modules import StageGroups, build_stage
from entrain_bench.train.modules.packing import shares_of
from entrain_bench.train.platform import prepare_platform
from entrain_bench.train.running.data import Inputs, SampleData
from entrain_bench.train.running.step import OptimizerSettings, TrainedStage, train_stage


def device_named(name: str) -> torch.device:
    """The device of a setting.

    Raises:
        UserError: if there is none, or megatron-core would take another.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise UserError("harness.device=cuda: this machine has no CUDA device; cpu runs the same, for small models")
    if name == "cpu" and found:
        raise UserError("harness.device=cpu: megatron-core takes the GPU it sees; CUDA_VISIBLE_DEVICES= hides it")
    return torch.device("cuda" if found else "cpu")


@dataclass(slots=True)
class Bench:
    """Measures stages; while it is open, this process is rank 0 of a block whose other ranks are not there.

    Collectives of torch's fake backend return at once, with shapes as from all ranks.

    Attributes:
        device_name: a setting of the harness.
        dtype: of parameters and activations, by torch's name.
        num_warm_ups: runs of a pass before those that are measured.
        num_repetitions: measured runs.
        framework: how the framework runs the job.
    """

    device_name: str
    dtype: str
    num_warm_ups: int
    num_repetitions: int
    framework: Framework
    device: torch.device = field(init=False)
    _num_threads: int = field(init=False)

    def __post_init__(self) -> None:
        self.device, self._num_threads = device_named(self.device_name), torch.get_num_threads()

    def __enter__(self) -> Self:
        if dist.is_initialized():
            raise ExecutionError("harness=emulate: this process is a rank of others already")
        prepare_platform()
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        torch.set_num_threads(self._num_threads)
        _leave()

    def measure(
        self, program: Program, shape: StageShape, places: Sequence[tuple[int, int, int]]
    ) -> tuple[list[PassSeconds], float]:
        """Time passes of a stage, and its optimizer step.

        Args:
            program: whose samples are run.
            shape: the stage.
            places: module, stage and chunk of each pass.

        Returns:
            What each pass took, and the optimizer step, seconds.

        Raises:
            OutOfMemoryError: naming what does not fit on the device.
        """
        at = ""
        try:
            trained = self._build(program, shape)
            passes = []
            for number, place in enumerate(places):
                module, stage, chunk = place
                at = str(program.view(int(program.forward_actions(module)[chunk, stage])))
                passes.append(self._time_pass(trained, program, place, extra=int(number == 0)))
            at = f"optimizer of {shape.module} stage {places[0][1]}"
            return passes, self._time_optimizer(trained)
        except torch.OutOfMemoryError as error:
            what = at or f"the weights of {shape.module}"
            raise OutOfMemoryError(f"memory: the device is too small for {what} (harness=emulate)") from error

    def _build(self, program: Program, shape: StageShape) -> TrainedStage:
        model, spec = program.model, program.model.module(shape.module)
        groups, alone = _join(shape, self.framework.sequence_parallel)
        stage = build_stage(
            model,
            spec,
            shape.layers,
            groups,
            dtype=getattr(torch, self.dtype),
            seed=0,
            device=self.device,
            recompute=shape.recompute,
        )
        return train_stage(stage, groups, alone, OptimizerSettings(framework=self.framework))

    def _time_pass(
        self, trained: TrainedStage, program: Program, place: tuple[int, int, int], extra: int
    ) -> PassSeconds:
        module, stage, chunk = place
        spec, chunks = program.model.modules[module], program.chunks[module]
        members = chunks.members[chunks.offsets[chunk] : chunks.offsets[chunk + 1]]
        data = SampleData(program.shapes, 0, program.model.llm.config.vocab_size)
        inputs = data.inputs(spec, stage, members)
        leaf = self._leaf(trained, program, spec, inputs)
        is_loss = not spec.is_encoder and stage == program.layout.modules[module].pp - 1
        clock = self._start_clock()
        for _ in range(extra + self.num_warm_ups + self.num_repetitions):
            with clock.action(0):
                output = trained.buffers(leaf, inputs.pack)
                output = output / data.num_loss_tokens if is_loss else output
            gradient = None if is_loss else torch.ones_like(output)
            with clock.action(1):
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
            del output, gradient
            if leaf is not None:
                leaf.grad = None
        return PassSeconds(*self._medians(clock, 2))

    def _leaf(self, trained: TrainedStage, program: Program, spec: ModuleSpec, inputs: Inputs) -> Tensor | None:
        """What the stage is handed: features, hidden states, or projected tokens."""
        if inputs.features is not None:
            return to_device(inputs.features, self.device)
        if trained.stage.held.start:
            hidden = shares_of(sum(inputs.pack.lengths), trained.groups).hidden
            num_rows, width = hidden.stop - hidden.start, spec.config.hidden_size
        else:
            assert inputs.pack.token_ids is not None
            num_rows, width = int((inputs.pack.token_ids < 0).sum()), program.model.llm.config.hidden_size
        if not num_rows:
            return None
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = getattr(torch, self.dtype)
        states = torch.randn(num_rows, width, generator=generator, device=self.device).to(dtype)
        return states.requires_grad_(trained.stage.passes_gradients)

    def _time_optimizer(self, trained: TrainedStage) -> float:
        """Median time of an optimizer step, the gradients' norm included, seconds."""
        clock = self._start_clock()
        for _ in range(1 + self.num_warm_ups + self.num_repetitions):
            with clock.action(0):
                norm = float(trained.gradient_square().sqrt())
                trained.step(1.0, norm)
        (seconds,) = self._medians(clock, 1)
        return seconds

    def _start_clock(self) -> Clock:
        # On a CPU the seconds of this one thread: what else the machine does is none of the pass's time.
        clock = Clock(self.device, thread_time)
        clock.start()
        return clock

    def _medians(self, clock: Clock, num_kinds: int) -> list[float]:
        """Median duration of the measured runs of each kind of action that took turns."""
        rows = clock.rows()[-num_kinds * self.num_repetitions :]
        took = rows[:, 2] - rows[:, 1]
        return [float(np.median(took[kind::num_kinds])) for kind in range(num_kinds)]


def _join(shape: StageShape, sequence_parallel: bool) -> tuple[StageGroups, dist.ProcessGroup]:
    """Be rank 0 of all that hold the stage: its groups there, and one of this rank alone."""
    _leave()
    width = shape.tp * shape.cp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=width * shape.dp)
    tp, cp, dp_cp, alone = (
        dist.new_group(list(ranks))
        for ranks in (
            range(shape.tp),
            range(0, width, shape.tp),
            range(0, width * shape.dp, shape.tp),
            range(1),
        )
    )
    return StageGroups(tp, cp, dp_cp, sequence_parallel), alone


def _leave() -> None:
    """Let go of the last stage: its hooks hold it in circles that only the collector breaks."""
    gc.collect()
    torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()
