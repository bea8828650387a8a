"""Every strategy under every factor of ``Speed``: each slows programs down, and plans under all of them are valid."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from entrain_bench.config.compose import compose
from entrain_bench.conformance.suite import require_valid
from entrain_bench.costs.truth import CostTruth
from entrain_bench.run.experiment import Feed, prepare
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import Speed
from support.wide import each_strategy, own_dp

SMALL = ("model=tiny", "workload=chartqa", "cluster=a40x16", "global_batch=16", "microbatch_size=2", "iterations=1",
         "layout.tp=2", "layout.dp=2", "tuning=own")  # fmt: skip
# Factors that make every cluster slower, and the last one smaller.
WORSE = {each.name: 0.25 for each in fields(Speed)} | {"launch": 4.0, "overlap": 2.0, "reserve": 2.0}


@pytest.mark.parametrize("name", each_strategy())
def test_every_factor_makes_a_program_slower_or_larger(name: str) -> None:
    setting = prepare(compose(f"strategy={name}", *SMALL, *own_dp(name)))
    feed = Feed(setting, setting.plan(), 0)
    program, _ = feed.program(feed.batch(0))
    job, device = setting.job, setting.job.cluster.device
    # Constants that a device may have at 0.
    constants = {"overlap_cost": 0.3, "host_launch_s": 6e-6, "allocator_reserve": 0.1}
    cluster = replace(job.cluster, device=replace(device, **constants))

    def executed(speed: Speed) -> tuple[float, float]:
        truth = CostTruth(job.model, cluster.at(speed), job.framework)
        timeline = Simulator(truth, job.memory_budget_bytes).execute(program)
        return timeline.iteration_time_s, float(timeline.peak_memory_bytes.max())

    usual_s, usual_bytes = executed(Speed())
    changed = {factor: executed(Speed(**{factor: value})) for factor, value in WORSE.items()}
    slower = {factor: seconds / usual_s for factor, (seconds, _) in changed.items() if factor != "reserve"}
    assert all(each > 1.0 for each in slower.values()), slower
    more = {factor: held / usual_bytes for factor, (_, held) in changed.items()}
    assert more.pop("reserve") > 1.0
    assert all(each == 1.0 for each in more.values()), more


@pytest.mark.parametrize("name", each_strategy())
def test_plans_under_all_factors_are_valid(name: str) -> None:
    changed = [f"speed.{factor}={value}" for factor, value in (WORSE | {"memory": 4.0}).items()]
    require_valid(compose(f"strategy={name}", *SMALL, *own_dp(name), *changed))
