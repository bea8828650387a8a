"""Groups of several widths: joined against all nested groups, packs of micro-steps, and what a request binds."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.rank_groups import joined, sample_costs, unit_costs
from entrain_bench.balancing.rounds import PlanePlanner, layouts_with_widths
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.simulate import Simulator
from entrain_bench.specs.job import Job

SMALL = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "workload=synthetic", "layout.tp=1")
WIDE = (*SMALL, "layout.dp=null", "layout.cp=null", "strategy.planner.widths=true")


def setting(strategy: str, *overrides: str) -> RunContext:
    return prepare(compose_cells([f"strategy={strategy}", *WIDE, *overrides])[0].config)


def even(seconds: list[float], lost: float, levels: int = 3) -> np.ndarray:
    """Seconds on groups of 1, 2, 4, ... positions that share work evenly and lose a share at each doubling."""
    return np.array([[each / 2**level * (1 + lost) ** level for each in seconds] for level in range(levels)])


def join(seconds: np.ndarray, position: list[int], room: float = 100.0, positions: int = 4) -> list[tuple[int, int]]:
    count = seconds.shape[1]
    found = joined(
        seconds, np.ones(count), np.zeros(len(seconds)), np.zeros(count, np.int64), np.array(position), positions, room
    )
    return list(zip(*(each.tolist() for each in found), strict=True))


def test_neighbours_join_where_that_ends_sooner() -> None:
    # 8 alone on position 1: with its neighbour 9 / 2 = 4.5 (a tenth lost: 4.95), with all four 13 / 4 = 3.25 (3.93).
    assert join(even([1.0, 8.0, 2.0, 2.0], 0.1), [0, 1, 2, 3]) == [(0, 4)] * 4
    # 60% lost: with its neighbour 7.2, with all four 8.32. The others stay alone.
    assert join(even([1.0, 8.0, 2.0, 2.0], 0.6), [0, 1, 2, 3]) == [(0, 2), (0, 2), (2, 1), (3, 1)]
    # Nothing gained: everybody stays alone.
    assert join(even([3.0, 3.0, 3.0, 3.0], 0.1), [0, 1, 2, 3]) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_what_exceeds_memory_joins_and_what_fits_nowhere_is_as_wide_as_can_be() -> None:
    seconds = even([1.0, 1.0, 1.0], 1.2)
    # Two units of a byte on position 0, one on position 1; a position has room for 1.5, all three fit on two. Groups of
    # two take 3.3, of four 3.63, alone they would take 2.
    assert join(seconds, [0, 0, 1], room=1.5) == [(0, 2)] * 3
    assert join(seconds, [0, 0, 1], room=0.1) == [(0, 4)] * 3


def test_positions_that_are_no_power_of_two_have_no_group_beyond_the_last() -> None:
    found = join(even([1.0, 1.0, 9.0], 0.0, 2), [0, 1, 2], positions=3)
    assert found == [(0, 1), (1, 1), (2, 1)]


def nested(first: int, width: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to divide a run of positions into aligned groups."""
    yield [(first, width)]
    if width > 1:
        half = width // 2
        for left in nested(first, half):
            for right in nested(first + half, half):
                yield left + right


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=8),
    st.floats(0.0, 1.0),
    st.floats(0, 5),
)
def test_no_nested_groups_end_before_the_joined_ones(units: list[tuple[int, int]], lost: float, once: float) -> None:
    seconds, position = even([float(each) for each, _ in units], lost), np.array([own for _, own in units])
    count = len(units)
    first, width = joined(seconds, np.zeros(count), np.full(3, once), np.zeros(count, np.int64), position, 4, 1.0)

    def ends_s(groups: list[tuple[int, int]]) -> float:
        each = [
            (mine, level)
            for start, size in groups
            for mine, level in [((position >= start) & (position < start + size), size.bit_length() - 1)]
        ]
        return max(float(seconds[level, mine].sum()) + once for mine, level in each if mine.any())

    own = sorted({*zip(first.tolist(), width.tolist(), strict=True)})
    assert np.all((first <= position) & (position < first + width))
    assert ends_s(own) <= min(ends_s(groups) for groups in nested(0, 4)) * (1 + 1e-8)


def test_ranks_of_a_group_share_items_or_deal_them_out() -> None:
    made = setting("fsdp")
    shapes = made.source.batch(0, 16, 0)
    layout = PlanePlanner(sharded=True).plan(made.profile, MakeProgram(made.strategy, made.profile))
    shared, dealt = (sample_costs(shapes, layout, made.profile, spread=spread)[0] for spread in (False, True))
    assert dealt[0].tolist() == shared[0].tolist()
    expected = shared.copy()
    for module, placed in zip(made.job.model.encoders, layout.modules, strict=False):
        seconds = unit_costs(module, placed, shapes, made.profile)[0]
        for level, more in enumerate(seconds[0] / 2 ** np.arange(len(seconds))[:, None] - seconds):
            expected[level] += np.bincount(module.owners(shapes, module.units(shapes)), more, 16)
    np.testing.assert_allclose(dealt, expected)


@pytest.mark.parametrize("strategy", ["fsdp", "veomni", "orchmllm"])
def test_a_position_has_one_pack_in_each_micro_step(strategy: str) -> None:
    made = setting(strategy)
    job, shapes = made.job, made.source.batch(0, 16, 0)
    layout = PlanePlanner(sharded=True).plan(made.profile, MakeProgram(made.strategy, made.profile))
    assert all(placed.sharded and placed.widths for placed in layout.modules)
    program = made.strategy.program(shapes, layout, made.profile)
    Simulator(made.truth, 1e18).execute(program)
    for module, placed, chunks in zip(job.model.modules, layout.modules, program.chunks, strict=True):
        assert sorted(chunks.members.tolist()) == module.units(shapes).tolist()
        width = np.array([cp for _, cp in placed.degrees])[placed.degree_of_copy[chunks.replica]]
        first = chunks.replica - np.searchsorted(placed.degree_of_copy, placed.degree_of_copy[chunks.replica])
        held = np.concatenate([one * size + np.arange(size) for one, size in zip(first, width, strict=True)])
        packs = np.stack([np.repeat(chunks.microbatch, width), held])
        assert len(np.unique(packs, axis=1).T) == len(packs.T)
        # Samples stay in the micro-step in which they arrived.
        step = np.repeat(chunks.microbatch, np.diff(chunks.offsets))
        arrived = module.owners(shapes, chunks.members) // (16 // layout.num_microbatches)
        np.testing.assert_array_equal(step, arrived)


def test_widths_hold_samples_that_no_rank_can() -> None:
    short = ("layout.cp=1", "cluster.device.memory_bytes=60000000", "communicator_bytes=0")
    fixed = setting("fsdp", *short, "strategy.planner.widths=false")
    with pytest.raises(OutOfMemoryError):
        fixed.strategy.plan(fixed.profile)
    made = setting("fsdp", *short)
    layout = made.strategy.plan(made.profile)
    program = made.strategy.program(made.source.batch(0, 16, 0), layout, made.profile)
    assert program.chunks[-1].replica.max() >= layout.modules[-1].dp
    assert made.profile.memory.peak_bytes(program).max() <= made.job.memory_budget_bytes


AUDIO_VIDEO = ("model=tiny_av", "workload=synthetic_av", "cluster=a40x16", "global_batch=32")


def job_of(*overrides: str) -> Job:
    return prepare(compose_cells([*AUDIO_VIDEO, "strategy=braid", *overrides])[0].config).job


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["layout.tp=null", "layout.cp=null", "layout.dp=null"], [1, 2, 4]),
        (["layout.tp=2", "layout.cp=null", "layout.dp=4"], [2]),
        (["layout.tp=2", "layout.cp=1", "layout.dp=null"], [2]),
        (["layout.tp=2", "layout.cp=2", "layout.dp=4"], [2]),
        (["layout.tp=null", "layout.cp=2", "layout.dp=4", "layout.pp=1"], [2]),
        # A CP and a DP that leave ranks for stages, or none; stages.
        (["layout.tp=2", "layout.cp=1", "layout.dp=4"], []),
        (["layout.tp=2", "layout.cp=1", "layout.dp=4", "layout.pp=1"], []),
        (["layout.tp=2", "layout.cp=4", "layout.dp=4"], []),
        (["layout.tp=1", "layout.dp=2", "layout.pp=2"], []),
    ],
)
def test_a_requested_tp_binds_all_groups_of_the_llm_and_cp_and_dp_their_positions(
    asked: list[str], expected: list[int]
) -> None:
    job = job_of(*asked)
    layouts = [*layouts_with_widths(job)]
    llms = [layout.modules[job.model.llm_index] for layout in layouts]
    assert [llm.tp for llm in llms] == expected
    for llm in llms:
        assert llm.plane.shape == (1, 16)
        tps = {tp for tp, _ in llm.widths}
        assert tps == ({job.request.tp} if job.request.tp else tps)
        assert {cp for tp, cp in llm.widths if tp == llm.tp} >= {1, 2, 4}


@pytest.mark.wide
@pytest.mark.parametrize(
    "asked", [("layout.dp=null",), ("layout.cp=null", "layout.dp=2"), ("layout.tp=1", "layout.cp=4", "layout.dp=4")]
)
@pytest.mark.parametrize("strategy", ["bytescale", "hybrid_cp", "flexsp", "fsdp"])
def test_one_rule_for_all_who_choose_widths(strategy: str, asked: tuple[str, ...]) -> None:
    widths = ("strategy.planner.widths=true", "layout.recompute=[vision,audio,llm]") if strategy == "fsdp" else ()
    made = prepare(
        compose_cells([*AUDIO_VIDEO, f"strategy={strategy}", "microbatch_size=1", *asked, *widths])[0].config
    )
    request, llm = made.job.request, made.strategy.plan(made.profile).modules[made.job.model.llm_index]
    assert llm.widths or strategy == "fsdp"
    assert {tp for tp, _ in llm.degrees} == {request.tp}
    assert llm.pp == (request.pp or llm.pp)
    assert llm.plane.shape[1] // llm.tp % ((request.dp or 1) * (request.cp or 1)) == 0
