"""Every strategy on models of any number of encoders, and on batches of text alone."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.config.compose import compose
from entrain_bench.program.validate import check_program
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import LayoutRequest
from support.builders import profile_of, random_samples, samples, tiny_cluster, tiny_job, tiny_model
from support.wide import each_strategy, own_dp

TEXT = samples(*((10 * length, []) for length in range(1, 17)))


@pytest.mark.parametrize(("encoder", "audio"), [(0, 0), (2, 0), (2, 2)])
@pytest.mark.parametrize("strategy", each_strategy())
def test_programs_are_valid_and_within_memory(strategy: str, encoder: int, audio: int) -> None:
    parts = prepare(compose(f"strategy={strategy}", "model=tiny", "cluster=tiny")).strategy
    request = LayoutRequest(tp=1, cp=1, dp=None if own_dp(strategy) else 2)
    model = tiny_model(encoder, 4, audio)
    job = tiny_job(model, tiny_cluster(1, 8), global_batch=16, microbatch_size=2, request=request)
    mixed = random_samples(np.random.default_rng(0), 16) if encoder else TEXT
    profile = profile_of(job, mixed)
    try:
        layout = parts.plan(profile)
    except IncompatibleError:
        pytest.skip("the strategy needs another number of encoders")
    for shapes in (mixed, TEXT):
        program = parts.program(shapes, layout, profile)
        check_program(program)
        assert profile.memory.peak_bytes(program).max() <= job.memory_budget_bytes
