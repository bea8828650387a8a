"""Time the passes of one rank after another on this device with the training runtime; all other ranks are absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import thread_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import ExecutionError, OutOfMemoryError, UserError
from entrain_bench.program import Program
from entrain_bench.specs.sharding import ZERO1
from entrain_bench.train.device import find_device, rank_of_many
from entrain_bench.train.emulate import Emulator
from entrain_bench.train.measuring import Clock
from entrain_bench.train.messages.rank_plan import Message, Step, order_of_actions
from entrain_bench.train.messages.transfers import Transfers
from entrain_bench.train.running.runtime import Iteration, Runtime, build_runtime
from entrain_bench.train.settings import TrainSettings


class Absent(Transfers):
    """Messages of absent ranks: normal numbers; messages of the rank to itself arrive."""

    def receive(self, message: Message) -> Tensor:
        """Return a tensor of the message's shape."""
        if message.sender == self.plan.rank:
            return Transfers.receive(self, message)
        return torch.randn(message.num_rows, message.width, device=self.device).to(self.dtype)

    def send(self, step: Step, tensor_of: Callable[[Message], Tensor]) -> None:
        """Keep messages that stay on this rank."""
        Transfers.send(
            self, replace(step, sends=tuple(m for m in step.sends if m.receiver == self.plan.rank)), tensor_of
        )


def measure_rank(emulator: Emulator, program: Program, rank: int) -> tuple[FloatArray, dict[tuple[int, int], float]]:
    """Time the passes of a rank, and its optimizer steps.

    Returns seconds of each pass ``[repetitions, passes]``, and of the step of each stage by module and stage.
    ``UserError`` if there is no such device, ``OutOfMemoryError`` names the pass that does not fit.
    """
    device = find_device(emulator.device, "harness.device")
    if device.type == "cpu" and torch.cuda.is_available():
        why = "megatron-core uses a visible GPU"
        raise UserError(f"harness.device=cpu: {why}. Hide it with CUDA_VISIBLE_DEVICES= before the command")
    if dist.is_initialized():
        raise ExecutionError("harness=emulate: torch.distributed is already initialized in this process")
    whole = tuple(replace(placed, sharding=ZERO1, nodes=1, offload=False) for placed in program.layout.modules)
    program = replace(program, layout=replace(program.layout, modules=whole))
    num_ranks = emulator.truth.cluster.num_ranks
    settings = TrainSettings(emulator.truth, 0.0, num_ranks, dtype=emulator.dtype)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with rank_of_many(num_ranks, rank):
            with _fitting("the weights"):
                runtime = build_runtime(program.layout, settings, device, 0, dist.new_group())
            seconds = _time_passes(emulator, runtime, program)
            with _fitting("an optimizer step"):
                return seconds, _time_optimizers(emulator, runtime)
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def _fitting(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"memory: the device ran out of memory in {what} (harness=emulate)") from error


def _time_passes(emulator: Emulator, runtime: Runtime[Any], program: Program) -> FloatArray:
    work = runtime.prepare(program, order_of_actions(program))
    inputs = list(work.inputs)
    # Gradients are summed and weights gathered by ranks that are not there.
    steps = [replace(step, ends_gradients=False, closes=False) for step in work.plan.steps]
    passes = [step for step in steps if program.is_pass[step.action]]
    clock = _started_clock(runtime.device)
    for _ in range(emulator.num_warm_ups + emulator.num_repetitions):
        for trained in runtime.stages.values():
            trained.zero_grad()
        transfers = Absent(work.plan, runtime.groups.channels, runtime.dtype, runtime.device, emulator.truth.framework)
        iteration = Iteration(runtime, replace(work, inputs=iter(inputs)), transfers)
        for step in passes:
            with _fitting(str(program.view(step.action))):
                iteration.execute(step, clock)
    return clock.seconds().reshape(-1, len(passes))[emulator.num_warm_ups :]


def _time_optimizers(emulator: Emulator, runtime: Runtime[Any]) -> dict[tuple[int, int], float]:
    clock = _started_clock(runtime.device)
    for _ in range(emulator.num_warm_ups + emulator.num_repetitions):
        for trained in runtime.stages.values():
            with clock.action(0):
                norm = float(trained.gradient_square().sqrt())
                trained.step(1.0, norm)
    seconds = clock.seconds().reshape(-1, len(runtime.stages))[emulator.num_warm_ups :]
    return dict(zip(runtime.stages, np.median(seconds, axis=0).tolist(), strict=True))


def _started_clock(device: torch.device) -> Clock:
    # On a CPU only the seconds of this thread, so other load of the machine does not count.
    clock = Clock(device, thread_time)
    clock.start()
    return clock
