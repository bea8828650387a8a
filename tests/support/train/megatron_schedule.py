"""Our training runtime beside megatron-core's own pipeline schedule: the same stages, data, reduction and optimizer.

Imported only on the ranks that measure: megatron-core takes seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train.measuring import Clock
from entrain_bench.train.platform import MODULES, prepare_platform
from entrain_bench.train.running.data import Inputs, SampleData
from entrain_bench.train.running.runtime import Runtime, build_runtime
from entrain_bench.train.running.stages import TrainedStage, global_norm
from entrain_bench.train.settings import TrainSettings

SCHEDULE_MODULES = tuple(f"megatron.core.pipeline_parallel.{name}" for name in ("schedules", "p2p_communication"))
CPU = torch.device("cpu")
ITERATIONS = 4


@dataclass(slots=True)
class _Model:
    """A stage as megatron-core's schedule wants it: its input is set before it is called."""

    trained: TrainedStage
    config: Any
    hidden: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take what the stage before sent."""
        (self.hidden,) = tensors


class MegatronSchedule:
    """Iterations of one LLM under megatron-core's 1F1B, on the stages of a runtime of ours.

    Microbatches must all have the same number of tokens: nothing is negotiated, which is megatron-core's fastest way.
    """

    def __init__(self, runtime: Runtime, layout: Layout) -> None:
        (trained,) = runtime.stages.values()
        assert isinstance(trained, TrainedStage)
        self.trained = trained
        self.runtime = runtime
        groups = trained.groups
        config = dataclasses.replace(
            self.trained.stage.config,
            pipeline_model_parallel_size=layout.modules[0].pp,
            pipeline_dtype=runtime.dtype,
            batch_p2p_sync=False,
        )
        self.pipeline = P2PCommunicator(dist.group.WORLD, config)
        self.collection = ProcessGroupCollection(tp=groups.tp, cp=groups.cp)
        self.model = _Model(self.trained, config)

    def run(self, program: Program) -> list[Tensor]:
        """One iteration on the program's samples and microbatches; returns the losses of the last stage."""
        runtime = self.runtime
        trained = self.trained
        data = SampleData(program.shapes, runtime.content)
        microbatches = np.split(program.chunks[0].members, program.chunks[0].offsets[1:-1])
        shape = [(int(program.shapes.llm_tokens[microbatches[0]].sum()), self.model.config.hidden_size)]
        module = program.model.modules[0]
        stage = self.pipeline.pp_group.rank()
        # As ahead as for our runtime.
        inputs = runtime.loader.load(data, [(module, stage, members) for members in microbatches])

        def step(inputs: Iterator[Inputs], model: _Model) -> tuple[Tensor, Callable[..., Any]]:
            output = model.trained.buffers(model.hidden, next(inputs).pack)
            scaled = output / data.num_loss_tokens if self.pipeline.is_pp_last_stage else output
            return scaled, lambda loss: (loss, 0, loss.detach())

        trained.zero_grad()
        losses: list[Tensor] = forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=inputs,
            model=self.model,
            num_microbatches=len(microbatches),
            seq_length=shape[0][0],
            micro_batch_size=1,
            adjust_tensor_shapes_fn=lambda *_: (shape, shape),
            p2p_communicator=self.pipeline,
            pg_collection=self.collection,
        )
        trained.sync_gradients(runtime.groups.tied.get(0))
        norm = global_norm(runtime.stages, runtime.groups.control, runtime.device)
        if isfinite(norm):
            trained.step(runtime.settings.clip_grad, norm)
        return losses


def losses_of_both(overrides: Sequence[str], control: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
    """The losses of a few iterations under our runtime and under megatron-core's schedule; collective, over gloo.

    Each trains weights of its own from the same start. The overrides are of a run with one LLM in as many stages as
    there are ranks, and microbatches of equal size. Only the last stage's rank has losses.
    """
    prepare_platform((*MODULES, *SCHEDULE_MODULES))
    setting = prepare(compose_cells(overrides)[0].config)
    settings = setting.executor
    assert isinstance(settings, TrainSettings)
    layout = setting.plan()
    ours, other = (build_runtime(layout, settings, CPU, 0, control) for _ in range(2))
    megatron = MegatronSchedule(other, layout)
    clock = Clock(CPU)
    pairs = []
    for iteration in range(ITERATIONS):
        shapes = setting.source.batch(iteration, setting.job.global_batch, 0)
        program = setting.strategy.program(shapes, layout, setting.profile)
        losses = [loss for _, loss in ours.run(ours.prepare(program), clock).losses]
        theirs = megatron.run(program)
        if losses:
            pairs.append((torch.tensor(losses).sum(), torch.stack(theirs).sum()))
    return pairs
