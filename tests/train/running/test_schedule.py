"""Trained schedules beside the simulator's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from entrain_bench.program import Program
from entrain_bench.program.table import timeline_frame
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.simulate.replay import LABELS, replay
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.measuring import Clock, merge_timeline
from entrain_bench.train.messages.control import gather_values
from entrain_bench.train.messages.rank_plan import Step
from entrain_bench.train.running import stages as step_module
from entrain_bench.train.running.runtime import Iteration, build_runtime
from entrain_bench.train.settings import TrainSettings
from support.train.ranks import run_ranks
from support.train.runs import CPU, DISJOINT, build_here, configuration, program_of

RANKS = 4
FEW_TOKENS = ("workload=synthetic", "workload.modalities.image.llm_tokens.median=12", "workload.text.median=8")


def made(harness: str) -> tuple[RunContext, Program]:
    """The setting of the figure with less to compute, and the first iteration's program."""
    given = [f"harness={harness}", *(["harness.device=cpu"] if harness == "train" else [])]
    (cell,) = compose_cells(["figure=measured_gantt", *given, *FEW_TOKENS], multirun=True)
    setting = prepare(cell.config)
    return setting, program_of(setting)


def measure(_: int, settings: TrainSettings, program: Program) -> pd.DataFrame:
    prepare_platform()
    control = dist.group.WORLD
    clock = Clock(CPU)
    runtime = build_runtime(program.layout, settings, CPU, 0, control)
    runtime.run(runtime.prepare(program), clock)
    rows = [np.array(rank) for rank in gather_values(clock.rows().tolist(), control)]
    return timeline_frame(merge_timeline(program, rows, [0.0] * RANKS))


def started(frame: pd.DataFrame) -> pd.DataFrame:
    """What every lane does, in the order in which it starts."""
    return frame.sort_values(["lane", "start_s"], kind="stable")[LABELS].reset_index(drop=True)


@pytest.mark.wide
def test_ranks_act_in_the_order_of_the_simulation() -> None:
    simulator, program = made("simulate")
    encoder = program.chunks[0]
    assert len(encoder) > len(np.unique(encoder.microbatch)), "no sample is deferred"
    setting, trained = made("train")
    measured = run_ranks(measure, RANKS, setting.executor, trained)[0]
    pd.testing.assert_frame_equal(started(measured), started(timeline_frame(simulator.executor.execute(program))))
    assert (measured.groupby("lane")["start_s"].diff().dropna() > 0).all()
    assert replay(program, measured)[LABELS].equals(measured[LABELS])


def _sent(_: int, config: str) -> tuple[bool, list[list[str]]]:
    """Whether stages have several buckets; in each iteration, when they were sent off."""
    small = partial(step_module.DistributedDataParallelConfig, bucket_size=20_000)
    with patch.object(step_module, "DistributedDataParallelConfig", small):
        setting, runtime = build_here(config)
    groups = sum(len(trained.buffers.bucket_groups) for trained in runtime.stages.values())
    sent: Counter[tuple[str, int]] = Counter()
    under_way: list[str] = []

    def begin(self: Iteration, step: Step, run: Callable[..., None] = Iteration.begin) -> None:
        under_way[:] = ["before an action"]
        run(self, step)

    def execute(self: Iteration, step: Step, *given: object, run: Callable[..., None] = Iteration.execute) -> None:
        under_way[:] = [f"{step.kind.name} closes" if step.closes else step.kind.name]
        run(self, step, *given)

    def start(
        self: _ParamAndGradBucketGroup,
        *given: object,
        run: Callable[..., None] = _ParamAndGradBucketGroup.start_grad_sync,
        **options: object,
    ) -> None:
        sent[under_way[0], id(self)] += self.grad_reduce_handle is None  # else it does nothing
        run(self, *given, **options)

    found = []
    with (
        patch.object(Iteration, "begin", begin),
        patch.object(Iteration, "execute", execute),
        patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start),
    ):
        for iteration in range(2):
            sent.clear()
            program = program_of(setting, iteration)
            assert all(map(program.splits_backward, range(2)))
            runtime.run(runtime.prepare(program), Clock(CPU))
            once = [when for (when, _), count in sent.items() if count == 1]
            assert len(once) == sum(sent.values()) == groups
            found.append(sorted(set(once)))
    return groups > len(runtime.stages), found


@pytest.mark.wide
def test_a_stage_sends_every_bucket_once_in_its_last_weight_pass_or_behind_that_of_another_replica() -> None:
    ranks = run_ranks(_sent, 4, configuration(*DISJOINT, "strategy/scheduler=zb_h1"))
    assert any(several for several, _ in ranks)
    for iterations in zip(*(found for _, found in ranks), strict=True):
        assert set(map(tuple, iterations)) == {("WEIGHT closes",), ("before an action",)}
