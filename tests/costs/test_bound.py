"""No assignment and no order beats the lower bound, and it is close where nothing is lost."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.arrays import FloatArray, offsets_from_counts
from entrain_bench.base.errors import DeadlockError
from entrain_bench.costs.bound import _busiest_replica_s, cluster_bound_s, least_gpu_s, lower_bound_s
from entrain_bench.costs.layer_times import Stages, placed_stages
from entrain_bench.costs.loads import compute_loads
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate import Simulator
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.shapes import SampleShapes, shapes_from_lists
from support.builders import generating_model, placed, rngs, samples, tiny_cluster, tiny_model
from support.programs import frameworks, random_layout, random_program


def test_the_bound_is_near_where_all_microbatches_are_equal() -> None:
    overrides = ["workload=uniform", "model=qwen25vl_llama3_1b", "strategy=megatron", "global_batch=512"]
    s = prepare(compose_cells([*overrides, "cluster=a40x16", "microbatch_size=2", "layout.dp=2"])[0].config)
    layout = s.strategy.plan(s.profile)
    shapes = s.source.batch(0, 512, 0)
    program = s.strategy.program(shapes, layout, s.profile)
    ratio = s.executor.execute(program).iteration_time_s / lower_bound_s(s.truth, layout, shapes)
    # Transfers, and all of synchronisations but their last bucket, are free in the bound.
    assert 1.0 <= ratio < 1.12


GENERATING = generating_model()
TRUTH = CostTruth(GENERATING, tiny_cluster())


def on_two_stages(dp: int) -> Layout:
    """Encoder, two LLM stages and generator, each on a rank of its own."""
    vision, llm, out = GENERATING.modules
    ranks = np.arange(dp * 4).reshape(dp, 4, 1)
    return Layout((placed(vision, ranks[:, :1]), placed(llm, ranks[:, 1:3]), placed(out, ranks[:, 3:])), 1)


def alone(layout: Layout, shapes: SampleShapes) -> list[tuple[FloatArray, FloatArray]]:
    """Forward and backward of each module's first unit ``[stages]``; with TP 1 nothing is communicated."""
    every = []
    for module, own in zip(GENERATING.modules, layout.modules, strict=True):
        times = TRUTH.unit_times(module, own, module.lengths(shapes, module.units(shapes))[:1])
        every.append((times.forward_s[0], times.backward_s[0]))
    return every


def steps_s(layout: Layout) -> tuple[list[FloatArray], list[FloatArray]]:
    """Seconds of each module's stages after their last backward, and before their first forward."""
    pairs = zip(GENERATING.modules, layout.modules, strict=True)
    exposed = [TRUTH.step_costs.exposed(module, own) for module, own in pairs]
    return [own.sync_s + own.optimizer_s for own in exposed], [own.gather_s for own in exposed]


def test_the_critical_path_turns_at_the_generator() -> None:
    # On two replicas the heavy sample's own way is longer than half of all work.
    layout, shapes = on_two_stages(2), samples((10, [900]), (20, []))
    path = sum(float(forward.sum() + backward.sum()) for forward, backward in alone(layout, shapes))
    steps, gathers = steps_s(layout)
    assert steps[0][0] != steps[1][0]
    first_step = min(float(step[0]) for step in steps)
    first_gather = min(float(gather[0]) for gather in gathers)
    assert first_gather > 0.0
    assert lower_bound_s(TRUTH, layout, shapes) == pytest.approx(first_gather + path + first_step, rel=1e-12)


@pytest.mark.parametrize("text", [False, True])
def test_the_busiest_lane_waits_to_be_reached_works_and_is_waited_for(text: bool) -> None:
    # Twelve equal samples, or also one of text alone, which reaches the LLM at once but has nothing to generate.
    layout, shapes = on_two_stages(1), samples(*[(10, [400])] * 12, *[(10, [])] * text)
    (ahead, back), (llm_ahead, llm_back), _ = alone(layout, shapes)
    word = TRUTH.unit_times(GENERATING.llm, layout.modules[1], shapes.llm_tokens[-1:])
    to_llm, from_llm = (0.0, 0.0) if text else (ahead[0], back[0])
    steps, _ = steps_s(layout)
    fills = [[0.0], [to_llm, to_llm + word.forward_s[0, 0]], [ahead[0] + llm_ahead.sum()]]
    drains = [[0.0], [from_llm, from_llm + word.backward_s[0, 0]], [back[0] + llm_back.sum()]]
    bounds = []
    for module, own, fill, drain, step in zip(GENERATING.modules, layout.modules, fills, drains, steps, strict=True):
        lengths = module.lengths(shapes, module.units(shapes))
        loads = compute_loads(module, lengths, np.array([0, len(lengths)]))
        work = TRUTH.layer_times.stages_s(module, loads, placed_stages(module, own)).total_s[0]
        first_step = min(float(each[0]) for each in steps)
        bounds += [f + w + max(s, d + first_step) for f, w, s, d in zip(fill, work, step, drain, strict=True)]
    assert lower_bound_s(TRUTH, layout, shapes) == pytest.approx(max(bounds), rel=1e-12)


# Any layout, any assignment, any framework


MODELS = {
    "encoder and llm": tiny_model(encoder=2, llm=2, tied_embeddings=True),
    "two encoders": tiny_model(encoder=2, llm=2, audio=2),
    "generator": GENERATING,
}


@pytest.mark.wide
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=60, deadline=None)
@given(rng=rngs, framework=frameworks)
def test_nothing_beats_either_bound(name: str, rng: np.random.Generator, framework: FrameworkOptions) -> None:
    model, cluster = MODELS[name], tiny_cluster(4, 8, launch_s=(1e-6, 1e-9)[rng.integers(2)])
    layout = random_layout(rng, model)
    # A few samples, one of them much longer at times, so that each part of a bound decides now and then.
    count, longest = int(rng.integers(1, 7)), (60, 6000)[rng.integers(2)]
    kinds = ["image", "audio"] if name == "two encoders" else ["image"]
    rows = []
    for _ in range(count):
        items = [(str(rng.choice(kinds)), int(rng.integers(1, longest)), int(rng.integers(1, 9))) for _ in range(2)]
        rows.append((int(rng.integers(1, longest)), items[: rng.integers(3)]))
    shapes = shapes_from_lists(kinds, rows)
    program = random_program(rng, layout, model, shapes)
    truth = CostTruth(model, cluster, framework)
    try:
        seconds = Simulator(truth, 1e15).execute(program).iteration_time_s
    except DeadlockError:
        # One rank that serves microbatches of all replicas may wait for itself.
        assert layout.single_rank_boundary
        return
    split = any(program.splits_backward(index) for index in range(len(model.modules)))
    assert lower_bound_s(truth, layout, shapes, split) <= seconds * (1 + 1e-12)
    assert cluster_bound_s(truth, shapes, least_gpu_s(truth, shapes)) <= seconds * (1 + 1e-12)


def test_the_cluster_bound_is_all_work_over_all_gpus_or_the_longest_sample_at_its_widest() -> None:
    # One GPU cannot be beaten by sharing: the bound is what it takes for everything in one pack.
    model = tiny_model(encoder=2, llm=2)
    shapes, one = samples((10, [400]), (90, [])), CostTruth(model, tiny_cluster(1, 1))
    work = 0.0
    for module in model.modules:
        lengths = module.lengths(shapes, module.units(shapes))
        loads = compute_loads(module, lengths, np.array([0, len(lengths)]))
        counts = module.kind_counts([len(module.layers)])
        work += float(one.layer_times.stages_s(module, loads, Stages(counts, 1, 1, False)).total_s.sum())
    assert cluster_bound_s(one, shapes, least_gpu_s(one, shapes)) == pytest.approx(work, rel=1e-12)
    # On many GPUs launches and latency keep a sample from getting any faster: no degree beats the best.
    many = CostTruth(model, tiny_cluster(4, 8))
    path = 0.0
    for module in model.modules:
        lengths = module.lengths(shapes, module.units(shapes)[:1])
        loads, counts = compute_loads(module, lengths), module.kind_counts([len(module.layers)])
        widths = [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4, 8, 16, 32) if tp * cp <= 32]
        path += min(float(many.layer_times.stages_s(module, loads, Stages(counts, *w)).total_s.sum()) for w in widths)
    assert cluster_bound_s(many, shapes, least_gpu_s(many, shapes)) == pytest.approx(max(path, work / 32), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 40, 130, 700, 3000]), min_size=1, max_size=7),
    dp=st.integers(1, 3),
    launch_s=st.sampled_from([1e-5, 1e-9]),
)
def test_some_replica_of_every_assignment_has_the_heaviest_units(lengths: list[int], dp: int, launch_s: float) -> None:
    model = tiny_model(encoder=0, llm=3)
    truth, place = CostTruth(model, tiny_cluster(1, 8, launch_s=launch_s)), placed(model.llm, [[[0], [1]]] * dp)
    share, heaviest = _busiest_replica_s(truth, model.llm, place, np.array(lengths))
    # Work of every set of units in one pack, on both stages; the least busiest replica over all assignments.
    sets = [[unit for unit in range(len(lengths)) if 1 << unit & number] for number in range(2 ** len(lengths))]
    offsets = offsets_from_counts(np.array([len(units) for units in sets]))
    loads = compute_loads(model.llm, np.array([lengths[unit] for units in sets for unit in units]), offsets)
    counts = model.llm.kind_counts(place.layers_per_stage)
    work = truth.layer_times.stages_s(model.llm, loads, Stages(counts, 1, 1, False)).total_s
    work[0] = 0.0
    for stages in ([0], [1], [0, 1]):
        seconds = work[:, stages].sum(axis=1)
        least = min(
            max(
                seconds[sum(1 << unit for unit, where in enumerate(owners) if where == replica)]
                for replica in range(dp)
            )
            for owners in product(range(dp), repeat=len(lengths))
        )
        bound = max(share[stages].sum(), heaviest[:, stages].sum(axis=1).max(initial=0.0))
        assert bound <= least * (1 + 1e-12)
        if len(set(lengths)) == 1 and len(lengths) == dp + 1:
            assert bound == pytest.approx(least, rel=1e-12)
