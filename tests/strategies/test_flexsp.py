"""FlexSP's dynamic programs and groups on batches worked by hand, and its programs on widths of sharded weights."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from entrain_bench.balancing.rank_groups import grouped
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench_strategies.sequence_balanced_cp import blasted, bucketed, solved

WIDTHS = np.array([1, 2, 4])
SMALL = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "workload=synthetic", "layout.tp=1")


def setting(*overrides: str) -> RunContext:
    return prepare(compose_cells(["strategy=flexsp", *SMALL, "layout.dp=null", *overrides])[0].config)


def formula(lengths: list[int], speed: list[float]) -> FloatArray:
    """Squared lengths and their communication, over the width; a group of one rank has none."""
    length = np.array(lengths, float)
    return np.stack([(length**2 + (length / v if v else 0.0)) / w for w, v in zip(WIDTHS, speed, strict=True)])


def test_the_largest_of_consecutive_microbatches_is_as_small_as_it_can_be() -> None:
    assert blasted(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist() == [0, 0, 0, 1]
    rng = np.random.default_rng(0)
    for _ in range(50):
        size, count = np.sort(rng.integers(1, 50, rng.integers(3, 9))).astype(float), int(rng.integers(1, 4))
        least = min(
            max(part.sum() for part in np.split(size, cuts)) for cuts in combinations(range(1, len(size)), count - 1)
        )
        found = np.bincount(blasted(size, count), size)
        assert found.max() == least
        assert len(found) <= count


def test_buckets_round_up_least() -> None:
    assert bucketed(np.array([1, 2, 9, 10]), 2).tolist() == [0, 0, 1, 1]
    assert bucketed(np.array([1, 1, 5]), 16).tolist() == [0, 0, 1]
    rng = np.random.default_rng(1)

    def added(value: np.ndarray, bucket: np.ndarray) -> int:
        return sum(int((value[bucket == each].max() - value[bucket == each]).sum()) for each in np.unique(bucket))

    for _ in range(50):
        value, count = np.sort(rng.integers(1, 30, rng.integers(4, 9))), int(rng.integers(2, 4))
        least = min(
            added(value, np.searchsorted(cuts, np.arange(len(value)), side="right"))
            for cuts in combinations(range(1, len(value)), count - 1)
        )
        assert added(value, bucketed(value, count)) == least


@pytest.mark.parametrize(("slow", "makespan", "widths"), [(1 / 8, 36.0, [1, 2]), (1.0, 28.0, [4])])
def test_links_decide_the_widths(slow: float, makespan: float, widths: list[int]) -> None:
    seconds = formula([8, 4, 4], [0.0, 1.0, slow])
    found = grouped(seconds, np.ones(3), WIDTHS, 4, 100.0)
    assert found is not None
    assert found.makespan_s == pytest.approx(makespan, rel=0.01)
    assert sorted(found.width.tolist()) == widths


def test_memory_widens_groups_and_may_refuse() -> None:
    seconds = formula([4, 4], [0.0, 1.0, 1.0])
    narrow = grouped(seconds, np.array([8.0, 8.0]), WIDTHS, 4, 8.0)
    wide = grouped(seconds, np.array([8.0, 8.0]), WIDTHS, 4, 4.0)
    assert narrow is not None
    assert wide is not None
    assert wide.width.tolist() == [2, 2] or wide.width.tolist() == [4]
    assert grouped(seconds, np.array([8.0, 8.0]), WIDTHS, 4, 3.0) is None


def test_the_integer_program_improves_greedy_groups_and_keeps_every_sequence() -> None:
    # 5, 5, 4, 4, 3, 3, 3 on three ranks: longest first needs 11, the best is 9 (Graham's worst case).
    seconds = np.array([[5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0]])
    greedy = grouped(seconds, np.ones(7), np.array([1]), 3, 100.0)
    assert greedy is not None
    worse = type(greedy)(np.array([1, 1, 1]), np.array([0, 1, 2, 2, 0, 1, 0]), 11.0)
    better = solved(worse, seconds, np.ones(7), (np.array([1]), 3, 100.0), 0.5)
    assert better.makespan_s == 9.0
    assert np.bincount(better.group, seconds[0]).tolist() == [9.0, 9.0, 9.0]
    assert solved(worse, seconds, np.ones(7), (np.array([1]), 3, 100.0), 0.0) is worse


def test_programs_run_microbatches_in_order_on_all_ranks() -> None:
    made = setting()
    layout = made.strategy.plan(made.profile)
    assert all(placed.sharded and placed.widths for placed in layout.modules)
    shapes = made.profile.samples.draw(16)
    program = made.strategy.program(shapes, layout, made.profile)
    llm, rows = layout.modules[-1], program.chunks[-1]
    width = np.array([cp for _, cp in llm.degrees])[llm.degree_of_copy[rows.replica]]
    assert np.bincount(rows.microbatch, width).max() <= llm.dp
    assert sorted(rows.members.tolist()) == [*range(16)]


def test_stages_and_samples_beyond_memory_are_refused() -> None:
    made = setting("layout.pp=2")
    with pytest.raises(IncompatibleError, match=r"layout\.pp=2: must be 1 or null with sharded weights"):
        made.strategy.plan(made.profile)
    small = setting("cluster.device.memory_bytes=40000000")
    with pytest.raises(OutOfMemoryError):
        small.strategy.plan(small.profile)
