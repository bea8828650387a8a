"""DIP with generators behind the LLM: their sub-microbatches, stages, groups, and the order that follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.costs.bound import lower_bound_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import Simulator
from entrain_bench.specs.job import PLANNING_SHARE, Degrees
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.dip import DipAssigner, DipScheduler
from entrain_bench_strategies.dip.partitioner import (
    chunks_per_rank,
    efficient_items,
    sub_microbatches,
)
from entrain_bench_strategies.dip.scheduler import build_segments
from support.builders import labels, placed, profile_of, random_samples, samples, tiny_cluster, tiny_job
from support.disttrain import generating

# A generated image takes 512 tokens, whatever the size of the one that is encoded.
MODEL = generating(item_tokens=512)
VISION, LLM, OUT = MODEL.modules
GIB = 2**30


def scheduled(
    layout: Layout, shapes: SampleShapes, assignment: Assignment, budget_bytes: float = 1e12, **knobs: str | int
) -> Program:
    profile = profile_of(tiny_job(MODEL, budget_bytes=budget_bytes / PLANNING_SHARE), shapes)
    return DipScheduler(**({"memory": "module"} | knobs)).schedule(shapes, layout, assignment, profile)  # type: ignore[arg-type]


def on_all_ranks(stages: int, dp: int = 1, turns: int = 1) -> Layout:
    """Every module in ``turns`` stages on each rank."""
    ranks = np.tile(np.arange(dp * stages).reshape(dp, stages, 1), (1, turns, 1))
    return Layout(tuple(placed(module, ranks) for module in MODEL.modules), 1)


def cut_by(shapes: SampleShapes, dp: int, most: tuple[int, int]) -> Assignment:
    """Microbatches of two samples, cut for the encoder and for the generator by different sizes."""
    group = np.arange(len(shapes)) // 2
    owner = group[shapes.item_sample]
    vision, out = (sub_microbatches(owner % dp, owner // dp, each) for each in most)
    return Assignment((labels(owner % dp, vision), labels(group % dp, group // dp), labels(owner % dp, out)))


def test_encoder_and_generator_cut_the_items_by_sizes_of_their_own() -> None:
    job = tiny_job(MODEL, tiny_cluster(launch_s=1e-6), microbatch_size=2)
    # Small images need company; a generated one is long enough by itself.
    shapes = samples(*[(10, [64, 64, 64, 64])] * 4)
    profile = profile_of(job, shapes)
    layout = on_all_ranks(1)
    most = [efficient_items(profile, module, shapes, 1, 1) for module in (VISION, OUT)]
    assert most[0] > most[1] >= 1
    vision, llm, out = DipAssigner().assign(shapes, layout, profile).modules
    assert llm.microbatch.tolist() == [0, 0, 1, 1]
    for found, size in ((vision, most[0]), (out, most[1])):
        assert found.microbatch.max() + 1 == 2 * -(-8 // size)
        # The second microbatch's items begin a sub-microbatch.
        assert found.microbatch[7] < found.microbatch[8]


def test_a_generator_runs_between_the_llms_passes_by_hand() -> None:
    shapes, layout = samples((10, [40]), (10, [40]), (10, [40]), (10, [40])), on_all_ranks(1)
    program = scheduled(layout, shapes, cut_by(shapes, 1, (2, 1)), search_rounds=0)
    rows = program.lane_actions[program.lane_offsets[0] : program.lane_offsets[1]]
    passes = [(int(program.module[a]), Pass(int(program.kind[a])), int(program.chunk[a])) for a in rows]
    own = [entry for entry in passes if entry[2] >= 0]
    assert own[:3] == [(0, Pass.FORWARD, 0), (1, Pass.FORWARD, 0), (2, Pass.FORWARD, 0)]
    assert own.index((2, Pass.BACKWARD, 0)) < own.index((1, Pass.BACKWARD, 0)) < own.index((0, Pass.BACKWARD, 0))
    assert own.index((2, Pass.BACKWARD, 1)) < own.index((1, Pass.BACKWARD, 0))
    assert own.index((1, Pass.FORWARD, 1)) < own.index((2, Pass.FORWARD, 2))
    assert len(own) == 2 * (2 + 2 + 4)


def test_a_microbatch_is_one_group_with_what_encodes_and_generates_its_items() -> None:
    shapes = samples((10, [40, 40]), (10, [40]), (10, []), (10, [40]), (10, []), (10, []))
    layout, assignment = on_all_ranks(2), cut_by(shapes, 1, (1, 2))
    program = scheduled(layout, shapes, assignment)
    profile = profile_of(tiny_job(MODEL, budget_bytes=1e12), shapes)
    found = build_segments(program, assignment, profile)
    # Groups come by the LLM microbatch that they serve: three, the last one of text alone.
    assert found.num_groups.tolist() == [3]
    groups = [found.group[program.forward_actions(index)][:, 0] for index in range(3)]
    assert [each.tolist() for each in groups] == [[0, 0, 0, 1], [0, 1, 2], [0, 0, 1]]
    ranks = [found.rank[program.forward_actions(index)][:, 0] for index in range(3)]
    assert ranks[0][:3].max() < ranks[1][0] < ranks[2][:2].min()
    backs = [found.rank[program.backward_actions(index)][:, 0] for index in range(3)]
    assert backs[2][:2].max() < backs[1][0] < backs[0][:3].min()
    by_module = build_segments(program, assignment, profile, by_module=True)
    assert by_module.per_group == 3


def test_chunks_a_rank_count_the_generators_efficient_batch() -> None:
    # A microbatch of eight samples, of which the LLM takes all and the generator one image at a time.
    model = generating(encoder=6, llm=6, generator=60, item_tokens=1024)
    shapes, degrees = samples((10, [64])), Degrees(1, 1, 1, 1)
    profile = profile_of(tiny_job(model, tiny_cluster(launch_s=1e-7), microbatch_size=8), shapes)
    vision, llm, generator = model.modules
    assert efficient_items(profile, generator, shapes, 1, 1) == 1
    images = efficient_items(profile, vision, shapes, 1, 1)
    batches = (vision, np.full(images, 64)), (llm, np.full(8, 26)), (generator, np.array([1024]))
    seconds = [profile.layers.layer_s(module, lengths, degrees.tp, degrees.cp).sum() for module, lengths in batches]
    chunks = chunks_per_rank(profile, shapes, degrees)
    assert chunks == tuple(int(each / min(seconds)) for each in seconds)
    assert 1 == min(chunks) < max(chunks) == chunks[2] < len(generator.layers)


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 2),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["module", "greedy"]),
)
def test_random_batches_run_above_the_bound_and_within_memory(
    seed: int, stages: int, dp: int, count: int, turns: int, most: tuple[int, int], memory: str
) -> None:
    layout = on_all_ranks(stages, dp, min(turns, 4 // stages))
    shapes = random_samples(np.random.default_rng(seed), 2 * dp * count)
    assignment = cut_by(shapes, dp, most)
    costs = Memory(MODEL)
    alone = costs.peak_bytes(scheduled(layout, shapes, assignment, budget_bytes=1.0)).max()
    program = scheduled(layout, shapes, assignment, budget_bytes=1.1 * alone, memory=memory, search_rounds=seed % 3)
    check_program(program)
    assert costs.peak_bytes(program).max() <= 1.1 * alone
    truth = CostTruth(MODEL, tiny_cluster(1, 8))
    timeline = Simulator(truth, 1e15).execute(program)
    assert lower_bound_s(truth, layout, shapes) <= timeline.iteration_time_s * (1 + 1e-9)
