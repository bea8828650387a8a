"""With a profiled device, too, no assignment and no order beats the lower bound."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.costs.bound import lower_bound_s
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.specs.model import ModelSpec
from support.profiled import noise, profile_of_formula, written

# Noise makes rates fall and rise with the tokens, as caches do.
ERROR = 0.4


@cache
def setting(folder: Path, workload: str, tp: int) -> RunContext:
    path = folder / "profile.json"
    model = ["model=tiny", f"workload={workload}"]
    if not path.exists():
        tiny = ModelSpec.from_config(compose_cells(model)[0].config.model)
        written(path, profile_of_formula(tiny, error=noise(1, ERROR)))
    job = ["cluster=a40x16", "global_batch=32", "microbatch_size=2", "strategy=megatron", "layout.dp=2"]
    device = ["cluster/device=profiled", f"cluster.device.path={path}"]
    return prepare(compose_cells([*model, *job, *device, f"layout.tp={tp}"])[0].config)


@cache
def planned(folder: Path, workload: str, tp: int) -> Layout:
    s = setting(folder, workload, tp)
    return s.strategy.plan(s.profile)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.mark.wide
@pytest.mark.parametrize(("workload", "tp"), [("opencqa_ocr", 1), ("sroie", 2)])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), extra=st.integers(0, 3))
def test_random_assignments_stay_above_the_bound(folder: Path, workload: str, tp: int, seed: int, extra: int) -> None:
    s, layout = setting(folder, workload, tp), planned(folder, workload, tp)
    shapes = s.source.batch(seed % 100, 32, 0)
    rng = np.random.default_rng(seed)
    replica, encoder = rng.integers(0, 2, 32), rng.integers(0, 1 + rng.integers(8), 32)
    assignment = same_microbatches(s.job.model, shapes, replica, encoder, encoder + rng.integers(0, 3, 32))
    warmup = [behind + extra for behind in stages_behind(layout)]
    program = chain_program(s.job.model, shapes, layout, assignment, warmup, split_backward=bool(rng.integers(2)))
    seconds = s.executor.execute(program).iteration_time_s
    bound = lower_bound_s(s.truth, layout, shapes)
    assert 0 < bound <= seconds * (1 + 1e-12)
