"""What every strategy must do on every workload, whatever it is."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.conformance.checks import require_blind, require_repeatable, require_valid, require_walls
from entrain_bench.conformance.suite import PARTS
from entrain_bench.records.records import METRICS
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare, run_experiment
from support.wide import FEW, each_strategy, wide_unless

NEEDS_AUDIO = ("librispeech", "synthetic_av")
# Without those that need a file of the user's.
WORKLOADS = [name for name in choices("workload") if name not in ("trace", "twin")]
MODELS = ("tiny", "tiny_av")
# Without make test-slow: tiny_av takes samples with and without audio, tiny a trace and what it must refuse.
# Workloads that resemble another one, and all other pairs, with make test-slow.
OTHERS = ("dflop_single", "dflop_video", "dflop_mixed", "chartqa_qa", "coco", "llava_150k_like", "sroie", "uniform")
WITHOUT_AUDIO = ("chartqa", "librispeech")
NEWER = ("chartqa", "synthetic_av", "nextqa")
# Again with wrong beliefs and over several nodes, with tiny_av: images and audio.
THOROUGH = ("synthetic_av",)
BLIND = ("synthetic_av",)
DEFAULT_CLUSTER = "a40x64"
BASELINE = "megatron"
# Models that need not fit every cluster, each with one that it fits.
LARGE = {
    "llavaov_qwen25_7b": "a100x64",
    "llavaov_llama3_8b": "a100x64",
    "llavaov_qwen25_32b": "a100x64",
    "internvl15_26b": "a100x64",
    "vit1b_llm7b": "h100x64",
    "vit1b_llm14b": "h100x64",
    "vit3b_llm32b": "h100x64",
    "vit1b_llm70b": "h100x256",
    "vit3b_llm120b": "h100x256",
    "vit6b_llm120b": "h100x256",
    "vit7b_llm120b": "h100x256",
    "vit12b_llm120b": "h100x256",
    "vlm_s": "h800x16",
    "vlm_m": "h800x32",
    "vlm_l": "h800x64",
    "mllm_9b": "a100x64",
    "mllm_15b": "a100x1280",
    "mllm_72b": "a100x1280",
    "llama3_8b": "a100x64",
    "llama1_13b_128k": "a100x64",
    "llama1_30b_128k": "a100x64",
    "llama1_65b_128k": "a100x64",
    "nemotron4_15b": "h100x64",
    "llama31_70b": "h100x64",
    "gpt3_175b": "h100x256",
    "nemotron4_340b": "h100x256",
    "llama31_405b": "h100x256",
}
# Whose encoder has 25 heads.
WITHOUT_TP = ("internvl15_26b",)
# Without encoders.
TEXT_MODELS = ("llama", "nemotron4", "gpt3")
# Larger than others on the same cluster.
SLOW_MODELS = (
    "mllm_15b",
    "mllm_72b",
    "vit3b_llm120b",
    "vit7b_llm120b",
    "vit12b_llm120b",
    "nemotron4_340b",
    "llama31_405b",
)


@cache
def composed(*overrides: str) -> RunConfig:
    small = ["global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2", "iterations=1"]
    return compose_cells([*small, *overrides])[0].config


def config(**chosen: str) -> RunConfig:
    """The run with the given choice of each group, each composed once: composing takes longer than a tiny run."""
    groups = {group: getattr(composed(f"{group}={name}"), group) for group, name in chosen.items()}
    return replace(composed(), **groups)


def cells(usual: Callable[[str, str, str], bool]) -> list[object]:
    """Every strategy, workload and model; of the usual ones few are quick, the unusual ones are for make test-slow."""
    return [
        pytest.param(
            *cell, marks=wide_unless(cell[0] in FEW) if usual(*cell) else [pytest.mark.slow], id="-".join(cell)
        )
        for cell in product(choices("strategy"), WORKLOADS, MODELS)
    ]


def usual(strategy: str, workload: str, model: str) -> bool:
    """Whether a workload is run with a model in every run of the tests; few with strategies that few figures show."""
    if composed(f"strategy={strategy}").strategy.get("in_figures", "all") != "all" and workload not in NEWER:
        return False
    return workload in WITHOUT_AUDIO if model == "tiny" else workload not in OTHERS


@pytest.mark.wide
@pytest.mark.parametrize(("strategy", "workload", "model"), cells(usual))
def test_valid_within_memory_and_above_the_bound(strategy: str, workload: str, model: str) -> None:
    try:
        outcome = require_valid(config(strategy=strategy, workload=workload, model=model, cluster="tiny"))
    except IncompatibleError:
        assert workload in NEEDS_AUDIO
        assert model == "tiny"
        return
    assert set(outcome.metrics) == set(METRICS)
    assert outcome.metrics["planning_time_s"] > 0
    assert outcome.metrics["assignment_time_s"] > 0


@pytest.mark.wide
@pytest.mark.parametrize("strategy", choices("strategy"))
def test_it_imports_only_what_is_open_to_strategies(strategy: str) -> None:
    require_walls(config(strategy=strategy))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "workload", "model"), cells(lambda _, workload, model: workload in THOROUGH and model == "tiny_av")
)
def test_repeatable_on_several_nodes_and_with_wrong_beliefs(strategy: str, workload: str, model: str) -> None:
    run = config(strategy=strategy, workload=workload, model=model, cluster="a40x16")
    try:
        require_repeatable(run)
    except IncompatibleError:
        assert workload in NEEDS_AUDIO
        assert model == "tiny"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "workload", "model"), cells(lambda _, workload, model: workload in BLIND and model == "tiny_av")
)
def test_it_does_not_see_the_truth_behind_its_estimates(strategy: str, workload: str, model: str) -> None:
    try:
        require_blind(config(strategy=strategy, workload=workload, model=model, cluster="a40x16"))
    except IncompatibleError:
        assert workload in NEEDS_AUDIO
        assert model == "tiny"


@pytest.mark.wide
@pytest.mark.parametrize("strategy", each_strategy())
def test_a_generator_is_run_or_refused(strategy: str) -> None:
    run = config(strategy=strategy, workload="chartqa", model="tiny", cluster="a40x16")
    modules = run.model["modules"]
    generator = {**modules["vision"], "role": "generator", "item_tokens": 256, "window_tokens": 0}
    model = {**run.model, "name": "generating", "modules": {**modules, "image_out": generator}}
    run = replace(run, model=model)
    parts = prepare(run).strategy
    if not all(getattr(getattr(parts, part), "handles_generators", False) for part in PARTS):
        with pytest.raises(IncompatibleError, match=r"has a generator \(image_out\), which strategy\."):
            require_valid(run)
        return
    require_valid(run)
    require_blind(run)


def mixes() -> list[object]:
    """Every planner with every assigner and scheduler; quick: those of one system, or one beside the baseline's."""
    found: dict[tuple[str, ...], object] = {}
    # Systems may share a part: what has been mixed from fewer systems is not mixed again.
    for names in sorted(product(*(choices(f"strategy/{part}") for part in PARTS)), key=lambda names: len(set(names))):
        parts = tuple(
            (config_tree() / "strategy" / part / f"{name}.yaml").read_text()
            for part, name in zip(PARTS, names, strict=True)
        )
        if any("???" in part for part in parts):  # needs a file of the user's
            continue
        usual = len(set(names)) == 1 or names.count(BASELINE) == 2
        marks = wide_unless({*names} <= {*FEW}) if usual else [pytest.mark.slow]
        found.setdefault(parts, pytest.param(*names, marks=marks, id="-".join(names)))
    return list(found.values())


@pytest.mark.wide
@pytest.mark.parametrize(PARTS, mixes())
def test_parts_can_be_mixed(planner: str, assigner: str, scheduler: str) -> None:
    chosen = {"planner": planner, "assigner": assigner, "scheduler": scheduler}
    parts: Mapping[str, Any] = {
        part: composed(f"strategy/{part}={name}").strategy[part] for part, name in chosen.items()
    }
    run = config(model="tiny", cluster="a40x16")
    try:
        require_valid(replace(run, strategy={"name": "mixed", **parts}))
    except IncompatibleError:
        assert len({planner, assigner, scheduler}) > 1, "the parts of one system fit together"


def held() -> list[object]:
    """Every model on the cluster it is meant for, the tiny model on all; other pairs are slow."""
    found: list[object] = []
    for model, cluster in product(choices("model"), choices("cluster")):
        own = cluster == LARGE.get(model, DEFAULT_CLUSTER)
        usual = model not in SLOW_MODELS if own else model == "tiny"
        marks = wide_unless(model.startswith(("tiny", "qwen"))) if usual else [pytest.mark.slow]
        found.append(pytest.param(model, cluster, marks=marks, id=f"{cluster}-{model}"))
    return found


@pytest.mark.wide
@pytest.mark.parametrize(("model", "cluster"), held())
def test_every_model_runs_on_every_cluster_that_holds_it(model: str, cluster: str) -> None:
    workload = {"whisper": "librispeech", "mllm": "laion_packed"}.get(model.split("_")[0], "chartqa")
    workload, text = ("packed_text", ["workload.text=2048"]) if model.startswith(TEXT_MODELS) else (workload, [])
    tp = 4 if model in LARGE and cluster == LARGE[model] and model not in WITHOUT_TP else "null"
    searched = [f"layout.tp={tp}", "layout.dp=null", "layout.cp=1", "strategy=megatron"]
    batch = ["global_batch=64", "microbatch_size=1"]
    run = replace(
        composed(*batch, *searched),
        model=composed(f"model={model}").model,
        cluster=composed(f"cluster={cluster}").cluster,
        workload=composed(f"workload={workload}", *text).workload,
    )
    try:
        outcome = run_experiment(run)
    except OutOfMemoryError:
        assert model in LARGE or cluster == "h200x1"
        assert cluster != LARGE.get(model, DEFAULT_CLUSTER)
        return
    assert outcome.layout.num_ranks == int(run.cluster["num_nodes"]) * int(run.cluster["gpus_per_node"])
