"""DFLOP's profiling engine: throughput tables and what they say of chunks."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.profile import Profile
from entrain_bench_strategies.dflop.profiling import (
    BOTH_PASSES,
    ThroughputTable,
    attention_flops,
    encoder_cost,
    llm_cost,
)
from support.builders import profile_of, samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model(encoder=4, llm=4)


def profile() -> Profile:
    return profile_of(tiny_job(MODEL, tiny_cluster(1, 8), global_batch=16), samples((100, [800]), (50, [])))


def test_a_table_interpolates_and_extrapolates_linearly_within_limits() -> None:
    table = ThroughputTable(np.array([1.0, 2.0, 4.0]), np.array([10.0, 14.0, 16.0]))
    np.testing.assert_allclose(table.at(np.array([1.5, 3.0, 0.5, 5.0])), [12, 15, 8, 16])
    assert float(ThroughputTable(np.array([1.0, 2.0]), np.array([9.0, 8.0])).at(2.5)) == 7.5
    assert float(ThroughputTable(np.array([1.0, 2.0]), np.array([1.0, 9.0])).at(0.5)) == 0.5


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tables_give_back_the_measured_times_at_their_points(tp: int) -> None:
    profiled = profile()
    encoder, llm = MODEL.modules
    cost = encoder_cost(profiled, encoder, 700, tp)
    flops = encoder.forward_flops(np.full(4, 700)).sum()
    measured = profiled.layers.layer_s(encoder, np.full(4, 700), tp, 1).sum()
    assert float(cost.seconds(flops, 4.0, 1)) == pytest.approx(measured)
    assert float(cost.seconds(flops, 4.0, 3)) == pytest.approx(measured / 3)
    whole = profiled.layers.layer_s(llm, np.array([2048]), tp, 1).sum()
    assert llm_cost(profiled, llm, tp).seconds(np.array([2048]), 2048.0, 1)[0] == pytest.approx(whole)


def test_the_llm_split_tells_packing_from_one_sequence() -> None:
    profiled = profile()
    llm = MODEL.llm
    cost = llm_cost(profiled, llm, 1)
    packed = float(cost.seconds(np.full(4, 2048), 8192.0, 1).sum())
    whole = float(cost.seconds(np.array([8192]), 8192.0, 1)[0])
    assert packed < whole
    assert packed == pytest.approx(profiled.layers.layer_s(llm, np.full(4, 2048), 1, 1).sum(), rel=0.03)


def test_attention_flops_do_not_depend_on_key_value_groups() -> None:
    grouped, full = tiny_model(num_kv_heads=2).llm, tiny_model(num_kv_heads=8).llm
    lengths = np.array([512, 1024])
    np.testing.assert_array_equal(attention_flops(grouped, lengths), attention_flops(full, lengths))
    np.testing.assert_allclose(attention_flops(grouped, lengths)[1], 2 * 2.0 * 128 * 1024**2)


def test_durations_add_times_not_throughputs() -> None:
    # Half of the FLOPs at 1 and half at 3 FLOP/s take 2/3 of the harmonic mean's time; an arithmetic mean says 1/2.
    profiled = profile()
    cost = llm_cost(profiled, MODEL.llm, 1)
    lengths = np.array([4096])
    attention = attention_flops(MODEL.llm, lengths)
    linear = MODEL.llm.forward_flops(lengths) - attention
    parts = attention / cost.attention.at(4096.0) + linear / cost.linear.at(4096.0)
    np.testing.assert_allclose(cost.seconds(lengths, 4096.0, 1), BOTH_PASSES * parts)
