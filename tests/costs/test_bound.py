"""No assignment and no order beats the lower bound, and it is close where nothing is lost."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.costs.bound import lower_bound_s
from entrain_bench.experiment import Setting, prepare
from entrain_bench.program import Pass
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.run import compose_cells
from entrain_bench.specs.shapes import shapes_from_lists
from entrain_bench.strategy.schedules import chain_program, stages_behind

SMALL = ["cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2"]


@cache
def setting(*overrides: str) -> Setting:
    return prepare(compose_cells([*SMALL, *overrides])[0].config)


@cache
def planned(*overrides: str) -> Layout:
    """The layout of a setting; planning takes longer than what is tested with it."""
    s = setting(*overrides)
    return s.strategy.plan(s.profile)


@pytest.mark.parametrize("workload", ["opencqa_ocr", "sroie", "synthetic_av"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), extra=st.integers(0, 3))
def test_random_assignments_stay_above_the_bound(workload: str, seed: int, extra: int) -> None:
    model = "tiny_av" if workload == "synthetic_av" else "tiny"
    overrides = (f"workload={workload}", f"model={model}", "strategy=megatron")
    s, layout = setting(*overrides), planned(*overrides)
    shapes = s.source.batch(seed % 100, 32, 0)
    rng = np.random.default_rng(seed)
    # Uneven replicas and microbatches, and LLM work up to two microbatches late.
    replica, encoder = rng.integers(0, 2, 32), rng.integers(0, 1 + rng.integers(8), 32)
    assignment = same_microbatches(s.job.model, shapes, replica, encoder, encoder + rng.integers(0, 3, 32))
    warmup = [behind + extra for behind in stages_behind(layout)]
    program = chain_program(s.job.model, shapes, layout, assignment, warmup, split_backward=bool(rng.integers(2)))
    timeline = s.executor.execute(program)
    assert timeline.iteration_time_s >= lower_bound_s(s.truth, layout, shapes) * (1 - 1e-12)


def test_the_bound_is_near_where_all_microbatches_are_equal() -> None:
    s = setting("workload=uniform", "model=qwen25vl_llama3_1b", "strategy=megatron", "global_batch=512")
    layout = s.strategy.plan(s.profile)
    shapes = s.source.batch(0, 512, 0)
    program = s.strategy.scheduler.schedule(
        shapes, layout, s.strategy.assigner.assign(shapes, layout, s.profile), s.profile
    )
    ratio = s.executor.execute(program).iteration_time_s / lower_bound_s(s.truth, layout, shapes)
    assert 1.0 <= ratio < 1.1


def test_one_sample_takes_at_least_its_own_path() -> None:
    s = setting("workload=uniform", "model=tiny", "strategy=megatron", "global_batch=2", "microbatch_size=1")
    layout = s.strategy.plan(s.profile)
    shapes = s.source.batch(0, 1, 0)
    path = 0.0
    for module, placed in zip(s.job.model.modules, layout.modules, strict=True):
        lengths = module.lengths(shapes, module.units(shapes))
        path += float(s.truth.unit_times(module, placed, lengths).total_s.sum(axis=1).max())
    vision, placed = s.job.model.modules[0], layout.modules[0]
    step = s.truth.step_s(vision, placed, Pass.GRAD_SYNC)[0] + s.truth.step_s(vision, placed, Pass.OPTIMIZER)[0]
    llm = s.truth.step_s(s.job.model.llm, layout.modules[-1], Pass.GRAD_SYNC)[0]
    llm += s.truth.step_s(s.job.model.llm, layout.modules[-1], Pass.OPTIMIZER)[0]
    assert lower_bound_s(s.truth, layout, shapes) == pytest.approx(path + min(step, llm))


def test_modules_of_different_dp_on_shared_ranks_do_not_lift_the_bound() -> None:
    # The encoder has ranks 0-1, the LLM 0-3: the busiest LLM replica may be on a rank without encoder, whose steps then
    # overlap its work.
    s = setting("workload=synthetic", "model=tiny", "cluster=tiny", "layout.tp=1", "layout.dp=1")
    vision, llm = s.job.model.modules
    layout = Layout(
        (
            ModuleLayout(vision.name, 1, 1, (len(vision.layers),), np.arange(2).reshape(2, 1, 1)),
            ModuleLayout(llm.name, 1, 1, (len(llm.layers),), np.arange(4).reshape(4, 1, 1)),
        ),
        8,
    )
    shapes = shapes_from_lists(["image"], [(2000, [])] * 64)
    for share in (2, 3, 5, 8):
        # Ranks 0 and 1 get one sample in `share`, ranks 2 and 3 the rest.
        index = np.arange(64)
        replica = np.where(index % share == 0, index // share % 2, 2 + index % 2)
        assignment = same_microbatches(s.job.model, shapes, replica, index // 8, index // 8)
        program = chain_program(s.job.model, shapes, layout, assignment, [np.array([0]), np.array([0])])
        seconds = s.executor.execute(program).iteration_time_s
        assert seconds >= lower_bound_s(s.truth, layout, shapes) * (1 - 1e-12)
