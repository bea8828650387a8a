"""Predictions of jobs: the short way against the whole program, and sizes that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.config.compose import Composer
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.ledger.book import Machine, load_book
from entrain_bench.lab.ledger.jobs import LedgerJob, Unusable, jobs_of
from entrain_bench.lab.ledger.predict import Cases, cluster_of, layers_of_stages, layout_of
from entrain_bench.lab.ledger.rows import row_of
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.shapes import shapes_from_lists
from support.ledger import STATED

BOOK = load_book()
SMALL = {"hidden": "1024", "layers": "8", "heads": "8", "kv_heads": "8", "ffn": "2816", "vocab": "32000"}


@pytest.fixture(scope="module")
def cases() -> Cases:
    return Cases(Composer())


def job_of(**changes: str) -> LedgerJob:
    found = jobs_of(row_of("internevo_a100", 2, {**STATED, **SMALL, **changes}), BOOK)
    assert not isinstance(found, Unusable), found
    return found[0]


def whole(job: LedgerJob, cases: Cases) -> tuple[float, float]:
    """Seconds and GiB of the program of all replicas and microbatches, through the executor of runs."""
    case, layout = cases.of(job), layout_of(job)
    number = np.arange(job.num_microbatches * job.microbatch_size * job.dp) // job.microbatch_size
    shapes = shapes_from_lists((), [(job.sequence_tokens, [])] * len(number))
    assignment = Assignment((ModuleAssignment(number // job.num_microbatches, number % job.num_microbatches),))
    if job.vpp > 1:
        program = interleaved_program(case.model, shapes, layout, assignment)
    else:
        program = chain_program(case.model, shapes, layout, assignment, stages_behind(layout))
    truth = CostTruth(case.model, case.cluster, job.framework)
    timeline = Simulator(truth, np.inf).execute(program)
    return timeline.iteration_time_s, float(timeline.peak_memory_bytes.max()) / 2**30


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": "1", "pp": "1", "dp": "64", "global_batch": "1280"},
        {"tp": "8", "pp": "1", "global_batch": "2048"},
        {"tp": "2", "pp": "4", "global_batch": "1024"},
        {"tp": "2", "pp": "4", "global_batch": "1072"},
        {"tp": "2", "pp": "4", "global_batch": "64"},
        {"tp": "2", "pp": "4", "vpp": "2", "global_batch": "1024"},
        {"tp": "2", "pp": "1", "dp": "32", "zero_stage": "3", "global_batch": "1024"},
    ],
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_one_replica_and_few_rounds_tell_what_the_whole_program_takes(
    changes: dict[str, str], overlaps: bool, cases: Cases
) -> None:
    job = job_of(**changes)
    options: dict[str, Any] = {"p2p": "overlapped", "overlap_grad_reduce": True, "overlap_param_gather": True}
    job = replace(job, framework=replace(job.framework, **(options if overlaps else {})))
    prediction, (seconds, gib) = cases.of(job).predict(), whole(job, cases)
    assert prediction.seconds == pytest.approx(seconds, rel=1e-9)
    assert prediction.gib == pytest.approx(gib, rel=1e-9)


def test_a_changed_cluster_changes_the_prediction_and_not_the_case(cases: Cases) -> None:
    case = cases.of(job_of())

    def halved(cluster: ClusterSpec) -> ClusterSpec:
        device = replace(cluster.device, sustained_fraction=cluster.device.sustained_fraction / 2, memory_bytes=2**20)
        return replace(cluster, device=device)

    slow, own = case.predict(halved), case.predict()
    assert own.seconds * 1.2 < slow.seconds < own.seconds * 2
    assert own.fits
    assert not slow.fits
    assert case.predict() == own


def test_ranks_of_a_stage_are_neighbours_and_pipelines_cross_nodes() -> None:
    ranks = layout_of(job_of()).modules[0].ranks
    assert ranks.shape == (8, 4, 2)
    assert ranks[0].tolist() == [[0, 1], [16, 17], [32, 33], [48, 49]]
    assert ranks[1, 0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("blocks", "stages", "expected"),
    [
        (8, 1, [10]),
        (8, 4, [3, 2, 2, 3]),
        (126, 64, [2] * 64),
        (60, 8, [9, 8, 8, 8, 7, 7, 7, 8]),
    ],
)
def test_blocks_are_spread_evenly(blocks: int, stages: int, expected: list[int]) -> None:
    assert [*layers_of_stages(blocks, stages)] == expected
    assert sum(expected) == blocks + 2


def test_a_cluster_is_resized_in_whole_nodes() -> None:
    base = ClusterSpec.from_config(Composer().run(("cluster=a40x64",)).cluster)
    plain = Machine("a40x64", {"network": 1e9})
    large, small, pair = (cluster_of(plain, base, gpus) for gpus in (128, 4, 2))
    assert (large.num_nodes, large.num_ranks, large.tiers[-1].num_ranks) == (32, 128, 128)
    assert large.tiers[-1].bandwidth_bytes_per_s == 1e9
    assert [tier.name for tier in small.tiers] == ["nvlink", "pcie"]
    assert [tier.name for tier in pair.tiers] == ["nvlink"]
    assert (pair.num_ranks, pair.tiers[0].num_ranks) == (2, 2)
    wide = cluster_of(replace(plain, tiers=("pcie",), gpus_per_node=8, device={"memory_bytes": 7}), base, 16)
    assert [(tier.name, tier.num_ranks) for tier in wide.tiers] == [("pcie", 8), ("network", 16)]
    assert (wide.num_nodes, wide.device.memory_bytes) == (2, 7)


def test_eager_attention_moves_and_keeps_scores_besides(cases: Cases) -> None:
    kernels = ("FlashAttention 2", "fused softmax (Megatron kernel)", "PyTorch unfused")
    flash, fused, eager = (cases.of(job_of(attention_kernel=kernel)).predict() for kernel in kernels)
    assert flash.seconds < fused.seconds < eager.seconds
    assert flash.gib < fused.gib == eager.gib


def test_dropout_moves_what_it_drops_and_keeps_scores(cases: Cases) -> None:
    job = replace(job_of(tp="1", dp="16"), dropout=True)
    plain, dropped = (cases.of(each).model.llm.layers[1] for each in (replace(job, dropout=False), job))
    scores = 8 * 2048
    assert dropped.elementwise_bytes_per_token - plain.elementwise_bytes_per_token == 5 * (scores + 2 * 1024)
    assert dropped.activation_bytes_per_token - plain.activation_bytes_per_token == 2 * scores
    assert dropped.num_elementwise_kernels - plain.num_elementwise_kernels == 3


def test_a_head_of_two_numbers_costs_next_to_nothing(cases: Cases) -> None:
    bert = job_of(model="BERT large", vocab="32000")
    assert not bert.causal
    head = cases.of(bert).model.llm.layers[-1]
    assert head.gemms[0].n == 2
    assert cases.of(bert).model.llm.layers[0].parameters == 32000 * 1024


def test_some_blocks_are_recomputed_on_each_stage(cases: Cases) -> None:
    none, some, full = (
        cases.of(job_of(recompute=text)).predict() for text in ("none", "full on 1 * pp layers", "full")
    )
    assert none.seconds < some.seconds < full.seconds
    assert none.gib > some.gib > full.gib


def test_an_all_reduce_in_fp32_moves_four_times_what_a_bf16_scatter_does(cases: Cases) -> None:
    job = replace(job_of(), framework=replace(job_of().framework, overlap_grad_reduce=False))
    whole = replace(job, framework=replace(job.framework, fp32_all_reduce=True))
    synced, reduced = (
        CostTruth(cases.of(each).model, cases.of(each).cluster, each.framework).step_costs.sync_s(
            cases.of(each).model.llm, layout_of(each).modules[0]
        )
        for each in (job, whole)
    )
    # Latency is that of one pass of the ring in either.
    np.testing.assert_allclose(reduced / synced, 4.0, rtol=0.1)


def test_blocks_of_single_operators_have_more_products_copies_and_sums_of_biases(cases: Cases) -> None:
    job = replace(job_of(tp="1", dp="16"), module=tuple({**dict(job_of().module), "linear_bias": True}.items()))
    eager = replace(job, framework=replace(job.framework, fused_qkv=False, fused_gates=False, eager_blocks=True))
    one, other = (cases.of(each).model.llm.layers[1] for each in (job, eager))
    assert [gemm.n for gemm in one.gemms] == [3 * 1024, 1024, 2 * 2816, 1024]
    assert [gemm.n for gemm in other.gemms] == [1024, 1024, 1024, 1024, 2816, 2816, 1024]
    assert [gemm.row_parallel for gemm in other.gemms] == [False, False, False, True, False, False, True]
    # Four copies of hidden states, each read and written, in both passes; gradients of all outputs are read once. In
    # forward the MLP's first results are read and written with their bias.
    copies, biases = 4 * 2 * 2 * 1024, 2 * (5 * 1024 + 2 * 2816)
    assert other.elementwise_bytes_per_token - one.elementwise_bytes_per_token == copies + 2 * 2 * 2 * 2816
    assert other.num_elementwise_kernels - one.num_elementwise_kernels == 5
    back, other_back = one.backward_elementwise_bytes_per_token, other.backward_elementwise_bytes_per_token
    assert back is not None
    assert other_back is not None
    assert other_back - back == copies + biases


def test_products_of_pytorch_overlap_nothing_and_keep_gathered_inputs(cases: Cases) -> None:
    split = job_of(tp="8", dp="2", sequence_parallel="true")
    for job, gathers in ((split, 2), (job_of(tp="8", dp="2", sequence_parallel="false"), 3)):
        plain = replace(job, framework=replace(job.framework, async_products=False, fused_gates=False))
        own, other = cases.of(job), cases.of(plain)
        assert (own.model.llm.layers[1].num_gathers, other.model.llm.layers[1].num_gathers) == (2, gathers)
        # megatron-core gathers inputs twice with sequence parallelism.
        assert (own.predict().seconds < other.predict().seconds) == (gathers == 3)
    kept, less = (
        cases.of(replace(split, framework=replace(split.framework, async_products=each))).model.llm.layers[1]
        for each in (False, True)
    )
    # Two inputs of hidden size in 16 bits, of which the ranks held an eighth each.
    assert kept.kept_bytes(8, True) - less.kept_bytes(8, True) == 2 * 2 * 1024 * 7 / 8


def test_unfused_sums_of_gradients_cost_every_microbatch_but_the_first(cases: Cases) -> None:
    """Hand-worked: a gradient is read with the sum so far, which is written."""

    def added_s(batch: str, grad_dtype: str) -> float:
        job = job_of(tp="1", pp="1", dp="64", global_batch=batch)
        job = replace(job, framework=replace(job.framework, grad_dtype=grad_dtype, overlap_grad_reduce=False))
        other = replace(job, framework=replace(job.framework, fused_accumulation=not job.framework.fused_accumulation))
        return abs(cases.of(other).predict().seconds - cases.of(job).predict().seconds)

    size = job_of().microbatch_size * 64
    assert added_s(str(size), "bf16") == 0.0
    case = cases.of(job_of(tp="1", pp="1", dp="64", global_batch=str(5 * size)))
    device, parameters = case.cluster.device, sum(layer.parameters for layer in case.model.llm.layers)
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency * device.elementwise_efficiency
    assert added_s(str(5 * size), "bf16") == pytest.approx(4 * 6 * parameters / rate, rel=1e-6)
    assert added_s(str(5 * size), "fp32") == pytest.approx(4 * 10 * parameters / rate, rel=1e-6)


def test_apex_passes_over_gradients_and_casts_weights_besides(cases: Cases) -> None:
    """Hand-worked: six values in 16 bits for buckets; in fp32 a norm, a scaling (2), and weights for their cast."""
    job = job_of(tp="1", pp="1", dp="64")
    apex = replace(job, framework=replace(job.framework, apex=True))
    one, other = (cases.of(each) for each in (job, apex))
    device, parameters = one.cluster.device, sum(layer.parameters for layer in one.model.llm.layers)
    rate = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    expected = (6 * 2 + (1 + 2 + 1) * 4) * parameters / 64 / rate
    assert other.predict().seconds - one.predict().seconds == pytest.approx(expected, rel=1e-6)


def test_gradients_of_shards_in_half_precision_are_cast_too(cases: Cases) -> None:
    job = job_of(tp="1", pp="1", dp="64", zero_stage="3", global_batch="64", microbatch_size="1", seq_len="64")
    model, (layout,) = cases.of(job).model, layout_of(job).modules
    one, other = (
        float(Memory(model, replace(job.framework, half_shards=each)).optimizer_bytes(model.llm, layout).sum())
        for each in (False, True)
    )
    assert job.framework.grad_dtype == "bf16"
    assert other - one == pytest.approx(4 * sum(layer.parameters for layer in model.llm.layers) / 64)
