"""Synthetic workloads and counterparts of traces: distributions, copula, stream and errors."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from entrain_bench.base.errors import UserError
from entrain_bench.specs.shapes import SampleShapes, shapes_from_lists
from entrain_bench.specs.tokens import TokenRules
from entrain_bench_workloads.marginals import Marginal, latent_root, match_ranks, nearest_root, parse_marginal
from entrain_bench_workloads.synthetic import BLOCK_SAMPLES, BlockSource, SyntheticWorkload
from entrain_bench_workloads.trace import TraceWorkload
from entrain_bench_workloads.twin import TwinWorkload, fit

RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)
U = np.array([0.0, 0.001, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999])
WIDE = {"kind": "lognormal", "median": 1000, "sigma": 1.0, "max": 1e6}


def source(text: Any = 10, modalities: Any = None, rank_correlation: Any = 0.0) -> BlockSource:
    workload = SyntheticWorkload(name="test", text=text, modalities=modalities or {}, rank_correlation=rank_correlation)
    return workload.source(RULES)


def totals(shapes: SampleShapes, modality: str) -> np.ndarray:
    items = shapes.items_of([modality])
    return shapes.sum_items(items, shapes.item_llm_tokens[items].astype(float))


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    return float(stats.spearmanr(first, second).statistic)


# Distributions.

positive = st.floats(0.05, 20)


@pytest.mark.wide
@given(positive, positive, st.floats(1, 1000))
def test_families_agree_with_scipy(a: float, b: float, scale: float) -> None:
    cases = [
        ({"kind": "lognormal", "median": scale, "sigma": a / 10}, stats.lognorm(a / 10, scale=scale)),
        ({"kind": "gamma", "shape": a, "scale": scale}, stats.gamma(a, scale=scale)),
        (
            {"kind": "bounded_pareto", "alpha": a, "low": scale, "high": scale * (1 + b)},
            stats.truncpareto(a, 1 + b, scale=scale),
        ),
    ]
    for config, reference in cases:
        marginal = parse_marginal(config, "text")
        quantiles = reference.ppf(U)
        assert np.allclose(marginal.ppf(U), quantiles, rtol=1e-6, atol=1e-9)
        assert np.allclose(marginal.cdf(quantiles), reference.cdf(quantiles), atol=1e-9)


def mixture(*parts: tuple[float, Any]) -> Marginal:
    weights, components = zip(*parts, strict=True)
    return parse_marginal({"kind": "mixture", "weights": list(weights), "components": list(components)}, "text")


def test_mixture_of_constants_by_hand() -> None:
    marginal = mixture((3, 10), (1, 20))
    assert np.round(marginal.ppf(U), 6).tolist() == [10] * 6 + [20] * 2  # three quarters are 10
    assert marginal.cdf(np.array([9.0, 10, 19, 20])).tolist() == [0, 0.75, 0.75, 1]


@pytest.mark.wide
@given(st.floats(0.05, 0.95), positive, st.floats(1, 1000))
@settings(max_examples=25)
def test_mixture_inverts_its_cdf(share: float, shape: float, median: float) -> None:
    gamma = {"kind": "gamma", "shape": shape, "scale": 50}
    marginal = mixture((share, gamma), (1 - share, {"kind": "lognormal", "median": median, "sigma": 0.5}))
    x = marginal.ppf(U[1:])

    def reference(at: np.ndarray) -> np.ndarray:
        gammas, lognormals = stats.gamma(shape, scale=50).cdf(at), stats.lognorm(0.5, scale=median).cdf(at)
        return np.asarray(share * gammas + (1 - share) * lognormals)

    # The quantile lies within a millionth of a token of where the CDF passes u.
    assert np.all(reference(x - 1e-6) <= U[1:])
    assert np.all(reference(x + 1e-6) >= U[1:])
    assert np.all(np.diff(x) >= 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("many", "text=many: must be a number or a mapping with kind, one of bounded_pareto, constant, gamma"),
        ({"kind": "gamma", "shape": 1}, r"text\.scale: missing"),
        ({"kind": "gamma", "shape": -1, "scale": 1}, r"text\.shape=-1\.0: must be a finite number above 0"),
        ({"kind": "constant", "value": -1}, r"text\.value=-1\.0: must be a finite number of at least 0"),
        ({"kind": "constant", "value": 1, "min": 5, "max": 4}, r"text\.min=5\.0: must be at most max=4"),
        ({"kind": "bounded_pareto", "alpha": 1, "low": 5, "high": 5}, r"text\.high=5\.0: must be above low=5"),
        ({"kind": "mixture", "weights": [1], "components": [1, 2]}, r"text\.weights=\[1.0\]: must be one number for"),
        ({"kind": "mixture", "weights": [], "components": []}, r"text\.components=\[\]: must be at least one"),
        ({"kind": "mixture", "weights": [1], "components": [{"kind": "x"}]}, r"text\.components\[0\]\.kind=x: unknown"),
    ],
)
def test_distribution_errors(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        source(text=config)
    assert str(caught.value).startswith("workload.text")
    assert "\n" not in str(caught.value)


# Copula.


@pytest.mark.wide
@settings(max_examples=20, deadline=None)
@given(st.floats(-0.95, 0.95), st.sampled_from([1, 2.5]), st.integers(0, 1000))
def test_copula_reaches_the_requested_rank_correlation(rho: float, items: float, seed: int) -> None:
    per_sample = {"kind": "bounded_pareto", "alpha": 1, "low": 1, "high": items} if items > 1 else 1
    image = {"llm_tokens": WIDE, "items_per_sample": per_sample}
    shapes = source(WIDE, {"image": image}, rho).batch(0, 3 * BLOCK_SAMPLES, seed)
    assert spearman(totals(shapes, "image"), shapes.text_tokens) == pytest.approx(rho, abs=0.04)


def test_pairs_are_set_one_by_one() -> None:
    modality = {"llm_tokens": WIDE, "encoder_tokens_per_llm_token": 1}
    pairs = {"text": {"image": 0.7}, "depth": {"image": -0.4}}
    made = source(WIDE, {"image": modality, "depth": modality, "audio": modality}, pairs)
    shapes = made.batch(0, 3 * BLOCK_SAMPLES, 0)
    image, depth, audio = (totals(shapes, name) for name in ("image", "depth", "audio"))
    assert spearman(image, shapes.text_tokens) == pytest.approx(0.7, abs=0.03)
    assert spearman(image, depth) == pytest.approx(-0.4, abs=0.03)
    for pair in ((depth, shapes.text_tokens), (audio, image), (audio, depth)):
        assert spearman(*pair) == pytest.approx(0.0, abs=0.03)


def test_latent_pearson_by_hand() -> None:
    root = latent_root(("text", "image"), 0.5, "rho")
    assert np.allclose(root @ root.T, [[1, 0.5176380902], [0.5176380902, 1]])  # 2 sin(15 degrees)


def test_match_ranks_by_hand() -> None:
    assert match_ranks(np.array([30, 10, 20]), np.array([0.5, 2.0, -1.0])).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("rho", "message"),
    [
        (1.5, r"rank_correlation=1\.5: must be a number from -1 to 1"),
        ({"text": 0.3}, r"rank_correlation\.text=0\.3: must be a mapping"),
        ({"text": {"imag": 0}}, r"rank_correlation\.text\.imag=imag: unknown \(did you mean image\?\)"),
        ({"text": {"image": 0.1}, "image": {"text": 0.2}}, r"image\.text=0\.2: must be the pair's other value 0\.1"),
        (-0.9, "must be positive semi-definite over text, image, audio"),
        ({"text": {"image": 0.9, "audio": 0.9}, "image": {"audio": -0.9}}, "positive semi-definite"),
    ],
)
def test_correlation_errors(rho: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        source(10, {"image": {"llm_tokens": 5}, "audio": {"llm_tokens": 5}}, rho)
    assert str(caught.value).startswith("workload.rank_correlation")


# Samples.


def test_sizes_follow_their_distributions() -> None:
    gamma = {"kind": "gamma", "shape": 3, "scale": 100}
    pareto = {"kind": "bounded_pareto", "alpha": 1.1, "low": 50, "high": 5000}
    shapes = source(gamma, {"image": {"llm_tokens": pareto, "items_per_sample": 3}}, 0.5).batch(0, 20_000, 1)
    cases = ((shapes.text_tokens, gamma), (shapes.item_llm_tokens, pareto))
    for drawn, config in cases:
        expected = parse_marginal(config, "text").ppf(np.linspace(0.05, 0.95, 19))
        assert np.allclose(np.quantile(drawn, np.linspace(0.05, 0.95, 19)), expected, rtol=0.05)
    assert np.all(np.diff(shapes.item_offsets) == 3)


def test_item_counts_and_text_only_samples() -> None:
    counts = {"kind": "mixture", "weights": [0.5, 0.5], "components": [1, 4]}
    image = {"llm_tokens": 10, "items_per_sample": counts, "probability": 0.6}
    shapes = source(modalities={"image": image}).batch(0, 20_000, 0)
    observed = np.bincount(np.diff(shapes.item_offsets)) / len(shapes)
    assert np.allclose(observed, [0.4, 0.3, 0, 0, 0.3], atol=0.02)
    none = {"llm_tokens": 10, "items_per_sample": 0}
    assert source(modalities={"image": none}).batch(0, 9, 0).num_items == 0
    assert source().batch(0, 9, 0).llm_tokens.tolist() == [10] * 9


def test_encoder_tokens_come_from_the_yaml_or_the_rules() -> None:
    plain = {"llm_tokens": 10}
    modalities = {"image": plain, "audio": plain, "depth": plain | {"encoder_tokens_per_llm_token": 1.5}}
    shapes = source(modalities=modalities).batch(0, 1, 0)
    assert [shapes.encoder_tokens([name]).tolist() for name in modalities] == [[40], [20], [15]]
    workload = SyntheticWorkload(name="test", text=1, modalities={"depth": {"llm_tokens": 10}})
    with pytest.raises(UserError, match=r"depth\.encoder_tokens_per_llm_token=null: must be a number"):
        workload.source(RULES)


AV: dict[str, dict[str, object]] = {
    "image": {"llm_tokens": WIDE, "items_per_sample": {"kind": "gamma", "shape": 2, "scale": 1}},
    "audio": {"llm_tokens": WIDE, "probability": 0.3},
}


def columns(shapes: SampleShapes) -> list[list[int]]:
    names = ("sample_ids", "text_tokens", "item_modality", "item_encoder_tokens", "item_llm_tokens")
    return [getattr(shapes, name).tolist() for name in names] + [np.diff(shapes.item_offsets).tolist()]


@pytest.mark.wide
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 6), st.integers(0, 5))
def test_random_access_equals_reading_in_order(num_samples: int, iteration: int, seed: int) -> None:
    in_order = source(WIDE, AV, 0.3).batch(0, (iteration + 1) * num_samples, seed)
    tail = in_order.take(np.arange(iteration * num_samples, (iteration + 1) * num_samples))
    assert columns(source(WIDE, AV, 0.3).batch(iteration, num_samples, seed)) == columns(tail)


def test_draw_follows_the_given_generator() -> None:
    made = source(WIDE, AV, 0.3)
    first, again, other = (made.draw(5000, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert columns(first) == columns(again)
    assert first.text_tokens.tolist() != other.text_tokens.tolist()
    assert first.sample_ids.tolist() == list(range(5000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modalities": {"text": {"llm_tokens": 4}}}, r"workload\.modalities\.text=\.\.\.: must be another name"),
        ({"modalities": {"image": 4}}, r"workload\.modalities\.image=4: must be a mapping"),
        ({"modalities": {"image": {"llm_tokens": 4, "probability": 1.1}}}, r"image\.probability=1\.1: must be from 0"),
        (
            {"modalities": {"image": {"llm_tokens": 4, "encoder_tokens_per_llm_token": 0}}},
            r"encoder_tokens_per_llm_token=0.0: must be null or above 0",
        ),
        ({"text": {"kind": "lognormal", "median": 1e9, "sigma": 30}}, r"workload\.text=.* \(drawn\): must be at most"),
        (
            {"modalities": {"image": {"llm_tokens": 4, "items_per_sample": 1e6}}},
            r"image\.items_per_sample=1000000 \(drawn\): must be at most 12207 on average",
        ),
    ],
)
def test_workload_errors(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"name": "test", "text": 10} | changes
    with pytest.raises(UserError, match=message):
        SyntheticWorkload(**arguments).source(RULES).batch(0, 4, 0)


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
