"""Two simulators that share no formula agree on every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from entrain_bench.config.schema import RunConfig
from entrain_bench.costs import roofline, steps, truth
from entrain_bench.costs.truth import CostTruth
from entrain_bench.errors import DeadlockError, OutOfMemoryError
from entrain_bench.experiment import Setting, prepare
from entrain_bench.program import Pass, Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.run import compose_cells
from entrain_bench.simulate import Simulator
from entrain_bench.simulate import place as placing
from entrain_bench.specs.framework import Framework
from support.independent import simulate

STRATEGIES = sorted(path.stem for path in (Path(__file__).parents[2] / "experiments" / "strategy").glob("*.yaml"))
SMALL = ("model=tiny_av", "workload=synthetic_av", "cluster=a40x16", "global_batch=32", "microbatch_size=2")
SMALL += ("layout.tp=2", "layout.dp=2")
FRAMEWORKS = {
    "default": Framework(),
    "overlapped transfers": Framework(p2p="overlapped"),
    "weights gathered late": Framework(align_param_gather=False),
    "nothing overlaps": Framework(overlap_grad_reduce=False, overlap_param_gather=False),
    "all-reduce": Framework(distributed_optimizer=False, p2p="overlapped"),
    "gradients after all": Framework(overlap_grad_reduce=False, distributed_optimizer=False),
}


@cache
def decided(strategy: str, *overrides: str) -> tuple[RunConfig, Setting, Program]:
    """A strategy's program; planned once for all frameworks, which only executing it knows."""
    (cell,) = compose_cells([*overrides, f"strategy={strategy}"])
    setting = prepare(cell.config)
    layout = setting.strategy.plan(setting.profile)
    shapes = setting.source.batch(0, cell.config.global_batch, 0)
    return cell.config, setting, setting.strategy.program(shapes, layout, setting.profile)


def disagreement(config: RunConfig, framework: Framework, program: Program) -> float:
    """Largest difference of any time of the two simulators, relative to the iteration."""
    setting = prepare(config)
    timeline = Simulator(CostTruth(setting.job.model, setting.job.cluster, framework), 1e18).execute(program)
    return difference(config, framework, program, timeline)


def difference(config: RunConfig, framework: Framework, program: Program, timeline: Timeline) -> float:
    theirs = simulate(config.model, config.cluster, asdict(framework), program)
    pairs = []
    for number in range(program.num_actions):
        ours = timeline.start_s[number], timeline.end_s[number]
        action = theirs.job.named(number)
        if action:
            pairs.append((timeline.comm_s[number], theirs.comm[action]))
            other = theirs.start[action], theirs.end[action]
        else:
            stage = int(program.stage[number]) + sum(m.pp for m in program.layout.modules[: program.module[number]])
            every = theirs.steps.sync if program.kind[number] == Pass.GRAD_SYNC else theirs.steps.optimizer
            other = every[stage]
        pairs += zip(ours, other, strict=True)
    ours_s, theirs_s = np.array(pairs).T
    return float(np.abs(ours_s - theirs_s).max() / theirs_s.max())


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_agree_on_small_programs(strategy: str, name: str) -> None:
    config, _, program = decided(strategy, *SMALL)
    assert disagreement(config, FRAMEWORKS[name], program) < 1e-9
