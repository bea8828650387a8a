"""Layouts with groups of several widths: what a request allows."""

from __future__ import annotations

import pytest

from entrain_bench.balancing.rounds import layouts_with_widths
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Job

SMALL = ("model=tiny_av", "workload=synthetic_av", "cluster=a40x16", "global_batch=32")


def job_of(*overrides: str) -> Job:
    return prepare(compose_cells([*SMALL, "strategy=braid", *overrides])[0].config).job


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["layout.tp=null", "layout.cp=null", "layout.dp=null"], [1, 2, 4]),
        (["layout.tp=2", "layout.cp=null", "layout.dp=4"], [2]),
        (["layout.tp=2", "layout.cp=1", "layout.dp=null"], [2]),
        (["layout.tp=2", "layout.cp=2", "layout.dp=4"], [2]),
        (["layout.tp=null", "layout.cp=2", "layout.dp=4", "layout.pp=1"], [2]),
        # A CP and a DP that leave ranks for stages, or none; stages.
        (["layout.tp=2", "layout.cp=1", "layout.dp=4"], []),
        (["layout.tp=2", "layout.cp=1", "layout.dp=4", "layout.pp=1"], []),
        (["layout.tp=2", "layout.cp=4", "layout.dp=4"], []),
        (["layout.tp=1", "layout.dp=2", "layout.pp=2"], []),
    ],
)
def test_a_requested_tp_binds_all_groups_of_the_llm_and_cp_and_dp_their_positions(
    asked: list[str], expected: list[int]
) -> None:
    job = job_of(*asked)
    layouts = [*layouts_with_widths(job)]
    llms = [layout.modules[job.model.llm_index] for layout in layouts]
    # Sharded layouts come last, each with one TP.
    assert [(llm.tp, llm.sharded) for llm in llms] == [(tp, kind) for kind in (False, True) for tp in expected]
    for llm in llms:
        assert llm.plane.shape == (1, 16)
        assert not llm.sharded or {tp for tp, _ in llm.widths} == {llm.tp}
        tps = {tp for tp, _ in llm.widths}
        assert tps == ({job.request.tp} if job.request.tp else tps)
        assert {cp for tp, cp in llm.widths if tp == llm.tp} >= {1, 2, 4}


@pytest.mark.parametrize(
    "asked",
    [
        ("layout.dp=null",),
        ("layout.cp=null", "layout.dp=2"),
        ("layout.tp=1", "layout.cp=4", "layout.dp=4"),
    ],
)
@pytest.mark.parametrize("strategy", ["hybrid_cp", "flexsp", "fsdp"])
def test_one_rule_for_all_who_choose_widths(strategy: str, asked: tuple[str, ...]) -> None:
    widths = ("strategy.planner.widths=true", "layout.recompute=[vision,audio,llm]") if strategy == "fsdp" else ()
    made = prepare(compose_cells([*SMALL, f"strategy={strategy}", "microbatch_size=1", *asked, *widths])[0].config)
    request, llm = made.job.request, made.strategy.plan(made.profile).modules[made.job.model.llm_index]
    assert llm.widths or strategy == "fsdp"
    assert {tp for tp, _ in llm.degrees} == {request.tp}
    assert llm.pp == (request.pp or llm.pp)
    assert llm.plane.shape[1] // llm.tp % ((request.dp or 1) * (request.cp or 1)) == 0
