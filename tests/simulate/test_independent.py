"""Two simulators that share no formula agree on every strategy; groups of one width are replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, replace

import numpy as np
import pytest

from entrain_bench.base.errors import DeadlockError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import measure
from entrain_bench.simulate import Simulator
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes, shapes_from_lists
from entrain_bench.specs.sharding import SHARDINGS
from support.agreement import AGREE, FRAMEWORKS, GENERATING, GROUPS, SMALL, Case, decided, disagreement, random_case
from support.builders import llm_config, placed, tiny_cluster
from support.independent import simulate
from support.programs import random_program
from support.wide import each_strategy


def assert_agreement(case: Case, frameworks: Collection[str] = FRAMEWORKS.keys(), **changes: object) -> None:
    found = {name: disagreement(case, replace(FRAMEWORKS[name], **changes)) for name in frameworks}  # type: ignore[arg-type]
    assert max(found.values()) < AGREE, found


@pytest.mark.wide
@pytest.mark.parametrize("strategy", each_strategy())
def test_both_agree_on_every_strategy(strategy: str) -> None:
    assert_agreement(decided(strategy, *SMALL))
    assert_agreement(decided(strategy), ["default", "overlapped transfers"])


@pytest.mark.wide
@pytest.mark.parametrize("strategy", ["megatron", "disttrain", "fsdp"])
def test_both_agree_on_context_parallelism(strategy: str) -> None:
    case = decided(strategy, *SMALL, "layout.cp=2")
    assert {placed.cp for placed in case.program.layout.modules} == {2}
    assert_agreement(case, ["default", "encoders whole", "two instances"])


@pytest.mark.wide
@pytest.mark.parametrize("strategy", ["braid", "bytescale", "flexsp", "fsdp", "hybrid_cp", "lpt_widths", "veomni"])
def test_both_agree_on_groups_of_several_widths(strategy: str) -> None:
    offered = {"fsdp": ["strategy.planner.widths=true"], "veomni": ["strategy.planner.widths=true", "workload=chartqa"]}
    case = decided(strategy, *GROUPS, *offered.get(strategy, []))
    pairs = zip(case.program.layout.modules, case.program.chunks, strict=True)
    taken = [np.unique(placed.degree_of_copy[rows.replica]) for placed, rows in pairs if placed.widths]
    assert max(map(len, taken)) > 1
    assert bool(case.program.remade) == (strategy in ("braid", "lpt_widths"))
    assert_agreement(case)


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_both_agree_on_split_backwards(schedule: str) -> None:
    case = decided("megatron_schedules", *SMALL, f"strategy.planner.schedules=[{schedule}]")
    assert all(case.program.splits_backward(index) for index in range(len(case.program.chunks)))
    assert_agreement(case)


@pytest.mark.wide
@pytest.mark.parametrize("frozen", ["", "vision", "llm"])
@pytest.mark.parametrize("strategy", ["dip", "entrain", "fsdp", "hetero_colocated", "megatron"])
def test_both_agree_on_modules_that_do_not_learn_and_on_selective_recomputation(strategy: str, frozen: str) -> None:
    still = (frozen,) if frozen else ()
    if frozen:
        assert_agreement(decided(strategy, *SMALL, f"freeze=[{frozen}]"), freeze=still)
    if strategy in ("dip", "entrain"):
        return
    case = decided(strategy, *SMALL, "layout.recompute=[vision,audio,llm]", f"freeze=[{frozen}]")
    for granularity in ("full", "selective"):
        assert_agreement(case, freeze=still, recompute_granularity=granularity)


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


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=[pytest.mark.wide, pytest.mark.timeout(600)])])
def test_both_agree_on_every_kind_of_sharding(number: int) -> None:
    rng = np.random.default_rng(number)
    sharded = [name for name, framework in FRAMEWORKS.items() if framework.distributed_optimizer]
    seen = Counter[str]()
    for each in range(number):
        frozen = FROZEN[each % len(FROZEN)]
        case, framework = random_case(rng, frozen, sharded=True), FRAMEWORKS[sharded[each % len(sharded)]]
        layout = case.program.layout
        check_layout(layout, case.program.model, case.cluster)
        try:
            assert disagreement(case, replace(framework, freeze=frozen)) < AGREE, each
        except DeadlockError:
            assert layout.single_rank_boundary
            continue
        seen.update(f"{placed.sharding} {placed.nodes}" for placed in layout.modules)
    assert seen.keys() >= {*(f"{kind} 1" for kind in SHARDINGS), "hybrid 2", "hybrid 3"}


EXPERTS = {"count": 8, "top_k": 2, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 16, "dense_layers": [0]}
MIXTURE = {**GENERATING, "modules": {**GENERATING["modules"], "llm": llm_config(4, experts=EXPERTS)}}


def test_both_agree_on_expert_parallelism() -> None:
    rng, names = np.random.default_rng(1), list(FRAMEWORKS)
    seen = set()
    for number in range(120):
        framework = replace(FRAMEWORKS[names[number % len(names)]], sequence_parallel=True)
        case = random_case(rng, (), MIXTURE, experts=True)
        placed = case.program.layout.module("llm")
        try:
            assert disagreement(case, framework) < AGREE, number
            seen.add((placed.ep > 1, placed.ep > placed.cp, placed.tp > 1, placed.pp > 1))
        except DeadlockError:
            with pytest.raises(AssertionError, match="deadlock"):
                simulate(MIXTURE, case.cluster_config, asdict(framework), case.program)
    # Inside a replica and over several, with tensor parallelism and without, in one stage and in several.
    assert {(True, True, True), (True, True, False), (True, False, False)} <= {one[:3] for one in seen}
    assert {(True, False), (True, True)} <= {(one[0], one[3]) for one in seen}


@pytest.mark.wide
def test_both_agree_on_expert_parallelism_of_sharded_weights() -> None:
    rng = np.random.default_rng(2)
    sharded = [name for name, framework in FRAMEWORKS.items() if framework.distributed_optimizer]
    seen = Counter[str]()
    for number in range(300):
        framework = replace(FRAMEWORKS[sharded[number % len(sharded)]], sequence_parallel=True)
        case = random_case(rng, (), MIXTURE, sharded=True, experts=True)
        placed = case.program.layout.module("llm")
        if placed.ep == 1 or not placed.scatters:
            continue
        with suppress(DeadlockError):
            assert disagreement(case, framework) < AGREE, number
            seen[f"{placed.sharding} {placed.ep > placed.cp}"] += 1
    assert seen.keys() == {f"{kind} {spans}" for kind in ("zero2", "zero3", "zero3_kept") for spans in (False, True)}


MODEL, CLUSTER = ModelSpec.from_config(GENERATING), tiny_cluster(8, 8)
RANKS = 8


def plain_module(rng: np.random.Generator, module: ModuleSpec, sharded: bool) -> ModuleLayout:
    """Replicas of any degrees on eight ranks, consecutive in each stage; weights whole or sharded over one stage."""
    tp, cp = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))[rng.integers(5)]
    pp = 1 if sharded else int(rng.integers(1, 3))
    ranks = np.arange(RANKS).reshape(pp, -1, tp * cp).swapaxes(0, 1)
    return replace(
        placed(module, ranks, tp, cp, recompute=bool(rng.integers(2))), sharding="zero3" if sharded else "zero1"
    )


def as_groups(own: ModuleLayout, held_by_tp: bool) -> ModuleLayout:
    """The same replicas as groups of one width, on weights that are laid out with the replicas' CP or with none."""
    widths = ((own.tp, own.cp),)
    if not held_by_tp:
        return replace(own, widths=widths)
    return replace(own, cp=1, ranks=own.plane.reshape(own.pp, -1, own.tp).swapaxes(0, 1), widths=widths)


def random_shapes(rng: np.random.Generator) -> SampleShapes:
    rows = []
    for _ in range(int(rng.integers(2, 8))):
        kinds = rng.choice(["image", "audio"], int(rng.integers(0, 3))).tolist()
        rows.append((int(rng.integers(1, 2000)), [(kind, int(rng.integers(1, 3000)), 64) for kind in kinds]))
    return shapes_from_lists(["image", "audio"], rows)


def assert_same_bits(ours: object, theirs: object) -> None:
    """Compare arrays, by type, shape and bytes, in dataclasses and tuples; layouts may differ."""
    if isinstance(ours, np.ndarray):
        assert isinstance(theirs, np.ndarray)
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    elif isinstance(ours, tuple):
        assert isinstance(theirs, tuple)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_bits(one, other)
    elif hasattr(ours, "__dataclass_fields__") and not isinstance(ours, Layout):
        for name in ours.__dataclass_fields__:
            assert_same_bits(getattr(ours, name), getattr(theirs, name))


def executed(program: Program, truth: CostTruth) -> tuple[Timeline, dict[str, float]]:
    timeline = Simulator(truth, 1e18).execute(program)
    return timeline, measure(timeline, truth)


@pytest.mark.parametrize("held_by_tp", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_groups_of_one_width_are_replicas(sharded: bool, held_by_tp: bool) -> None:
    rng, names, stuck = np.random.default_rng(0), list(FRAMEWORKS), 0
    for number in range(20):
        modules = [plain_module(rng, module, sharded) for module in MODEL.modules]
        plain = Layout(tuple(modules), 4, single_rank_boundary=not rng.integers(8))
        grouped = replace(plain, modules=tuple(as_groups(own, held_by_tp) for own in modules))
        check_layout(grouped, MODEL, CLUSTER)
        shapes, seed = random_shapes(rng), int(rng.integers(2**31))
        programs = [random_program(np.random.default_rng(seed), own, MODEL, shapes) for own in (plain, grouped)]
        assert_same_bits(*programs)
        truth = CostTruth(MODEL, CLUSTER, FRAMEWORKS[names[number % len(names)]])
        try:
            expected, expected_metrics = executed(programs[0], truth)
        except DeadlockError:
            stuck += 1
            with pytest.raises(DeadlockError):
                executed(programs[1], truth)
            continue
        found, found_metrics = executed(programs[1], truth)
        assert_same_bits(expected, found)
        assert expected_metrics == found_metrics
    assert stuck < 5
