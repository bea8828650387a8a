"""Published kernels and forwards; predictions of jobs, the short way against the whole program, and sizes by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.config.compose import Composer
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.ledger.jobs import LedgerJob, Machine, jobs_for, load_book, parse_row
from entrain_bench.lab.ledger.kernels import (
    KernelRow,
    compose_devices,
    kernels_by_source_table,
    plan_forwards,
    read_kernels,
    read_products,
)
from entrain_bench.lab.ledger.predict import (
    Case,
    Cases,
    Entry,
    Prediction,
    Range,
    eager_block,
    layers_of_stages,
    make_cluster,
    make_entries,
    make_layout,
    predict_entries,
)
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.module_layers import build_layers
from entrain_bench.specs.shapes import shapes_from_lists
from support.ledger import STATED

BOOK = load_book()
SMALL = {"hidden": "1024", "layers": "8", "heads": "8", "kv_heads": "8", "ffn": "2816", "vocab": "32000"}


@pytest.fixture(scope="module")
def cases() -> Cases:
    return Cases(Composer())


def job_of(**changes: str) -> LedgerJob:
    return jobs_for(parse_row("internevo_a100", 2, {**STATED, **SMALL, **changes}), BOOK)[0]


def whole(job: LedgerJob, cases: Cases) -> tuple[float, float]:
    """Seconds and GiB of the program of all replicas and microbatches, through the executor of runs."""
    case, layout = cases.case(job), make_layout(job)
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
    prediction, (seconds, gib) = cases.case(job).predict(), whole(job, cases)
    assert prediction.seconds == pytest.approx(seconds, rel=1e-9)
    assert prediction.gib == pytest.approx(gib, rel=1e-9)


def test_a_changed_cluster_changes_the_prediction_and_not_the_case(cases: Cases) -> None:
    case = cases.case(job_of())

    def halved(cluster: ClusterSpec) -> ClusterSpec:
        device = replace(cluster.device, sustained_fraction=cluster.device.sustained_fraction / 2, memory_bytes=2**20)
        return replace(cluster, device=device)

    slow, own = case.predict(halved), case.predict()
    assert own.seconds * 1.2 < slow.seconds < own.seconds * 2
    assert own.fits
    assert not slow.fits
    assert case.predict() == own


def test_ranks_of_a_stage_are_neighbours_and_pipelines_cross_nodes() -> None:
    ranks = make_layout(job_of()).modules[0].ranks
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
    large, small, pair = (make_cluster(plain, base, gpus) for gpus in (128, 4, 2))
    assert (large.num_nodes, large.num_ranks, large.tiers[-1].num_ranks) == (32, 128, 128)
    assert large.tiers[-1].bandwidth_bytes_per_s == 1e9
    assert [tier.name for tier in small.tiers] == ["nvlink", "pcie"]
    assert [tier.name for tier in pair.tiers] == ["nvlink"]
    assert (pair.num_ranks, pair.tiers[0].num_ranks) == (2, 2)


def test_an_eager_block_moves_more_bytes_by_hand() -> None:
    llama = job_of()
    bert = replace(llama, module=(*llama.module, ("norm_bias", True)))
    block = build_layers(llama.config)[1]
    norms, dropout = (eager_block(block, job) for job in (llama, bert))
    assert norms.elementwise_bytes_per_token - block.elementwise_bytes_per_token == 2 * 32 * 1024
    assert norms.activation_bytes_per_token - block.activation_bytes_per_token == 2 * 4 * 1024
    scores = 8 * 2048
    assert dropout.elementwise_bytes_per_token - block.elementwise_bytes_per_token == 42 * 1024 + 13 * scores
    assert [layer.attention and layer.attention.causal for layer in (block, norms, dropout)] == [True, True, False]


def test_some_blocks_are_recomputed_on_each_stage(cases: Cases) -> None:
    none, some, full = (
        cases.case(job_of(recompute=text)).predict() for text in ("none", "full on 1 * pp layers", "full")
    )
    assert none.seconds < some.seconds < full.seconds
    assert none.gib > some.gib > full.gib


def test_of_a_run_that_fitted_only_what_fits_is_a_candidate() -> None:
    predictions = iter([Prediction(9.0, 50.0, True), Prediction(20.0, 90.0, False)] * 2)
    entry = Entry(parse_row("mine", 2, STATED), (None, None))  # type: ignore[arg-type]
    assert entry.outcome(lambda _: next(predictions)).seconds == Range(9.0, 9.0)
    lost = Entry(replace(entry.row, outcome="oom"), entry.cases).outcome(lambda _: next(predictions))
    assert (lost.seconds, lost.fits) == (Range(9.0, 20.0), "open")


def test_rows_of_equal_jobs_are_predicted_once(monkeypatch: pytest.MonkeyPatch, cases: Cases) -> None:
    asked = list[Case]()

    def predict(case: Case, _: object = None) -> Prediction:
        asked.append(case)
        return Prediction(1.0, 1.0, True)

    monkeypatch.setattr(Case, "predict", predict)
    row = parse_row("mine", 2, {**STATED, "grad_dtype": "bf16"})
    entries = [*make_entries([row, replace(row, line=3), replace(row, line=4, tp=4, dp=4)], BOOK, cases)]
    assert len(predict_entries(entries)) == 3
    assert len(asked) == 2


ROWS = read_kernels()


def test_published_times_of_kernels_by_hand() -> None:
    assert product(100, 200, 300, 2.0).published_s == pytest.approx(2 * 100 * 200 * 300 / 2e12)
    full, masked = (KernelRow("", "attention", (64, causal, 0, 1000), 2.0, "").published_s for causal in (0, 1))
    assert full == pytest.approx(4 * 64 * 1000**2 / 2e12)
    assert masked == full / 2
    assert KernelRow("", "attention", (64, 0, 1, 1000), 2.0, "").published_s == pytest.approx(2.5 * full)


def product(m: int, n: int, k: int, tflops: float, device: str = "tiny", where: str = "here") -> KernelRow:
    return KernelRow(device, "product", (m, n, k), tflops, where)


@pytest.mark.parametrize("kind", ["product", "attention"])
@pytest.mark.parametrize("device", ["h100", "a100"])
def test_the_committed_constants_are_near_the_published_kernels(device: str, kind: str) -> None:
    rows = [row for row in ROWS if (row.device, row.kind) == (device, kind)]
    if not rows:
        assert (device, kind) == ("a100", "attention")
        return
    cluster = compose_devices([device], Composer())[device]
    errors = np.array([row.ratio(cluster) - 1.0 for row in rows])
    assert np.median(np.abs(errors)) < 0.08
    # Without a dependence on size it is far off, so the test can fail.
    sizes = ("gemm_half_flops", "gemm_half_width", "attention_half_tokens", "attention_half_head_dim")
    sizeless: Any = dict.fromkeys(sizes, 0.0)
    flat = replace(cluster, device=replace(cluster.device, **sizeless))
    assert np.median(np.abs([row.ratio(flat) - 1.0 for row in rows])) > np.median(np.abs(errors)) + 0.03


def test_forwards_are_means_over_microbatches_and_slower_at_half_the_rate() -> None:
    _, case, *others = plan_forwards(Composer())
    assert len(others) == 4
    cluster = case.truth.cluster
    half = replace(cluster.device, sustained_fraction=cluster.device.sustained_fraction / 2)
    slow = replace(case, truth=replace(case.truth, cluster=replace(cluster, device=half)))
    assert 20 < case.predicted_ms() < 400
    assert 1.5 * case.predicted_ms() < slow.predicted_ms() < 2 * case.predicted_ms()


def test_products_in_16_bits_on_known_devices_are_taken_and_count_once() -> None:
    products = read_products(load_book().products)
    assert {row.device for row in products} == {"a40", "a100", "h100"}
    (a40,) = (row for row in products if row.device == "a40")
    assert (a40.sizes, a40.tflops) == ((8000, 8000, 8000), 40.0)
    _, heading, lines = kernels_by_source_table([*ROWS, *ROWS, *products], Composer())
    assert len(heading) == len(lines[0])
    # Of ND A100 v4's eight products five are in both tables.
    assert sum(int(line[1]) for line in lines) == len(ROWS) + len(products) - 5
