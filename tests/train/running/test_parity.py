"""Training on ranks equals training in one process: gradients, weights after three steps, losses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.config.tree import choices
from entrain_bench.program import Program
from entrain_bench.run.experiment import prepare
from entrain_bench.train.messages.rank_plan import block_of, lane_of_rank, places_of, plan_rank
from entrain_bench.train.running.runtime import build_runtime
from support.train.parity import FAULTS, RANKS, SPLIT, check, errors, reference_of
from support.train.runs import AUDIO, CPU, config_from_json, configuration, program_of
from support.train.widths import EVERY, HALVED, SLICED

# Strategy (empty if the layout names it), layout and change.
Case = tuple[str, str, str]
# Degrees that four ranks allow; strategies whose parts do not fit one of them say so.
DEGREES = {
    "free": (),
    "tp2": ("layout.tp=2",),
    "pp2_dp2": ("layout.tp=1", "layout.pp=2", "layout.dp=2"),
    "dp1": ("layout.tp=1", "layout.dp=1"),
    "cp2": ("layout.tp=1", "layout.cp=2"),
    "sharded_optimizer": ("layout.dp=2", "distributed_optimizer=true"),
}
# The framework's settings other than its defaults, and with the distributed optimizer.
SETTINGS = {
    "tp2_whole_tokens": (*DEGREES["tp2"], "sequence_parallel=false"),
    "tp2_encoder_whole_tokens": (*DEGREES["tp2"], "encoder_sp=false"),
    "nothing_overlaps": (*DEGREES["pp2_dp2"], "overlap_grad_reduce=false", "p2p=overlapped"),
    "gathered_late": (*DEGREES["sharded_optimizer"], "overlap_param_gather=false"),
    "sharded_pipeline": (*DEGREES["pp2_dp2"], "distributed_optimizer=true"),
}
# How context parallelism cuts.
STAGES = {
    "cp4": ("layout.tp=1", "layout.cp=4"),
    "cp2_pack": (*DEGREES["cp2"], "cp_split=pack"),
    "cp4_pack": ("layout.tp=1", "layout.cp=4", "cp_split=pack"),
    "tp2_cp2_pack": ("layout.tp=2", "layout.cp=2", "cp_split=pack"),
}
SAMPLES = {"single": ("layout.tp=1", "microbatch_size=1")}
SHARDED = {
    kind: (*SAMPLES["single"], f"layout.sharding={kind}", "distributed_optimizer=true")
    for kind in ("zero1", "zero2", "zero3", "zero3_kept")
}
# Two stages of every module on each rank; with one block a replica, both copies of the tied embedding, too.
VIRTUAL = {
    "virtual": ("strategy.planner._target_=support.train.parity.VirtualPlanner", *DEGREES["pp2_dp2"]),
    "interleaved": ("strategy.planner.virtual_stages=2", *DEGREES["pp2_dp2"]),
    "dep": ("strategy=dep", *DEGREES["pp2_dp2"]),
    "dep_interleaved": ("strategy=dep", "strategy.planner.virtual_stages=[2]", *DEGREES["pp2_dp2"]),
    "braid_interleaved": ("strategy.planner.virtual_stages=[2]", "strategy.planner.widths=false", *DEGREES["pp2_dp2"]),
    "virtual_closed": ("strategy.planner._target_=support.train.parity.VirtualPlanner", "layout.tp=1", "layout.dp=4"),
}
# Schedules of virtual stages and of split backwards.
PP4 = ("layout.tp=1", "layout.pp=4", "layout.dp=1")
V = ("strategy/planner=megatron_schedules", "strategy.planner.schedules=[zb_v]")
SCHEDULES = {
    "zb_h1_pp4": ("strategy/scheduler=zb_h1", *PP4),
    "zb_h1_pp2_dp2": ("strategy/scheduler=zb_h1", *DEGREES["pp2_dp2"]),
    "zb_h1_pp2_tp2": ("strategy/scheduler=zb_h1", "layout.tp=2", "layout.pp=2", "layout.dp=1"),
    "zb_h1_recomputed": ("strategy/scheduler=zb_h1", *PP4, "layout.recompute=[vision,llm]"),
    "zb_v_pp4": ("strategy/scheduler=zb_v", *V, *PP4),
    "zb_v_pp2_dp2": ("strategy/scheduler=zb_v", *V, *DEGREES["pp2_dp2"]),
    "zb_v_pp2_tp2": ("strategy/scheduler=zb_v", *V, "layout.tp=2", "layout.pp=2", "layout.dp=1"),
    "zb_v_recomputed": ("strategy/scheduler=zb_v", *V, *PP4, "layout.recompute=[vision,llm]"),
    "interleaved_pp4": ("strategy.planner.virtual_stages=2", *PP4),
}
# Groups of several widths: under planners of the tests' own, and of strategies.
WIDTHS = {
    "every": EVERY,
    "sliced": SLICED,
    "sliced_whole_tokens": (*SLICED, "sequence_parallel=false"),
    "sliced_recomputed": (*SLICED, "layout.recompute=[vision,llm]"),
    "sliced_sharded_optimizer": (*SLICED, "distributed_optimizer=true"),
    "sliced_pack": (*SLICED, "cp_split=pack"),
    "halved": HALVED,
    "halved_whole_tokens": (*HALVED, "sequence_parallel=false"),
    "hybrid_cp": ("strategy=hybrid_cp",),
    "hybrid_cp_tp2": ("strategy=hybrid_cp", "layout.tp=2"),
    "hybrid_cp_pp2": ("strategy=hybrid_cp", "layout.pp=2"),
    "lpt_widths": ("strategy=lpt_widths",),
    "lpt_widths_pp2": ("strategy=lpt_widths", "layout.pp=2"),
    "bytescale": ("strategy=bytescale",),
    "bytescale_pp2": ("strategy=bytescale", "layout.pp=2"),
    "flexsp": ("strategy=flexsp",),
    "flexsp_recomputed": ("strategy=flexsp", "layout.recompute=[vision,llm]"),
}
# Experts on every rank, and divided: in pipelines, under TP and CP, recomputed, with cut optimizer states.
EP_PP = ("layout.tp=1", "layout.pp=2", "layout.dp=2", "layout.ep=2")
EP_DP = ("layout.tp=1", "layout.dp=4", "microbatch_size=1")
UNEVEN = "strategy.assigner._target_=support.train.parity.UnevenAssigner"
EXPERTS = {
    "ep1": (*SAMPLES["single"], "layout.ep=1"),
    "ep1_pp2": (*DEGREES["pp2_dp2"], "layout.ep=1"),
    "ep2": (*EP_DP, "layout.ep=2"),
    "ep4": (*EP_DP, "layout.ep=4"),
    "ep2_sharded_optimizer": (*EP_DP, "layout.ep=2", "distributed_optimizer=true"),
    "ep4_recomputed": (*EP_DP, "layout.ep=4", "layout.recompute=[vision,llm]"),
    "ep2_kept": (*EP_DP, "layout.ep=2", "layout.sharding=zero3_kept"),
    "ep2_gradients": (*EP_DP, "layout.ep=2", "layout.sharding=zero2", "distributed_optimizer=true"),
    "ep2_pp2": EP_PP,
    "ep2_pp2_sharded_optimizer": (*EP_PP, "distributed_optimizer=true"),
    "ep2_tp2": ("layout.tp=2", "layout.dp=2", "layout.ep=2"),
    "ep4_uneven": (*EP_DP, "layout.ep=4", UNEVEN),
    "ep2_pp2_uneven": (*EP_PP, "microbatch_size=1", "distributed_optimizer=true", UNEVEN),
    "ep4_cp2": ("layout.tp=1", "layout.cp=2", "layout.dp=2", "layout.ep=4"),
}
FEW_WIDTHS: list[Case] = [("", name, "") for name in ("sliced", "hybrid_cp_pp2", "flexsp")]
LAYOUTS = EXPERTS | DEGREES | VIRTUAL | SETTINGS | STAGES | SAMPLES | SHARDED | SCHEDULES | WIDTHS
TINY = ("model=tiny",)
MIXTURE = ("model=tiny_moe", "model.modules.vision.num_layers=2", "model.modules.vision.full_attention_layers=[1]")
MODELS = {"one_encoder": TINY, "two_encoders": ("model=tiny_av", AUDIO)}
QUICK: list[Case] = [
    ("entrain", "pp2_dp2", SPLIT),
    ("megatron", "zb_v_recomputed", ""),
    ("hetero_colocated", "sharded_optimizer", ""),
    ("fsdp", "single", ""),
    ("megatron", "cp4_pack", ""),
]
WITH_EXPERTS: list[Case] = [
    ("megatron", "ep1_pp2", ""),
    ("megatron", "ep2_pp2", ""),
    ("megatron", "ep2_pp2_sharded_optimizer", SPLIT),
    ("entrain", "ep1_pp2", ""),
    ("entrain", "ep2_pp2", SPLIT),
    ("hetero_colocated", "ep2_tp2", ""),
    ("hetero_colocated", "ep4_cp2", ""),
    ("hetero_colocated", "ep2_sharded_optimizer", ""),
    ("fsdp", "ep1", ""),
    ("fsdp", "ep2", ""),
    ("fsdp", "ep4", ""),
    ("fsdp", "ep2_kept", ""),
    ("fsdp", "ep4_recomputed", ""),
    ("lpt", "ep2_gradients", ""),
    ("braid", "ep1", ""),
    ("braid", "ep2", ""),
    ("braid", "ep4", ""),
    ("lpt", "ep4_recomputed", ""),
    ("lpt", "ep4_uneven", ""),
    ("lpt", "ep2_pp2_uneven", ""),
]
# With make test-wide; the rest is for make test-slow.
USUAL: dict[str, list[Case]] = {
    "one_encoder": [
        ("entrain", "tp2_whole_tokens", ""),
        ("entrain", "nothing_overlaps", ""),
        ("megatron", "tp2_encoder_whole_tokens", ""),
        ("megatron", "sharded_pipeline", ""),
        ("megatron", "interleaved", ""),
        ("dip", "virtual_closed", ""),
        ("braid", "braid_interleaved", ""),
        ("", "dep", ""),
        ("", "dep_interleaved", ""),
        ("lpt", "single", ""),
        ("lpt", "pp2_dp2", ""),
        *(("", name, "") for name in WIDTHS),
        ("", "sliced", SPLIT),
        ("", "halved_whole_tokens", SPLIT),
    ],
    # With a sample a microbatch some replicas have nothing to encode.
    "two_encoders": [
        ("entrain", "pp2_dp2", ""),
        ("dflop", "free", ""),
        ("veomni", "single", ""),
        ("", "dep", ""),
        ("megatron", "cp4", ""),
        ("megatron", "tp2_cp2_pack", ""),
        *FEW_WIDTHS,
    ],
}
FAULTY: list[Case] = [
    ("entrain", "pp2_dp2", "reversed_rows"),
    ("entrain", "pp2_dp2", "doubled_scale"),
    ("entrain", "pp2_dp2", "dropped_sample"),
    ("megatron", "zb_h1_pp4", "skipped_weights"),
    ("megatron", "zb_h1_pp4", "repeated_weights"),
    ("megatron", "zb_h1_pp4", "other_inputs"),
    # Ranks that hold all tokens each have the whole gradient of a norm.
    ("", "sliced_whole_tokens", "counted_twice"),
    ("", "halved", "other_slices"),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference_of(configuration(*MODELS[model]), tmp_path_factory.mktemp("parity"))


def configured(cases: list[Case], model: tuple[str, ...]) -> list[tuple[str, str]]:
    return [
        (configuration(*model, *([f"strategy={name}"] if name else []), *LAYOUTS[layout]), change)
        for name, layout, change in cases
    ]


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["one_encoder"], indirect=True)
@pytest.mark.parametrize("cases", [[("", "halved", "")], QUICK], ids=len)
def test_some_strategies_train_like_one_process(cases: list[Case], model: str, reference: Path) -> None:
    assert check(configured(cases, MODELS[model]), reference) == len(cases)


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_strategies_train_like_one_process(model: str, reference: Path) -> None:
    assert check(configured(USUAL[model], MODELS[model]), reference) == len(USUAL[model])


@pytest.mark.wide
@pytest.mark.timeout(300)
def test_every_kind_of_sharding_trains_like_one_process(model: str, reference: Path) -> None:
    cases = [("fsdp", kind, "") for kind in SHARDED] + [("lpt", "zero2", ""), ("megatron", "zero3", "")]
    assert check(configured(cases, MODELS[model]), reference) == len(cases)


@pytest.mark.wide
@pytest.mark.parametrize(("case", "ep"), [("ep4_uneven", 4), ("ep2_pp2_uneven", 2)])
def test_ranks_without_a_sample_take_part_in_passes_of_their_experts(case: str, ep: int) -> None:
    program = program_under(*MIXTURE, "strategy=lpt", *EXPERTS[case])
    assert program.layout.modules[-1].ep == ep
    steps = [[step.is_empty for step in plan_rank(program, rank).steps] for rank in range(RANKS)]
    # 8 samples: of 5 or 7 microbatches all replicas but one have the first alone.
    missed = 2 * (8 - program.layout.modules[-1].dp)
    assert sorted(map(sum, steps)) == sorted([missed, missed, missed, 0] if ep == 4 else [missed, missed, 0, 0])


@pytest.mark.wide
@pytest.mark.timeout(600)
def test_experts_train_like_one_process(tmp_path: Path) -> None:
    reference = reference_of(configuration(*MIXTURE), tmp_path)
    assert check(configured(WITH_EXPERTS, MIXTURE), reference) == len(WITH_EXPERTS)


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["one_encoder"], indirect=True)
def test_planted_faults_are_caught(model: str, reference: Path) -> None:
    assert [change for *_, change in FAULTY] == [*FAULTS]
    for case, found in zip(FAULTY, errors(configured(FAULTY, MODELS[model]), reference), strict=True):
        assert isinstance(found, dict)
        assert found["gradient"] > 1, case


@pytest.mark.wide
@pytest.mark.parametrize("frozen", ["vision", pytest.param("llm", marks=pytest.mark.slow)])
def test_what_does_not_learn_stays_as_it_is(frozen: str, tmp_path: Path) -> None:
    model = (*MODELS["one_encoder"], f"freeze=[{frozen}]")
    path = reference_of(configuration(*model), tmp_path)
    with np.load(path) as arrays:
        learnt = {
            tuple(name.removeprefix("gradient ").split(".")[:2]) for name in arrays if name.startswith("gradient")
        }
    spec = prepare(config_from_json(configuration(*model))).job.model
    learning = [(m.name, str(i)) for m in spec.modules for i, layer in enumerate(m.layers) if layer.learns]
    assert learnt == {*learning}
    # Some stages have nothing that learns.
    cases = [
        ("entrain", "pp2_dp2", ""),
        ("megatron", "tp2", ""),
        ("dip", "virtual", ""),
        ("megatron", "sharded_pipeline", ""),
        ("megatron", "zb_v_pp4", ""),
        *FEW_WIDTHS,
    ]
    assert check(configured(cases, model), path) == len(cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_schedule_cut_and_head_trains_like_one_process(model: str, reference: Path) -> None:
    cases = [("megatron", name, "") for name in SCHEDULES]
    cases += [("dip", name, change) for name in ("virtual", "virtual_closed") for change in ("", SPLIT)]
    cases += [("megatron", name, change) for name in ("cp2", *STAGES) for change in ("", SPLIT)]
    assert check(configured(cases, MODELS[model]), reference) == len(cases)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", choices("strategy"))
def test_every_strategy_and_degree_trains_like_one_process(strategy: str, model: str, reference: Path) -> None:
    cases = [(strategy, degrees, change) for degrees in DEGREES | SETTINGS for change in ("", SPLIT)]
    # Backwards of sharded weights are not split.
    assert check(configured(cases, MODELS[model]), reference) >= 3


def program_under(*overrides: str) -> Program:
    return program_of(prepare(config_from_json(configuration(*overrides))))


# A few samples are far longer than the others, and attention is so slow that they decide the iteration.
SKEWED = (
    *TINY,
    "global_batch=12",
    "seed=1",
    "~workload.text",
    "+workload.text={kind: mixture, weights: [0.85, 0.15], components: [10, 600]}",
    "speed.attention=1e-5",
)
BRAID = ("strategy=braid", "layout.tp=1")


@pytest.mark.wide
@pytest.mark.timeout(300)
def test_braid_trains_long_samples_in_wide_groups_and_short_ones_in_narrow_groups(tmp_path: Path) -> None:
    program = program_under(*SKEWED, *BRAID)
    placed, chunks = program.layout.modules[-1], program.chunks[-1]
    widths = np.prod(placed.widths, axis=1)[placed.degree_of_copy[chunks.replica]]
    longest = np.array([program.shapes.llm_tokens[chunks.units(chunk)].max() for chunk in range(len(chunks))])
    # Which of the wider groups is the choice of the deal.
    assert widths[longest > 600].min() > 1
    assert {*widths[longest < 600].tolist()} == {1}
    assert check([(configuration(*SKEWED, *BRAID), "")], reference_of(configuration(*SKEWED), tmp_path)) == 1


def degrees_of(*case: str) -> list[set[tuple[int, int]]]:
    """TP and CP of the groups that have chunks, by module."""
    program = program_under(*TINY, *case)
    return [
        {placed.degrees[degree] for degree in placed.degree_of_copy[chunks.replica].tolist()}
        for placed, chunks in zip(program.layout.modules, program.chunks, strict=True)
    ]


@pytest.mark.wide
def test_cases_have_groups_of_several_widths_and_samples_of_text_alone() -> None:
    for degrees in degrees_of(*SLICED):
        assert {tp * cp for tp, cp in degrees} == {1, 2, 4}
        assert {tp for tp, _ in degrees} == {1, 2}
    assert degrees_of(*HALVED)[-1] == {(2, 1), (4, 1), (2, 2)}
    assert [len(degrees_of(*WIDTHS[name])[-1]) for name in ("hybrid_cp_pp2", "flexsp")] == [2, 2]
    assert np.any(np.diff(program_under(*TINY, *SLICED).shapes.item_offsets) == 0)


def test_ranks_are_in_one_group_of_each_width_and_blocks_are_consecutive() -> None:
    layout = program_under(*TINY, *SLICED).layout
    for rank in range(RANKS):
        mine = [place for place in places_of(layout, rank) if place.module == 1]
        degrees = layout.modules[1].degree_of_copy[[place.replica for place in mine]]
        assert degrees.tolist() == [0, 1, 2, 3, 4]
        blocks = [block_of(layout, 1, place.replica, 0) for place in mine]
        assert blocks == [[rank], *2 * [[rank & ~1, rank | 1]], *2 * [[0, 1, 2, 3]]]
        assert [block[place.position] for block, place in zip(blocks, mine, strict=True)] == [rank] * 5
        assert lane_of_rank(layout, rank) == rank


@pytest.mark.parametrize(
    "changes",
    [{"tp": 2, "ranks": np.arange(4).reshape(2, 1, 2), "widths": ((2, 1), (4, 1))}, {"sharding": "zero3"}],
    ids=["split_encoder", "sharded"],
)
def test_slices_that_are_not_trained_are_refused_in_one_line(changes: dict[str, Any]) -> None:
    setting = prepare(config_from_json(configuration(*TINY, *SLICED)))
    layout = setting.strategy.plan(setting.profile)
    modules = tuple(replace(placed, **changes) for placed in layout.modules)
    with pytest.raises(IncompatibleError, match=r"^layout.vision.widths: harness=train slices no sharded weights"):
        build_runtime(replace(layout, modules=modules), setting.executor, CPU, 0, None)
