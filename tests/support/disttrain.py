"""What tests of DistTrain share."""

from __future__ import annotations

from typing import Any

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.specs.model import ModelSpec
from entrain_bench_strategies.disttrain import DistTrainAssigner, DistTrainPlanner, DistTrainScheduler
from support.builders import TOKENS, encoder_config, llm_config, profile_of, samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model(encoder=4, llm=6)


def generating(encoder: int = 2, llm: int = 2, generator: int = 2, **changes: Any) -> ModelSpec:
    config = encoder_config(generator, role="generator", item_tokens=64) | changes
    modules = {"image_out": config, "vision": encoder_config(encoder), "llm": llm_config(llm)}
    return ModelSpec.from_config({"name": "handmade", "modules": modules, "tokens": TOKENS})


def plan(profile: Profile, **knobs: object) -> Layout:
    return Strategy("disttrain", DistTrainPlanner(**knobs), DistTrainAssigner(), DistTrainScheduler()).plan(profile)  # type: ignore[arg-type]


def profile_for(*rows: tuple[int, list[int]], ranks: int = 8, **request: int) -> Profile:
    return profile_of(tiny_job(MODEL, tiny_cluster(1, ranks), request=LayoutRequest(**request)), samples(*rows))
