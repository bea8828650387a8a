"""Two simulators that share no formula agree on every strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import DeadlockError
from entrain_bench.costs import loads, roofline, sharding, steps, truth
from entrain_bench.costs.transfers import Transfers
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import shapes_from_lists
from entrain_bench.specs.variants import with_options
from support.builders import TOKENS, encoder_config, llm_config, tiny_cluster
from support.independent import simulate
from support.programs import random_layout, random_program
from support.wide import each_strategy

STRATEGIES = sorted(path.stem for path in (Path(__file__).parents[2] / "experiments" / "strategy").glob("*.yaml"))
SMALL = ("model=tiny_av", "workload=synthetic_av", "cluster=a40x16", "global_batch=32", "microbatch_size=2")
SMALL += ("layout.tp=2", "layout.dp=2")
# What two orders of adding up may differ by, relative to the iteration.
AGREE = 1e-9
FRAMEWORKS = {
    "default": FrameworkOptions(),
    "overlapped transfers": FrameworkOptions(p2p="overlapped"),
    "weights gathered late": FrameworkOptions(align_param_gather=False),
    "nothing overlaps": FrameworkOptions(overlap_grad_reduce=False, overlap_param_gather=False),
    "all-reduce": FrameworkOptions(distributed_optimizer=False, p2p="overlapped"),
    "gradients after all": FrameworkOptions(overlap_grad_reduce=False, distributed_optimizer=False),
    "whole hidden states": FrameworkOptions(sequence_parallel=False),
    "whole hidden states in turn": FrameworkOptions(sequence_parallel=False, p2p="overlapped", tp_overlap=0.3),
    "products split": FrameworkOptions(tp_overlap=0.7),
    "encoders whole": FrameworkOptions(encoder_sp=False, encoder_cp=False),
    "gradients in bf16": FrameworkOptions(grad_dtype="bf16", overlap_grad_reduce=False),
    "labelled head": FrameworkOptions(head_tokens="labelled"),
    "labelled head on whole hidden states": FrameworkOptions(
        head_tokens="labelled", cross_entropy="eager", norm_kernel="unfused", sequence_parallel=False, tp_overlap=0.5
    ),
    "fused loss": FrameworkOptions(cross_entropy="fused", grad_dtype="bf16"),
    "eager loss": FrameworkOptions(cross_entropy="eager"),
    "older kernels": FrameworkOptions(attention_kernel="flash1", norm_kernel="unfused", p2p="overlapped"),
    "unfused kernels": FrameworkOptions(
        attention_kernel="unfused", norm_kernel="unfused", gate_kernel="unfused", tp_overlap=0.5
    ),
    "unfused optimizer": FrameworkOptions(optimizer_kernel="unfused", grad_dtype="bf16"),
    "two instances": FrameworkOptions(encoder_optimizers=2, encoder_cp=False, p2p="overlapped"),
}


@dataclass(frozen=True)
class Case:
    """A program, its cluster, and the YAML that both come from."""

    program: Program
    cluster: ClusterSpec
    model_config: Mapping[str, Any]
    cluster_config: Mapping[str, Any]


@cache
def decided(strategy: str, *overrides: str) -> Case:
    """A strategy's program; planned once, for any program may be executed under any settings."""
    (cell,) = compose_cells([*overrides, f"strategy={strategy}"])
    setting = prepare(cell.config)
    layout = setting.strategy.plan(setting.profile)
    shapes = setting.source.batch(0, cell.config.global_batch, 0)
    program = setting.strategy.program(shapes, layout, setting.profile)
    return Case(program, setting.job.cluster, cell.config.model, cell.config.cluster)


def disagreement(case: Case, framework: FrameworkOptions, program: Program | None = None) -> float:
    """Largest difference between any times of the two simulators, relative to the iteration.

    Args:
        case: what both execute.
        framework: under which settings.
        program: what the first executes instead.
    """
    model = with_options(case.program.model, replace(framework, freeze=()))
    truth_of_case = CostTruth(model, case.cluster, framework)
    program = replace(program or case.program, model=model)
    timeline = Simulator(truth_of_case, 1e18).execute(program)
    theirs = simulate(case.model_config, case.cluster_config, asdict(framework), case.program)
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


@pytest.mark.wide
@pytest.mark.parametrize("strategy", each_strategy())
def test_both_agree_on_small_programs_under_all_settings(strategy: str) -> None:
    if strategy == "flexsp":
        pytest.skip("the independent simulator knows sharded weights only where a pass has one lane")
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


CONFIGS = {"vision": encoder_config(window_tokens=64, full_attention_layers=[1]), "audio": encoder_config(2, "audio")}
CONFIGS |= {"llm": llm_config(2, tied_embeddings=True), "out": encoder_config(role="generator", item_tokens=64)}
GENERATING = {"name": "handmade", "modules": CONFIGS, "tokens": TOKENS}


# What does not learn in each of a row of random programs.
FROZEN: list[tuple[str, ...]] = [(), (), ("vision",), ("llm",), ("vision", "audio", "llm"), ("audio", "out"), ()]


def random_case(rng: np.random.Generator, frozen: tuple[str, ...]) -> Case:
    """Any degrees and placement; virtual stages, offload, shards, split backwards and a single rank between modules."""
    model, cluster = ModelSpec.from_config(GENERATING).with_frozen(frozen), tiny_cluster(8, 8)
    # Sizes at which all efficiencies fall.
    sizes = {"gemm_half_flops": 1e6, "attention_half_tokens": 500.0, "attention_half_head_dim": 40.0}
    sizes |= {"gemm_half_width": 50.0, "overlap_cost": rng.choice([0.0, 0.2, 1.0]), "host_launch_s": 2e-6}
    cluster = replace(cluster, device=replace(cluster.device, sustained_fraction=0.8, **sizes))
    tiers = [
        replace(tier, collective_efficiency=share, collective_start_s=3e-6)
        for tier, share in zip(cluster.tiers, (0.7, 0.9, 0.5), strict=True)
    ]
    cluster = replace(cluster, tiers=tuple(tiers))
    rows = []
    for _ in range(int(rng.integers(1, 8))):
        kinds = rng.choice(["image", "audio"], int(rng.integers(0, 3))).tolist()
        items = [(kind, int(rng.integers(1, 3000)), int(rng.integers(1, 300))) for kind in kinds]
        rows.append((int(rng.integers(1, 2000)), items))
    program = random_program(rng, random_layout(rng, model), model, shapes_from_lists(["image", "audio"], rows))
    return Case(program, cluster, GENERATING, asdict(cluster))


def test_both_agree_on_random_programs() -> None:
    rng, names = np.random.default_rng(0), list(FRAMEWORKS)
    stuck = 0
    for number in range(90):
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
    assert stuck < 25


# Planted faults


def backward_attention_takes_longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roofline, "ATTENTION_BACKWARD", 2.6)


def tiles_are_larger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loads, "KEY_TILE", 128)


def nobody_is_held(patch: pytest.MonkeyPatch) -> None:
    held = truth.held_s
    patch.setattr(truth, "held_s", lambda *given: 0 * held(*given))


def gradients_wait_for_the_end_of_a_backward(patch: pytest.MonkeyPatch) -> None:
    def lag_s(layer_s: FloatArray, *buckets: FloatArray) -> FloatArray:
        return np.full(len(layer_s), buckets[-1].sum())

    patch.setattr(steps, "sync_lag_s", lag_s)


def weights_are_there_from_the_start(patch: pytest.MonkeyPatch) -> None:
    lead_s = steps.gather_lead_s
    patch.setattr(steps, "gather_lead_s", lambda *given: 0 * lead_s(*given))


def all_tiers_are_one_link(patch: pytest.MonkeyPatch) -> None:
    queue = truth.transfers_between_blocks

    def same_links(layout: Layout, source: IntArray, target: IntArray, tier: IntArray, link_s: FloatArray) -> Transfers:
        return queue(layout, source, target, 0 * tier, link_s)

    patch.setattr(truth, "transfers_between_blocks", same_links)


def the_tied_embedding_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    tied_s = steps.StepCosts.tied_s
    patch.setattr(steps.StepCosts, "tied_s", lambda *given: 0 * tied_s(*given))


def rings_leave_nodes_over_one_link(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClusterSpec, "ring_tiers", lambda self, rings: [self.group_tier(ring) for ring in rings])


def every_stage_is_split_into_buckets(patch: pytest.MonkeyPatch) -> None:
    split = steps.bucket_parameters
    patch.setattr(steps, "bucket_parameters", lambda parameters, copies, _: split(parameters, copies, True))


def products_hide_nothing(patch: pytest.MonkeyPatch) -> None:
    exposed_s = roofline.Roofline._exposed_s
    patch.setattr(roofline.Roofline, "_exposed_s", lambda self, comm, _, *given: exposed_s(self, comm, 0, *given))


def what_hides_under_products_hides_without_them(patch: pytest.MonkeyPatch) -> None:
    inside_s = roofline.Roofline._tensor_parallel_s
    patch.setattr(roofline.Roofline, "_tensor_parallel_s", lambda self, *given: inside_s(self, *given[:-1], False))


def gradients_are_reduced_before_weight_passes(patch: pytest.MonkeyPatch) -> None:
    def last_backwards(program: Program, index: int) -> list[IntArray]:
        return steps._extreme(program, index, Pass.BACKWARD, slice(None))

    patch.setattr(steps, "last_of_stages", last_backwards)


def sharded_gradients_travel_in_bf16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrameworkOptions, "gradient_bytes", lambda *_: 2)


def weights_stay_from_forward_to_backward(patch: pytest.MonkeyPatch) -> None:
    traffic = sharding.layer_traffic

    def gathered_once(*given: Any) -> sharding.LayerTraffic:
        own = traffic(*given)
        return replace(own, again_s=0 * own.again_s)

    patch.setattr(sharding, "layer_traffic", gathered_once)


def no_pass_gathers_for_the_next(patch: pytest.MonkeyPatch) -> None:
    neighbours = sharding._neighbours
    patch.setattr(sharding, "_neighbours", lambda *given: tuple(np.full_like(each, -1) for each in neighbours(*given)))


def replicas_do_not_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(truth, "collective_passes", lambda program: np.full(program.num_actions, -1))


def buckets_slow_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps.StepCosts, "_slowed_s", lambda _, exposed_s, __: exposed_s)


def transfers_slow_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(truth, "held_s", lambda program, *_: np.zeros(program.num_actions))


def the_host_never_lags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roofline.Roofline, "_issued_s", lambda _, __, *passes: passes[:2])


@pytest.mark.wide
@pytest.mark.parametrize("plant", [buckets_slow_nothing, transfers_slow_nothing, the_host_never_lags])
def test_a_fault_in_slowdowns_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    # Stages of several buckets.
    case, framework = decided("megatron"), FrameworkOptions(p2p="overlapped")
    device = replace(case.cluster.device, overlap_cost=0.4, host_launch_s=1e-3)
    case = replace(case, cluster=replace(case.cluster, device=device))
    case = replace(case, cluster_config={**case.cluster_config, "device": asdict(device)})
    assert disagreement(case, framework) < AGREE
    plant(monkeypatch)
    assert disagreement(case, framework) > 1e3 * AGREE


ZB_H1 = (*SMALL, "strategy.planner.schedules=[zb_h1]")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("plant", "name", "strategy", "overrides"),
    [
        (backward_attention_takes_longer, "default", "megatron", SMALL),
        (tiles_are_larger, "default", "dip", SMALL),
        (nobody_is_held, "default", "entrain", SMALL),
        (weights_are_there_from_the_start, "default", "hetero_colocated", SMALL),
        (all_tiers_are_one_link, "overlapped transfers", "dflop", ()),
        (the_tied_embedding_is_forgotten, "nothing overlaps", "hetero_colocated", SMALL),
        (rings_leave_nodes_over_one_link, "nothing overlaps", "dflop", SMALL),
        (every_stage_is_split_into_buckets, "default", "disttrain", ()),
        (products_hide_nothing, "whole hidden states", "megatron", SMALL),
        # Stages of several buckets.
        (gradients_wait_for_the_end_of_a_backward, "default", "megatron", ()),
        (what_hides_under_products_hides_without_them, "whole hidden states", "megatron_schedules", ZB_H1),
        (gradients_are_reduced_before_weight_passes, "default", "megatron_schedules", ZB_H1),
        (sharded_gradients_travel_in_bf16, "default", "fsdp", SMALL),
        (weights_stay_from_forward_to_backward, "default", "fsdp", SMALL),
        (no_pass_gathers_for_the_next, "default", "fsdp", SMALL),
        (replicas_do_not_wait_for_each_other, "default", "orchmllm", SMALL),
    ],
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    strategy: str,
    overrides: tuple[str, ...],
) -> None:
    case, framework = decided(strategy, *overrides), FRAMEWORKS[name]
    assert disagreement(case, framework) < AGREE
    plant(monkeypatch)
    assert disagreement(case, framework) > 1e3 * AGREE


@pytest.mark.parametrize("fault", ["a dependency is lost", "a dependency carries too little"])
def test_a_fault_in_what_programs_derive_is_noticed(fault: str) -> None:
    case = decided("megatron", *SMALL)
    program = case.program
    # The first forward that waits for another; many others have time to spare.
    edge = int(np.flatnonzero(program.dep_bytes > 0)[0])
    if fault == "a dependency is lost":
        action = int(np.searchsorted(program.dep_offsets, edge, side="right")) - 1
        offsets = program.dep_offsets - (np.arange(len(program.dep_offsets)) > action)
        without = {name: np.delete(getattr(program, name), edge) for name in ("dep_actions", "dep_bytes")}
        wrong = replace(program, dep_offsets=offsets, **without)
    else:
        wrong = replace(program, dep_bytes=np.where(np.arange(len(program.dep_bytes)) == edge, 1, program.dep_bytes))
    assert disagreement(case, FrameworkOptions(), wrong) > 1e3 * AGREE
