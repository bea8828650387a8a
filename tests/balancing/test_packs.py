"""What sequences add to packed chunks: exact for times of tokens that are linear in the length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.chunk_estimates import packed_chunks_s
from entrain_bench.balancing.estimates import LENGTHS, pack_times, probes
from entrain_bench.base.arrays import sum_rows
from entrain_bench.costs.roofline import PassTimes
from entrain_bench.program.assignment import group_chunks, same_microbatches
from support.builders import placed, profile_of, samples, tiny_job, tiny_model

# A chunk, a token, a token squared.
ONCE_S, TOKEN_S, SCORE_S = 2e-3, 1e-6, 1e-11


def measured() -> list[PassTimes]:
    lengths, offsets = probes()
    forward = ONCE_S + sum_rows(offsets, TOKEN_S * lengths + SCORE_S * lengths.astype(np.float64) ** 2)
    return [PassTimes(0.75 * forward, 0.25 * forward, forward, forward)]


def test_affine_times_are_taken_apart() -> None:
    times = pack_times(measured())
    assert times.chunk_s[:, 0] == pytest.approx([ONCE_S, 2 * ONCE_S])
    added = times.of(LENGTHS)[0, :, 0]
    assert added == pytest.approx(TOKEN_S * LENGTHS + SCORE_S * LENGTHS.astype(np.float64) ** 2)
    others = np.array([(LENGTHS[30] + LENGTHS[31]) // 2, LENGTHS[-1] * 4])
    assert times.of(others)[0, :, 0] == pytest.approx(TOKEN_S * others + SCORE_S * others.astype(np.float64) ** 2)
    assert np.all(times.of(np.array([0, 1, 10**7])) >= 0)
    assert times.least_s[0, 0] == pytest.approx(ONCE_S + TOKEN_S + SCORE_S)


def test_weight_passes_are_taken_apart_like_the_others() -> None:
    (whole,) = measured()
    times = pack_times([replace(whole, weight_s=whole.forward_s / 3)])
    assert times.chunk_s[:, 0] == pytest.approx([ONCE_S, 2 * ONCE_S, ONCE_S / 4])
    added_s = times.of(np.array([1000]))[:, 0, 0]
    assert added_s[2] == pytest.approx(added_s[0] / 4)


@pytest.mark.parametrize("recompute", [False, True])
def test_chunks_take_about_what_they_are_believed_to(recompute: bool) -> None:
    model = tiny_model(encoder=3, llm=3)
    profile = profile_of(tiny_job(model), samples((10, [40])))
    rng = np.random.default_rng(0)
    shapes = samples(*((int(rng.integers(500, 1500)), rng.integers(500, 3000, 2).tolist()) for _ in range(24)))
    zero = np.zeros(24, np.int64)
    assignment = same_microbatches(model, shapes, zero, np.arange(24) // 6, np.arange(24) // 6)
    for module, labels in zip(model.modules, assignment.modules, strict=True):
        layout = placed(module, [[[0], [1]]], recompute=recompute)
        chunks = group_chunks(module, shapes, labels)
        believed = packed_chunks_s(module, layout, shapes, chunks, profile)
        truth = profile._truth.chunk_times(module, layout, shapes, chunks)
        assert believed[0] == pytest.approx(truth.forward_s + truth.forward_comm_s, rel=0.1)
        assert believed[1] == pytest.approx(truth.backward_s + truth.backward_comm_s, rel=0.1)
        # What recomputes by chunk all that it can is what the layout recomputes.
        if recompute:
            from entrain_bench.program.columns import covered_per_stage

            plain = placed(module, [[[0], [1]]])
            most = np.repeat(covered_per_stage(module, plain.layers_per_stage)[None], len(chunks), 0)
            again = packed_chunks_s(module, plain, shapes, chunks, profile, most)
            assert again[1] == pytest.approx(believed[1])
