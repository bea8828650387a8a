"""The passes of one rank after the other on this device, by the runtime that trains; all other ranks are absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import sleep, thread_time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import ExecutionError, OutOfMemoryError, UserError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.train.device import find_device, rank_of_many
from entrain_bench.train.measuring import Clock
from entrain_bench.train.messages.rank_plan import Message, Step, order_of_actions
from entrain_bench.train.messages.transfers import Transfers
from entrain_bench.train.running.runtime import Iteration, Runtime, build_runtime
from entrain_bench.train.settings import TrainSettings


class Absent(Transfers):
    """Messages of ranks that are not there: normal numbers; what the rank sends to itself arrives."""

    def receive(self, message: Message) -> Tensor:
        """Return a tensor of the message's shape."""
        if message.sender == self.plan.rank:
            return Transfers.receive(self, message)
        return torch.randn(message.num_rows, message.width, device=self.device).to(self.dtype)

    def send(self, step: Step, tensor_of: Callable[[Message], Tensor]) -> None:
        """Keep what stays on this rank."""
        Transfers.send(
            self, replace(step, sends=tuple(m for m in step.sends if m.receiver == self.plan.rank)), tensor_of
        )


@dataclass(slots=True)
class Bench:
    """Measures passes and optimizer steps; ``UserError`` if the device is not there."""

    truth: CostTruth
    device_name: str
    dtype: str
    num_warm_ups: int
    num_repetitions: int
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
        self, program: Program, rank: int, waits_s: FloatArray
    ) -> tuple[FloatArray, dict[tuple[int, int], float]]:
        """Time the passes of a rank in their order, with idle seconds before each, and its optimizer steps.

        Returns seconds of each pass ``[repetitions, passes]``, and of the step of each stage by module and stage.
        ``OutOfMemoryError`` names what does not fit.
        """
        whole = tuple(replace(placed, sharded=False, offload=False) for placed in program.layout.modules)
        program = replace(program, layout=replace(program.layout, modules=whole))
        num_ranks = self.truth.cluster.num_ranks
        settings = TrainSettings(self.truth, 0.0, num_ranks, dtype=self.dtype, preprocessing="inline")
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._at = "the weights"
        try:
            with rank_of_many(num_ranks, rank):
                runtime = build_runtime(program.layout, settings, self.device, 0, dist.new_group())
                seconds = self._time_passes(runtime, program, waits_s)
                self._at = "an optimizer step"
                return seconds, self._time_optimizers(runtime)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"memory: the device ran out of memory in {self._at} (harness=emulate)") from error
        finally:
            torch.set_num_threads(num_threads)

    def _time_passes(self, runtime: Runtime, program: Program, waits_s: FloatArray) -> FloatArray:
        work = runtime.prepare(program, order_of_actions(program))
        inputs = list(work.inputs)
        # Gradients are summed and weights gathered by ranks that are not there.
        steps = [replace(step, ends_gradients=False, closes=False) for step in work.plan.steps]
        passes = [step for step in steps if step.kind not in (Pass.GRAD_SYNC, Pass.OPTIMIZER)]
        clock = self._start_clock()
        for _ in range(self.num_warm_ups + self.num_repetitions):
            for trained in runtime.stages.values():
                trained.zero_grad()
            transfers = Absent(work.plan, runtime.groups.channels, runtime.dtype, self.device, self.truth.framework)
            iteration = Iteration(runtime, replace(work, inputs=iter(inputs)), transfers)
            for step, wait_s in zip(passes, waits_s.tolist(), strict=True):
                self._at = str(program.view(step.action))
                if wait_s:
                    sleep(wait_s)
                iteration.execute(step, clock)
        return self._measured_s(clock, len(passes))

    def _time_optimizers(self, runtime: Runtime) -> dict[tuple[int, int], float]:
        clock = self._start_clock()
        for _ in range(self.num_warm_ups + self.num_repetitions):
            for trained in runtime.stages.values():
                with clock.action(0):
                    norm = float(trained.gradient_square().sqrt())
                    trained.step(1.0, norm)
        medians_s = np.median(self._measured_s(clock, len(runtime.stages)), axis=0)
        return dict(zip(runtime.stages, medians_s.tolist(), strict=True))

    def _start_clock(self) -> Clock:
        # On a CPU the seconds of this thread alone, whatever else the machine does.
        clock = Clock(self.device, thread_time)
        clock.start()
        return clock

    def _measured_s(self, clock: Clock, num_actions: int) -> FloatArray:
        """Seconds of repeated actions, without warm-ups ``[repetitions, actions]``."""
        return clock.seconds().reshape(-1, num_actions)[self.num_warm_ups :]
