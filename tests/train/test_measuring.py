"""Losses, timelines and metrics of an iteration, by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import nan
from time import perf_counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from entrain_bench.program import Pass, Program
from entrain_bench.train.measuring import (
    Clock,
    clock_offset,
    mean_metrics,
    merge_timeline,
    name_non_finite,
    on_one_clock,
    why_not_of_the_cluster,
)
from support.builders import random_samples, tiny_cluster
from support.train.four_ranks import LAYOUTS, programs
from support.train.ranks import run_ranks


def program_on(name: str) -> Program:
    rng = np.random.default_rng(0)
    return programs(random_samples(rng, 10, longest=40), LAYOUTS[name], rng, split=False)


def test_the_first_iteration_and_skipped_updates_do_not_count() -> None:
    history = [{"loss": 9.0, "time_s": 5.0}, {"loss": nan, "time_s": 1.0}, {"loss": 2.0, "time_s": 3.0}]
    assert mean_metrics(history) == {"loss": 2.0, "time_s": 2.0}
    assert mean_metrics(history[:1]) == history[0]
    assert mean_metrics(history[:2]) == {"time_s": 1.0}


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        ("cuda", torch.bfloat16, ""),
        ("cuda", torch.float32, "the run used float32, but the peak of handmade is stated for bfloat16"),
        ("cpu", torch.bfloat16, "ranks compute on a CPU, but the cluster's constants describe GPUs"),
    ],
)
def test_peaks_of_another_precision_or_of_no_cpu_are_no_measure(device: str, dtype: torch.dtype, reason: str) -> None:
    cluster = tiny_cluster()
    cluster = replace(cluster, device=replace(cluster.device, peak_dtype="bfloat16"))
    assert why_not_of_the_cluster(torch.device(device), dtype, cluster) == reason


def test_a_loss_that_is_not_finite_is_named() -> None:
    program = program_on("chain")
    action = int(np.flatnonzero((program.module == 1) & (program.kind == Pass.FORWARD) & (program.chunk >= 0))[0])
    view = program.view(action)
    line = name_non_finite(program, 7, [[(0, 1.0)], [(action, nan)]])
    named = f"loss=nan in iteration 7, microbatch {view.microbatch} of replica {view.replica} (samples "
    assert line.startswith(named)
    assert "grad_norm is not finite in iteration 7" in name_non_finite(program, 7, [[(0, 1.0)]])


def test_an_action_of_several_ranks_starts_with_the_last_of_them() -> None:
    program = program_on("wider_llm")
    lane = {rank: index for index, rank in enumerate(program.layout.lane_first_rank.tolist())}
    own = [program.lane_actions[program.lane_offsets[i] : program.lane_offsets[i + 1]] for i in range(len(lane))]
    encoder, llm = own[lane[0]], own[lane[2]]

    def rows(actions: np.ndarray, late_s: float) -> np.ndarray:
        start = 10.0 * np.arange(len(actions)) + late_s
        return np.column_stack([actions, start, start + 4.0])

    measured = [rows(encoder, 0.0), np.zeros((0, 3)), rows(llm, 1.0), rows(llm, 2.0)]
    timeline = merge_timeline(program, measured, [5.0, 9.0, 6.0, 7.0])
    np.testing.assert_array_equal(timeline.start_s[llm], 10.0 * np.arange(len(llm)) + 2.0)
    np.testing.assert_array_equal(timeline.end_s[llm], 10.0 * np.arange(len(llm)) + 6.0)
    assert timeline.peak_memory_bytes[lane[0]] == 5.0
    assert timeline.peak_memory_bytes[lane[2]] == 7.0


AHEAD_S = 1000.0


def ahead(rank: int) -> float:
    """A clock that is ahead of this machine's by as many times ``AHEAD_S`` as the rank's number."""
    return perf_counter() + AHEAD_S * rank


def offsets(rank: int) -> tuple[float, float, float]:
    """A rank's offset to rank 0, when it began together with the others, and what time it is there."""
    clock = Clock(torch.device("cpu"), timer=partial(ahead, rank))
    clock.start_together(dist.group.WORLD)
    return clock_offset(dist.group.WORLD, partial(ahead, rank)), clock.began_s, perf_counter()


def test_offsets_take_clocks_to_that_of_the_first_rank() -> None:
    # Ranks of one machine have one clock, so the offsets are known; a loaded machine answers late.
    for rank, (offset_s, began_s, now_s) in enumerate(run_ranks(offsets, 3)):
        assert abs(offset_s + AHEAD_S * rank) < 1.0
        assert abs(began_s - now_s) < 30.0


def test_actions_count_from_the_moment_at_which_the_first_rank_began() -> None:
    rows = [np.array([[7.0, 0.5, 1.0]]), np.zeros((0, 3)), np.array([[3.0, 0.0, 2.0], [4.0, 2.0, 2.5]])]
    aligned = on_one_clock(rows, [10.25, 11.0, 10.0])
    np.testing.assert_array_equal(aligned[0], [[7.0, 0.75, 1.25]])
    assert aligned[1].shape == (0, 3)
    np.testing.assert_array_equal(aligned[2], rows[2])
