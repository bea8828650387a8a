"""Builders of layouts and programs of heterogeneous parallelism."""

from __future__ import annotations

from entrain_bench.balancing.profile import Profile
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout, is_colocated
from entrain_bench.program.validate import check_program
from entrain_bench.specs.job import Degrees
from entrain_bench_strategies.hetero import (
    BatchSlices,
    ColocatedScheduler,
    GraphAwareScheduler,
    Pair,
    place_pair,
)
from support.builders import profile_of, samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model(encoder=2, llm=2)
ROW = (300, [1000])


def pair_layout(encoder: Degrees, llm: Degrees, *, colocated: bool, num_ranks: int = 8, batch: int = 32) -> Layout:
    job = tiny_job(MODEL, tiny_cluster(1, num_ranks), global_batch=batch, microbatch_size=1)
    layers = [(4,) if d.pp == 1 else (2, 2) for d in (encoder, llm)]
    return place_pair(job, Pair(encoder, llm), layers, [False, False], colocated=colocated)


def profile_for(microbatch_size: int = 1, ranks: int = 8, batch: int = 32, row: tuple[int, list[int]] = ROW) -> Profile:
    job = tiny_job(MODEL, tiny_cluster(1, ranks), global_batch=batch, microbatch_size=microbatch_size)
    return profile_of(job, samples(row))


def program_of(layout: Layout, count: int, microbatch_size: int = 1, passes_of_encoder: int = 1) -> Program:
    profile = profile_for(microbatch_size)
    shapes = samples(*[(10, [40])] * count)
    assignment = BatchSlices(passes_of_encoder).assign(shapes, layout, profile)
    parts = ColocatedScheduler() if is_colocated(*layout.modules) else GraphAwareScheduler()
    program = parts.schedule(shapes, layout, assignment, profile)
    check_program(program)
    return program
