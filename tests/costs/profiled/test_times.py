"""Layer times between the points of a profile, and clusters made of one."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.arrays import FloatArray, offsets_from_counts
from entrain_bench.base.errors import UserError
from entrain_bench.costs.layer_times import PassTimes, Stages
from entrain_bench.costs.links import all_gather_s, all_reduce_s, send_s
from entrain_bench.costs.profiled.file import CollectivePoint, DeviceProfile
from entrain_bench.costs.profiled.times import ProfiledTimes, cluster_with_times, fitted_link
from entrain_bench.costs.roofline import Roofline
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.cluster import ClusterSpec, LinkTier
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from support.builders import tiny_cluster
from support.profiled import (
    BACKWARD,
    REMADE,
    SEGMENT_S,
    layer_s,
    noise,
    profile_of_formula,
    stage_s,
    three,
    written,
)

MODEL = ModelSpec.from_config(compose_cells(["model=tiny"])[0].config.model)
VISION, LLM = MODEL.modules
CLUSTER = tiny_cluster()


@cache
def profile(seed: int | None = None) -> DeviceProfile:
    return profile_of_formula(MODEL, error=noise(seed, 0.3)) if seed is not None else profile_of_formula(MODEL)


def times(seed: int | None = None, extrapolate: bool = False) -> ProfiledTimes:
    return ProfiledTimes.of(profile(seed), MODEL, CLUSTER, FrameworkOptions(), "cluster.device.path=x", extrapolate)


def one_pack(module_times: ProfiledTimes, lengths: list[int], recompute: bool = False, **degrees: int) -> PassTimes:
    """The LLM in two stages on one pack."""
    loads = module_times.loads(LLM, np.array(lengths), np.array([0, len(lengths)]))
    counts = LLM.kind_counts([4, 6])
    return module_times.stages_s(LLM, loads, Stages(counts, degrees.get("tp", 1), degrees.get("cp", 1), recompute))


# Lengths of no measured pack: the formula is linear, so curves are exact between knots.
LENGTHS = [700, 20, 300]


@pytest.mark.parametrize("recompute", [False, True])
def test_stages_are_their_layers_and_what_a_stage_adds(recompute: bool) -> None:
    embed, block, head = (layer_s(layer.attention, LENGTHS) for layer in LLM.kinds)
    beside = stage_s(sum(LENGTHS))
    found = one_pack(times(), LENGTHS, recompute)
    assert found.forward_s[0] == pytest.approx([embed + 3 * block + beside, 5 * block + head + beside], rel=1e-4)
    back = REMADE if recompute else BACKWARD
    # Neither embedding nor head is recomputed.
    expected = [BACKWARD * embed + back * (3 * block + beside), BACKWARD * head + back * (5 * block + beside)]
    assert found.backward_s[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.wide
def test_layers_are_recomputed_one_by_one() -> None:
    loads = times().loads(LLM, np.array(LENGTHS), np.array([0, len(LENGTHS)]))
    counts = LLM.kind_counts([4, 6])

    def backward_s(remade: list[int]) -> FloatArray:
        again = np.zeros((1, *counts.shape))
        again[0, :, 1] = remade
        return times().stages_s(LLM, loads, Stages(counts, 1, 1, again)).backward_s[0]

    none, every = (one_pack(times(), LENGTHS, flag).backward_s[0] for flag in (False, True))
    assert np.array_equal(backward_s([0, 0]), none)
    assert backward_s([3, 5]) == pytest.approx(every, rel=1e-12)
    block, beside = layer_s(LLM.kinds[1].attention, LENGTHS), stage_s(sum(LENGTHS))
    # What a stage adds is once more there as soon as one of its blocks is.
    more = [(REMADE - BACKWARD) * (block + beside), (REMADE - BACKWARD) * (2 * block + beside)]
    assert backward_s([1, 2]) - none == pytest.approx(more, rel=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize("recompute", [False, True])
def test_a_split_backward_is_shared_out_by_flops(recompute: bool) -> None:
    loads = times().loads(LLM, np.array(LENGTHS), np.array([0, len(LENGTHS)]))
    counts = LLM.kind_counts([4, 6])
    whole, split = (times().stages_s(LLM, loads, Stages(counts, 1, 1, recompute), flag) for flag in (False, True))
    assert whole.weight_s is None
    assert split.weight_s is not None
    assert split.backward_s + split.weight_s == pytest.approx(whole.backward_s, rel=1e-12)
    # Products of a block: 2 x 128 x 256 weights, and attention over causal scores with a query width of 128.
    tokens, weights = sum(LENGTHS), 128 * 256 + 128 * 128 + 128 * 512 + 256 * 128
    products, scores = 2 * weights * tokens, 4 * 128 * float(loads.areas["block"][0])
    _, block, head = (layer_s(layer.attention, LENGTHS) for layer in LLM.kinds)
    share = products / (2 * products + 2.5 * scores)
    expected = [BACKWARD * 3 * block * share, BACKWARD * (5 * block * share + head / 2)]
    assert split.weight_s[0] == pytest.approx(expected, rel=1e-3)
    assert np.array_equal(split.backward_comm_s, whole.backward_comm_s)
    for found, stage in zip(times().layers_s(LLM, loads, 1, 1, True), (0.0, share, 0.5), strict=True):
        assert found.weight_s is not None
        assert found.weight_s == pytest.approx(stage * (found.backward_s + found.weight_s), rel=1e-12)


def test_windows_are_counted_as_segments() -> None:
    windowed = VISION.kinds[1]
    assert windowed.kind == "window_block"
    loads = times().loads(VISION, np.array([64, 65]), np.array([0, 1, 2]))
    assert loads.segments["window_block"].tolist() == [1.0, 2.0]
    assert loads.segments["block"].tolist() == [1.0, 1.0]
    found = times().layers_s(VISION, loads, 1, 1)[1]
    assert found.forward_s == pytest.approx([layer_s(windowed.attention, [n]) for n in (64, 65)], rel=1e-3)


def test_tensor_parallel_shards_are_those_measured_and_communicate_as_the_roofline_has_it() -> None:
    block = LLM.kinds[1]
    loads = times().loads(LLM, np.array(LENGTHS), np.array([0, 3]))
    found = times().layers_s(LLM, loads, 2, 1)[1]
    assert found.forward_s[0] == pytest.approx(layer_s(block.attention, LENGTHS, tp=2), rel=1e-4)
    comm, back = Roofline(CLUSTER).comm_s(block, loads.tokens, 2, 1, (found.forward_s, found.backward_s))
    assert found.forward_comm_s[0] == comm[0] > 0
    assert found.backward_comm_s[0] == back[0]
    again = one_pack(times(), LENGTHS, recompute=True, tp=2)
    plain = one_pack(times(), LENGTHS, tp=2)
    # The blocks' communication is repeated with their forwards; the embedding's is not.
    assert again.backward_comm_s[0, 0] - plain.backward_comm_s[0, 0] == pytest.approx(3 * comm[0])


def test_context_parallel_ranks_have_a_share_of_all_but_two_runs_of_every_sequence() -> None:
    whole = times().loads(LLM, np.array([400, 200]), np.array([0, 2]))
    shares = times().layers_s(LLM, whole, 1, 2)[1].forward_s[0]
    once = layer_s(LLM.kinds[1].attention, [400, 200]) - 2 * SEGMENT_S
    assert shares == pytest.approx(1e-4 + (once - 1e-4) / 2 + 4 * SEGMENT_S, rel=1e-4)


@pytest.mark.wide
def test_a_context_parallel_degree_that_was_profiled_has_times_of_its_own() -> None:
    both = profile_of_formula(MODEL, contexts=(1, 2))
    found = ProfiledTimes.of(both, MODEL, CLUSTER, FrameworkOptions(), "cluster.device.path=x")
    loads, attention = found.loads(LLM, np.array(LENGTHS), np.array([0, 3])), LLM.kinds[1].attention
    for tp, cp in ((1, 2), (2, 2)):
        own = layer_s(attention, LENGTHS, tp, cp)
        assert found.layers_s(LLM, loads, tp, cp)[1].forward_s[0] == pytest.approx(own, rel=1e-4)
        assert times().layers_s(LLM, loads, tp, cp)[1].forward_s[0] < 0.9 * own
    # Others are still those of degree 1: no token of another rank is copied.
    other, same = (each.layers_s(LLM, loads, 1, 4)[1].forward_s[0] for each in (found, times()))
    assert other == pytest.approx(same, rel=1e-9)


def test_an_optimizer_step_is_a_start_and_a_share_a_parameter() -> None:
    assert times().optimizer_s(np.array([0.0, 5e6])) == pytest.approx([0.0, 1e-4 + 5e-3], rel=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("lengths", "tp", "says"),
    [
        (
            [2_000_000],
            1,
            "llm embed at tp 1: 2000000 tokens with 0 attention scores; the profile covers 1..1048576 tokens",
        ),
        ([16], 4, r"llm embed was profiled at tp 1, 2, not at 4. To add degrees, run entrain-bench profile tp=\["),
    ],
)
def test_what_was_not_measured_is_named(lengths: list[int], tp: int, says: str) -> None:
    with pytest.raises(UserError, match=f"^cluster.device.path=x: {says}"):
        one_pack(times(), lengths, tp=tp)


@pytest.mark.wide
def test_sequences_too_long_together_are_named_and_extrapolated_on_request() -> None:
    # Long sequences were left out: as many tokens were measured, but in many sequences.
    stages = tuple(p for p in profile().stages if p.kind in ("embed", "head") or max(p.lengths) <= 8192)
    short = ProfiledTimes.of(
        DeviceProfile(profile().subject, profile().constants, "", True, stages, profile().steps),
        MODEL,
        CLUSTER,
        FrameworkOptions(),
        "cluster.device.path=x",
    )
    says = r"llm block at tp 1: 40000 tokens with 8e\+08 attention scores; the profile covers .* with 0..\d"
    with pytest.raises(UserError, match=says):
        one_pack(short, [40_000])
    seconds = one_pack(short.beyond, [40_000]).forward_s[0, 1]
    expected = 5 * layer_s(LLM.kinds[1].attention, [40_000]) + layer_s(None, [40_000]) + stage_s(40_000)
    assert seconds == pytest.approx(expected, rel=1e-3)


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 5), draw=st.integers(0, 2**31), tp=st.integers(1, 2), cp=st.integers(1, 2))
def test_times_rise_and_no_packing_beats_the_least_work(seed: int, draw: int, tp: int, cp: int) -> None:
    rng = np.random.default_rng(draw)
    noisy = times(seed)
    module = MODEL.modules[int(rng.integers(2))]
    lengths = rng.integers(1, 3000, 12)
    counts, recompute = module.kind_counts([3, 7]), bool(rng.integers(2))

    def seconds(offsets: np.ndarray) -> np.ndarray:
        return noisy.stages_s(module, noisy.loads(module, lengths, offsets), Stages(counts, tp, cp, recompute)).total_s

    cuts = np.sort(rng.integers(0, 13, int(rng.integers(0, 6))))
    packed = seconds(np.concatenate([[0], cuts, [12]]))
    least = noisy.work_s(module, noisy.loads(module, lengths, np.array([0, 12])), Stages(counts, tp, cp, recompute))
    assert (packed.sum(axis=0) >= least[0] * (1 - 1e-12)).all()
    # A chunk takes at least as long as any of its sequences alone.
    alone, together = seconds(np.arange(13)), seconds(offsets_from_counts(np.array([12])))
    assert (alone.max(axis=0) <= together[0] * (1 + 1e-12)).all()


def cluster(path: Path, *overrides: str) -> ClusterSpec:
    override = written(path, profile_of_formula(MODEL, tokens=(1,)))
    given = ("model=tiny", "cluster=tiny", "cluster/device=profiled", override, *overrides)
    config = compose_cells(given)[0].config
    return cluster_with_times(config.cluster, MODEL, config.framework, config.speed)[0]


def test_links_that_are_left_to_the_profile_are_those_it_measured(tmp_path: Path) -> None:
    found = cluster(tmp_path / "x.json", "cluster/node=profiled")
    (tier,) = found.tiers
    assert (tier.num_ranks, found.num_ranks) == (4, 4)
    assert tier.bandwidth_bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert tier.latency_s == pytest.approx(1e-5, rel=1e-3)


def test_what_was_timed_otherwise_is_refused(tmp_path: Path) -> None:
    for override, says in (
        ("freeze=[vision]", r"must be \[\] with cluster/device=profiled, because .* measured with it"),
        ("recompute_granularity=selective", "must be full with cluster/device=profiled, because .* measured with it"),
    ):
        with pytest.raises(UserError, match=says):
            cluster(tmp_path / "x.json", override)


def test_a_fitted_link_gives_back_what_the_formulas_say() -> None:
    tier, sizes = LinkTier("x", 8, 3e9, 2e-5), np.array([1e3, 1e6])
    formulas = {
        "all_gather": lambda size: all_gather_s(size, 4, tier),
        "reduce_scatter": lambda size: all_gather_s(size, 4, tier),
        "all_reduce": lambda size: all_reduce_s(size, 4, tier),
        "send": lambda size: send_s(size, 1, tier),
    }
    points = tuple(
        CollectivePoint(name, 4, int(size), three(float(formula(size))), 9)
        for name, formula in formulas.items()
        for size in sizes
    )
    link = fitted_link(points, "x")
    assert link == pytest.approx({"bandwidth_bytes_per_s": 3e9, "latency_s": 2e-5}, rel=1e-3)


def test_links_that_were_not_measured_are_named(tmp_path: Path) -> None:
    profile = replace(profile_of_formula(MODEL, tokens=(1,)), collectives=())
    override = written(tmp_path / "x.json", profile)
    given = ("model=tiny", "cluster=tiny", "cluster/device=profiled", "cluster/node=profiled", override)
    with pytest.raises(UserError, match=r"tiers.profiled: communication was not measured. Run .* profile ranks="):
        prepare(compose_cells(given)[0].config)
