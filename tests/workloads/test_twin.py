"""Synthetic twins: the trace's sizes, counts and rank correlations, in any number of samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from entrain_bench.specs.shapes import SampleShapes, shapes_from_lists
from entrain_bench.specs.tokens import TokenRules
from entrain_bench_workloads.copula import nearest_root
from entrain_bench_workloads.trace import TraceWorkload
from entrain_bench_workloads.twin import TwinWorkload, fit

RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)
TRACES = ["chartqa_test_by_image", "opencqa_ocr", "mathvision", "nextqa_oe_by_video", "librispeech"]


def media(shapes: SampleShapes) -> np.ndarray:
    return shapes.llm_tokens - shapes.text_tokens


@pytest.mark.wide
@pytest.mark.parametrize("name", TRACES)
def test_marginals_and_rank_correlation_are_the_trace_s(name: str) -> None:
    trace = TraceWorkload(path=f"{name}.parquet").source(RULES).shapes
    twin = TwinWorkload(path=f"{name}.parquet").source(RULES).batch(0, 8192, seed=0)
    for sizes in (lambda shapes: shapes.text_tokens, media):
        # The largest distance of two samples of one distribution, of these sizes, is below that in all but 1 of 10^4.
        bound = 2.3 * np.sqrt((len(trace) + 8192) / (len(trace) * 8192))
        assert stats.ks_2samp(sizes(trace), sizes(twin)).statistic < bound + (0.02 if sizes is media else 0.0)
    mine, theirs = (stats.spearmanr(shapes.text_tokens, media(shapes)).statistic for shapes in (twin, trace))
    assert mine == pytest.approx(theirs, abs=0.05)
    assert twin.modalities == tuple(name for name in trace.modalities if trace.items_of([name]).size)
    ratio = [shapes.item_encoder_tokens.sum() / shapes.item_llm_tokens.sum() for shapes in (twin, trace)]
    assert ratio[0] == pytest.approx(ratio[1], rel=0.01)


def test_samples_without_items_and_several_items_of_a_sample() -> None:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(4000):
        text, count = int(rng.integers(1, 100)), int(rng.choice([0, 1, 5], p=[0.5, 0.3, 0.2]))
        samples.append((text, [("image", 4 * int(size), int(size)) for size in text * 10 * rng.choice([1, 3], count)]))
    shapes = shapes_from_lists(["image"], samples)
    twin = fit("t", shapes, None).batch(0, 8192, seed=1)
    counts = [np.bincount(np.diff(each.item_offsets), minlength=6) / len(each) for each in (shapes, twin)]
    np.testing.assert_allclose(counts[0], counts[1], atol=0.03)
    np.testing.assert_array_equal(twin.item_encoder_tokens, 4 * twin.item_llm_tokens)
    assert media(twin).mean() == pytest.approx(media(shapes).mean(), rel=0.1)


def test_a_stream_is_the_same_in_any_batches_and_has_a_context() -> None:
    source = TwinWorkload(path="opencqa_ocr.parquet").source(RULES)
    whole = source.batch(0, 600, seed=3)
    parts = [source.batch(index, 200, seed=3).text_tokens for index in range(3)]
    np.testing.assert_array_equal(whole.text_tokens, np.concatenate(parts))
    trace = TraceWorkload(path="opencqa_ocr.parquet").source(RULES)
    short = fit("t", trace.shapes, 700).batch(0, 4096, seed=0)
    assert short.llm_tokens.max() <= 700
    assert len(short) == 4096


def test_its_name_and_data_are_the_trace_s() -> None:
    twin, trace = (kind(path="mathvision.parquet") for kind in (TwinWorkload, TraceWorkload))
    assert (twin.name, trace.name) == ("mathvision_twin", "mathvision")
    assert twin.fingerprint() == trace.fingerprint()
    assert TwinWorkload(path="mathvision.parquet", name="mine").name == "mine"


def test_impossible_correlations_are_weakened() -> None:
    possible = np.array([[1.0, 0.5], [0.5, 1.0]])
    pearson = 2 * np.sin(np.pi * 0.5 / 6)
    np.testing.assert_allclose(
        nearest_root(possible) @ nearest_root(possible).T, [[1, pearson], [pearson, 1]], atol=1e-12
    )
    impossible = np.array([[1.0, 0.9, -0.9], [0.9, 1.0, 0.9], [-0.9, 0.9, 1.0]])
    root = nearest_root(impossible)
    found = root @ root.T
    np.testing.assert_allclose(np.diag(found), 1.0, atol=1e-6)
    assert 0.3 < found[0, 1] < 0.9
    np.testing.assert_allclose(nearest_root(np.ones((3, 3))) @ nearest_root(np.ones((3, 3))).T, 1.0, atol=1e-9)
