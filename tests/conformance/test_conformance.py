"""What every strategy must do on every workload, and under every factor of ``Speed``."""

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from itertools import cycle, islice, product
from typing import Any

import pytest

from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError
from entrain_bench.config.compose import compose
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.tree import choices
from entrain_bench.conformance.suite import PARTS, require_blind, require_repeatable, require_valid
from entrain_bench.costs.truth import CostTruth
from entrain_bench.records.records import METRICS
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import Feed, prepare, run_experiment
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import Speed
from support.wide import each_strategy, own_dp

NEEDS_AUDIO = ("librispeech", "synthetic_av")
# Without those that need a file of the user's.
WORKLOADS = [name for name in choices("workload") if name not in ("trace", "twin")]
MODELS = ("tiny", "tiny_av")
PAIRS = tuple(product(WORKLOADS, MODELS))
# Which part of the products of strategies, workloads, models and parts is run: make test-slow SEED=1 draws others.
SEED = os.environ.get("SEED", "0")
DEFAULT_CLUSTER = "a40x64"
# A planner that reads a layout from a file of the user's.
FROM_A_FILE = ("given",)
# Models that need not fit every cluster, each with one that it fits.
HELD = {
    "a100x64": "llavaov_qwen25_7b llavaov_llama3_8b llavaov_qwen25_32b whisper_qwen25_32b internvl15_26b "
    "internvl15_40b mllm_9b llama3_8b llama1_13b_128k llama1_30b_128k llama1_65b_128k",
    "a100x1280": "mllm_15b mllm_72b",
    "h100x8": "gpt_1b",
    "h100x64": "vit1b_llm7b vit1b_llm14b vit3b_llm14b vit1b_llm32b vit3b_llm32b nemotron4_15b llama31_70b",
    "h100x256": "vit1b_llm70b vit3b_llm70b vit1b_llm120b vit3b_llm120b vit6b_llm120b vit7b_llm120b vit12b_llm120b "
    "gpt3_175b nemotron4_340b llama31_405b",
    "h800x16": "vlm_s",
    "h800x32": "vlm_m",
    "h800x64": "vlm_l",
}
LARGE = {model: cluster for cluster, models in HELD.items() for model in models.split()}
# Whose encoder has 25 heads.
WITHOUT_TP = ("internvl15_26b", "internvl15_40b")
# Without encoders.
TEXT_MODELS = ("llama", "nemotron4", "gpt")
# Larger than others on the same cluster.
SLOW_MODELS = (
    "mllm_15b",
    "mllm_72b",
    "vit1b_llm120b",
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
    return replace(composed(*own_dp(chosen.get("strategy", ""))), **groups)


def drawn(check: str, quick: int, wide: int, slow: int) -> list[object]:
    """Workloads and models for every strategy: so many in every run of the tests, with the wide and the slow ones.

    Strategies take turns in one shuffled list of all pairs, so that together they run every pair.
    """
    pairs = random.Random(f"{SEED} {check}").sample(PAIRS, len(PAIRS))
    marks = [[]] * quick + [[pytest.mark.wide]] * wide + [[pytest.mark.slow]] * slow
    return [
        pytest.param(strategy, *pair, marks=mark, id="-".join((strategy, *pair)))
        for place, strategy in enumerate(choices("strategy"))
        for pair, mark in zip(islice(cycle(pairs), place * (quick + wide), None), marks, strict=False)
    ]


@pytest.mark.parametrize(("strategy", "workload", "model"), drawn("valid", quick=1, wide=2, slow=10))
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


@pytest.mark.parametrize("require", [require_repeatable, require_blind])
@pytest.mark.parametrize(("strategy", "workload", "model"), drawn("repeatable", quick=0, wide=1, slow=5))
def test_repeatable_and_blind_to_the_truth(
    strategy: str, workload: str, model: str, require: Callable[[RunConfig], None]
) -> None:
    try:
        require(config(strategy=strategy, workload=workload, model=model, cluster="a40x16"))
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
        with pytest.raises(IncompatibleError, match=r"has a generator \(image_out\), which strategy/"):
            require_valid(run)
        return
    require_valid(run)
    require_blind(run)


def mixes(wide: int, slow: int) -> list[object]:
    """Planners, assigners and schedulers of different systems, drawn; each part of each system at least once."""
    rng = random.Random(f"{SEED} mixes")
    names = {part: [name for name in choices(f"strategy/{part}") if name not in FROM_A_FILE] for part in PARTS}
    # Shuffled lists of all parts, one after another: none is left out before all have been taken.
    decks = [[name for _ in range(slow) for name in rng.sample(names[part], len(names[part]))] for part in PARTS]
    found = [*dict.fromkeys(zip(*decks, strict=False))][: wide + slow]
    return [
        pytest.param(*mix, marks=pytest.mark.wide if place < wide else pytest.mark.slow, id="-".join(mix))
        for place, mix in enumerate(found)
    ]


@pytest.mark.parametrize(PARTS, mixes(wide=20, slow=100))
def test_parts_can_be_mixed(planner: str, assigner: str, scheduler: str) -> None:
    chosen = {"planner": planner, "assigner": assigner, "scheduler": scheduler}
    parts: Mapping[str, Any] = {
        part: composed(f"strategy/{part}={name}").strategy[part] for part, name in chosen.items()
    }
    run = replace(composed("model=tiny", "cluster=a40x16", *own_dp(planner)), strategy={"name": "mixed", **parts})
    try:
        require_valid(run)
    except IncompatibleError:
        assert len({planner, assigner, scheduler}) > 1, "the parts of one system fit together"


def held(slow: int) -> list[object]:
    """Every model on the cluster it is meant for, the tiny model on all; of other pairs some are drawn."""
    own, others = [], []
    for model, cluster in product(choices("model"), choices("cluster")):
        if cluster == LARGE.get(model, DEFAULT_CLUSTER) or model == "tiny":
            own.append((model, cluster, pytest.mark.slow if model in SLOW_MODELS else pytest.mark.wide))
        else:
            others.append((model, cluster, pytest.mark.slow))
    found = [*own, *random.Random(f"{SEED} held").sample(others, slow)]
    return [pytest.param(model, cluster, marks=mark, id=f"{cluster}-{model}") for model, cluster, mark in found]


@pytest.mark.parametrize(("model", "cluster"), held(slow=20))
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
