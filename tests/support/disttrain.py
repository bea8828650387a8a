"""What tests of DistTrain share."""

from __future__ import annotations

from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.strategy.interface import Strategy
from entrain_bench.strategy.profile import Profile
from entrain_bench_strategies.disttrain import DistTrainAssigner, DistTrainPlanner, DistTrainScheduler
from support.builders import profile_of, samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model(encoder=4, llm=6)


def plan(profile: Profile, **knobs: object) -> Layout:
    return Strategy("disttrain", DistTrainPlanner(**knobs), DistTrainAssigner(), DistTrainScheduler()).plan(profile)  # type: ignore[arg-type]


def profile_for(*rows: tuple[int, list[int]], ranks: int = 8, **request: int) -> Profile:
    return profile_of(tiny_job(MODEL, tiny_cluster(1, ranks), request=LayoutRequest(**request)), samples(*rows))
