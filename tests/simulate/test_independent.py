"""Two simulators that share no formula agree on every strategy."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from entrain_bench.base.errors import DeadlockError
from support.agreement import AGREE, FRAMEWORKS, GENERATING, GROUPS, SMALL, decided, disagreement, random_case
from support.independent import simulate
from support.wide import each_strategy


@pytest.mark.wide
@pytest.mark.parametrize("strategy", each_strategy())
def test_both_agree_on_small_programs_under_all_settings(strategy: str) -> None:
    case = decided(strategy, *SMALL)
    found = {name: disagreement(case, framework) for name, framework in FRAMEWORKS.items()}
    assert max(found.values()) < AGREE, found


@pytest.mark.wide
@pytest.mark.parametrize("name", ["default", "encoders whole", "two instances", "labelled head"])
@pytest.mark.parametrize("strategy", ["megatron", "disttrain", "fsdp"])
def test_both_agree_on_context_parallelism(strategy: str, name: str) -> None:
    case = decided(strategy, *SMALL, "layout.cp=2")
    assert {placed.cp for placed in case.program.layout.modules} == {2}
    assert disagreement(case, FRAMEWORKS[name]) < AGREE


@pytest.mark.wide
@pytest.mark.parametrize("strategy", each_strategy())
def test_both_agree_on_the_default_setting(strategy: str) -> None:
    case = decided(strategy)
    found = {name: disagreement(case, FRAMEWORKS[name]) for name in ("default", "overlapped transfers")}
    assert max(found.values()) < AGREE, found


@pytest.mark.wide
@pytest.mark.parametrize("strategy", ["braid", "flexsp", "fsdp", "hybrid_cp", "veomni"])
def test_both_agree_on_groups_of_several_widths(strategy: str) -> None:
    offered = {"fsdp": ["strategy.planner.widths=true"], "veomni": ["strategy.planner.widths=true", "workload=chartqa"]}
    case = decided(strategy, *GROUPS, *offered.get(strategy, []))
    pairs = zip(case.program.layout.modules, case.program.chunks, strict=True)
    taken = [np.unique(placed.degree_of_copy[rows.replica]) for placed, rows in pairs if placed.widths]
    assert max(map(len, taken)) > 1
    assert bool(case.program.remade) == (strategy == "braid")
    found = {name: disagreement(case, framework) for name, framework in FRAMEWORKS.items()}
    assert max(found.values()) < AGREE, found


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_both_agree_on_split_backwards(schedule: str) -> None:
    case = decided("megatron_schedules", *SMALL, f"strategy.planner.schedules=[{schedule}]")
    assert all(case.program.splits_backward(index) for index in range(len(case.program.chunks)))
    found = {name: disagreement(case, framework) for name, framework in FRAMEWORKS.items()}
    assert max(found.values()) < AGREE, found


@pytest.mark.wide
@pytest.mark.parametrize("frozen", ["vision", "llm"])
@pytest.mark.parametrize("strategy", ["dip", "entrain", "fsdp", "hetero_colocated", "megatron"])
def test_both_agree_on_modules_that_do_not_learn(strategy: str, frozen: str) -> None:
    case = decided(strategy, *SMALL, f"freeze=[{frozen}]")
    settings = {name: replace(framework, freeze=(frozen,)) for name, framework in FRAMEWORKS.items()}
    found = {name: disagreement(case, framework) for name, framework in settings.items()}
    assert max(found.values()) < AGREE, found


@pytest.mark.wide
@pytest.mark.parametrize("frozen", ["", "vision", "llm"])
@pytest.mark.parametrize("strategy", ["fsdp", "hetero_colocated", "megatron"])
def test_both_agree_on_selective_recomputation(strategy: str, frozen: str) -> None:
    still = (frozen,) if frozen else ()
    case = decided(strategy, *SMALL, "layout.recompute=[vision,audio,llm]", f"freeze=[{frozen}]")
    settings = {name: replace(framework, freeze=still) for name, framework in FRAMEWORKS.items()}
    full = {name: disagreement(case, framework) for name, framework in settings.items()}
    selective = {
        name: disagreement(case, replace(framework, recompute_granularity="selective"))
        for name, framework in settings.items()
    }
    assert max(full.values()) < AGREE, full
    assert max(selective.values()) < AGREE, selective


# What does not learn in each of a row of random programs.
FROZEN: list[tuple[str, ...]] = [(), (), ("vision",), ("llm",), ("vision", "audio", "llm"), ("audio", "out"), ()]


def test_both_agree_on_random_programs() -> None:
    rng, names = np.random.default_rng(0), list(FRAMEWORKS)
    stuck = 0
    for number in range(150):
        frozen = FROZEN[number % len(FROZEN)]
        case, framework = random_case(rng, frozen), replace(FRAMEWORKS[names[number % len(names)]], freeze=frozen)
        try:
            assert disagreement(case, framework) < AGREE, number
        except DeadlockError:
            # Only the single rank between modules can wait for itself.
            assert case.program.layout.single_rank_boundary
            stuck += 1
            with pytest.raises(AssertionError, match="deadlock"):
                simulate(GENERATING, case.cluster_config, asdict(framework), case.program)
    assert stuck < 40
