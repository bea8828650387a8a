"""Entrain's Algorithm 3: against brute force, by hand, on its properties, and on others' microbatches."""

from __future__ import annotations

from itertools import chain, combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from entrain_bench.balancing.interface import Assigner
from entrain_bench.balancing.lpt import fill_groups
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.config.compose import compose
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.timeline import Timeline
from entrain_bench.run.experiment import prepare
from entrain_bench_strategies.dflop import DflopAssigner
from entrain_bench_strategies.dip import DipAssigner
from entrain_bench_strategies.entrain import (
    DeferringAssigner,
    EntrainAssigner,
    assign_microbatches,
    bottleneck_matching,
    defer_pairwise,
    effective_microbatches,
    maximum_matching,
    nearest_reachable,
    select_members,
    stratified_order,
    subset_sums,
)
from entrain_bench_strategies.megatron import ArrivalOrder
from support.builders import as_ints, chain_layout, profile_of, random_samples, samples, tiny_job, tiny_model

work = st.floats(0.0, 10.0, allow_nan=False).map(lambda value: round(value, 3))
bins = st.sampled_from([2, 8, 64, 512])
positive_work = st.floats(0.01, 10.0, allow_nan=False).map(lambda value: round(value, 3))
MODEL = tiny_model(encoder=4, llm=4)
SMALL = tiny_model(encoder=2, llm=2)


# a. Replicas


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_replicas_get_equally_many_samples_by_the_greedy_rule(dp: int, each: int, data: st.DataObject) -> None:
    llm = np.array(data.draw(st.lists(work, min_size=dp * each, max_size=dp * each)))
    order = np.array(data.draw(st.permutations(range(dp * each))))
    replica = fill_groups(order, llm, np.zeros(dp), False)
    assert np.bincount(replica, minlength=dp).tolist() == [each] * dp
    load, count = [0.0] * dp, [0] * dp
    for sample in order.tolist():
        open_replicas = [r for r in range(dp) if count[r] < each]
        chosen = int(replica[sample])
        assert chosen in open_replicas
        assert chosen == min(open_replicas, key=lambda r: load[r]), "of equally loaded ones the first"
        load[chosen] += float(llm[sample])
        count[chosen] += 1


# b. Effective microbatches


@pytest.mark.parametrize(
    ("encoder", "limit", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 4, 4),  # equal work: as many as asked
        ([1.0, 1.0, 1.0, 1.0], 2, 2),
        ([1.0] * 4, 9, 4),  # never more than samples with work
        ([0.7] * 3, 8, 3),  # 0.7 + 0.7 + 0.7 falls short of 3 x 0.7 in floating point
        ([0.3] * 10, 10, 10),
        ([5.0, 1.0, 1.0, 1.0], 4, 1),  # 8 / 5: one sample dominates
        ([4.0, 3.0, 3.0, 2.0], 4, 3),
        ([3.0], 8, 1),
        ([3.0, 0.0, 0.0], 8, 1),  # text-only samples bring no encoder work
        ([0.0, 0.0, 0.0], 2, 2),  # only text
        ([0.0, 0.0, 0.0], 8, 3),
    ],
)
def test_effective_microbatches(encoder: list[float], limit: int, expected: int) -> None:
    assert effective_microbatches(np.array([encoder]), limit).tolist() == [expected]


# c. Microbatches


def order_of(encoder: FloatArray, llm: FloatArray) -> IntArray:
    """The order of the samples of one replica."""
    (order,) = stratified_order(encoder[None], llm[None])
    return order


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(work, positive_work), min_size=1, max_size=20))
def test_coarse_samples_come_first_each_stratum_by_falling_encoder_work(rows: list[tuple[float, float]]) -> None:
    encoder, llm = (np.array(column) for column in zip(*rows, strict=True))
    order = order_of(encoder, llm)
    assert sorted(order.tolist()) == list(range(len(rows)))
    coarse = llm[order] > np.median(llm)
    assert np.all(coarse[:-1] >= coarse[1:]), "coarse, then fine"
    for stratum in (order[coarse], order[~coarse]):
        assert np.all(np.diff(encoder[stratum]) <= 0)
        equal = np.diff(encoder[stratum]) == 0
        assert np.all(np.diff(stratum)[equal] > 0), "of equal work in order of arrival"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(work, positive_work), min_size=1, max_size=20), st.integers(1, 6))
def test_each_sample_goes_to_the_least_encoder_work_then_the_least_llm_work(
    rows: list[tuple[float, float]], count: int
) -> None:
    encoder, llm = (np.array(column) for column in zip(*rows, strict=True))
    order = order_of(encoder, llm)
    microbatch = assign_microbatches(order, encoder, llm, count)
    loads = [(0.0, 0.0)] * count
    for sample in order.tolist():
        chosen = int(microbatch[sample])
        if encoder[sample] > 0:
            assert loads[chosen] == min(loads)
        else:
            assert loads[chosen][1] == min(load for _, load in loads)
        loads[chosen] = (loads[chosen][0] + float(encoder[sample]), loads[chosen][1] + float(llm[sample]))


# The whole assigner


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 8), st.integers(1, 6))
def test_assignments_are_balanced_over_replicas_and_defer_by_one_at_most(
    seed: int, dp: int, each: int, count: int
) -> None:
    shapes = random_samples(np.random.default_rng(seed), dp * each, longest=4000)
    profile = profile_of(tiny_job(MODEL, global_batch=len(shapes), microbatch_size=1), shapes)
    vision, llm = EntrainAssigner().assign(shapes, chain_layout(MODEL, 1, 1, count, dp), profile).modules
    owner = shapes.item_sample
    assert np.array_equal(vision.replica, llm.replica[owner])
    assert np.bincount(llm.replica, minlength=dp).tolist() == [each] * dp
    assert np.all(llm.microbatch < count)
    assert {*(llm.microbatch[owner] - vision.microbatch).tolist()} <= {0, 1}
    # A sample's items stay together.
    assert len({*zip(owner, vision.microbatch, strict=True)}) == len(np.unique(owner))


# d. Subsets


def all_subsets(count: int) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(range(count), size) for size in range(count + 1)))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.lists(st.integers(0, 70), min_size=1, max_size=4))
def test_the_chosen_subset_is_the_nearest_of_all(sizes: list[int], targets: list[int]) -> None:
    array = as_ints(sizes)
    weights = np.sqrt(array + 0.5)
    last, weight = subset_sums(array, weights)
    sums = {sum(sizes[i] for i in subset) for subset in all_subsets(len(sizes))}
    assert {total for total in range(len(last)) if last[total] != -1} == sums
    for target in targets:
        total = nearest_reachable(last, target)
        distance = min(abs(target - other) for other in sums)
        assert abs(target - total) == distance
        assert total == min(other for other in sums if abs(target - other) == distance)
        members = select_members(last, array, total).tolist()
        assert len(set(members)) == len(members)
        assert sum(sizes[i] for i in members) == total
        assert weight[total] == pytest.approx(sum(weights[i] for i in members))


# e. Matching


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.05, 0.9), st.integers(0, 2**32 - 1))
def test_as_many_rows_are_matched_as_can_be(rows: int, columns: int, density: float, seed: int) -> None:
    allowed = np.random.default_rng(seed).random((rows, columns)) < density
    column = maximum_matching(allowed)
    matched = np.flatnonzero(column >= 0)
    assert len(set(column[matched].tolist())) == len(matched)
    assert np.all(allowed[matched, column[matched]])
    assert len(matched) == np.count_nonzero(maximum_bipartite_matching(csr_array(allowed)) >= 0)


@pytest.mark.wide
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.data())
def test_bottleneck_matching_is_the_best_of_all_matchings(size: int, data: st.DataObject) -> None:
    values = st.integers(0, 9).map(float)
    pair = np.array(data.draw(st.lists(st.lists(values, min_size=size, max_size=size), min_size=size, max_size=size)))
    alone = np.array(data.draw(st.lists(values, min_size=size, max_size=size)))
    bottleneck, partner, defers = bottleneck_matching(pair, alone)
    best = min(max(min(alone[i], pair[i, partners[i]]) for i in range(size)) for partners in permutations(range(size)))
    assert bottleneck == best
    assert sorted(partner.tolist()) == list(range(size))
    for i in range(size):
        left = pair[i, partner[i]] if defers[i] else alone[i]
        assert left <= bottleneck


# d to f. Deferral


def loads(microbatch: IntArray, llm: FloatArray, count: int) -> FloatArray:
    return np.bincount(microbatch, weights=llm, minlength=count)


def assert_deferral_is_sound(before: IntArray, llm_s: FloatArray, count: int, num_bins: int) -> None:
    encoder, llm = defer_pairwise(before, llm_s, count, num_bins)
    assert len(encoder) == len(llm) == len(before)
    # The encoder's microbatches are the old ones in another order.
    renamed = {(int(old), int(new)) for old, new in zip(before, encoder, strict=True)}
    assert len(renamed) == len({old for old, _ in renamed}) == len({new for _, new in renamed})
    assert set(encoder.tolist()) <= set(range(count))
    old, own, new = (loads(labels, llm_s, count) for labels in (before, encoder, llm))
    assert new.sum() == pytest.approx(old.sum())
    # Samples move only from the first of a pair to the second.
    moved = encoder != llm
    assert np.all(encoder[moved] % 2 == 0)
    assert np.all(llm[moved] == encoder[moved] + 1)
    if count % 2 and count > 1:
        assert not np.any(moved & (encoder == count - 1))
        assert not np.any(moved & (llm == count - 1))
    # Overloaded first: the heavier half, by falling load; the median unpaired at the end.
    half = count // 2
    falling = np.sort(old)[::-1]
    if half:
        assert np.allclose(own[0 : 2 * half : 2], falling[:half])
        assert np.allclose(np.sort(own[1 : 2 * half : 2])[::-1], falling[count - half :])
    if count % 2 and half:
        assert own[-1] == pytest.approx(falling[half])
    assert new.max() <= old.max() * (1 + 1e-9), "the heaviest LLM microbatch got heavier"


@pytest.mark.wide
@settings(max_examples=200, deadline=None)
@given(st.lists(positive_work, min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 2**32 - 1), bins)
def test_deferral_moves_work_to_direct_successors_only_and_never_raises_the_maximum(
    values: list[float], count: int, seed: int, num_bins: int
) -> None:
    count = min(count, len(values))
    # Every microbatch gets a sample, the rest fall anywhere.
    rng = np.random.default_rng(seed)
    before = rng.permutation(np.concatenate([np.arange(count), rng.integers(0, count, len(values) - count)]))
    assert_deferral_is_sound(before, np.array(values), count, num_bins)


# LLM work of about 5, 3, 1 and 1.
A, B, C, D = (5000, [40]), (3000, [40]), (1000, [40]), (1000, [40])


def deferred(*rows: tuple[int, list[int]], base: Assigner | None = None, dp: int = 1) -> Assignment:
    """Microbatches of two samples in arrival order, then deferral."""
    shapes = samples(*rows)
    profile = profile_of(tiny_job(SMALL, global_batch=len(rows), microbatch_size=2), shapes)
    layout = chain_layout(SMALL, 1, 1, len(rows) // 2 // dp, dp=dp)
    return DeferringAssigner(base or ArrivalOrder()).assign(shapes, layout, profile)


def microbatches(assignment: Assignment) -> list[list[int]]:
    return [labels.microbatch.tolist() for labels in assignment.modules]


def test_half_the_difference_moves_to_the_partner_which_comes_second() -> None:
    # 8 against 2: B's 3 make both 5.
    assert microbatches(deferred(A, B, C, D)) == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert microbatches(deferred(C, D, A, B)) == [[1, 1, 0, 0], [1, 1, 0, 1]]


def test_replicas_are_the_bases_and_are_paired_by_themselves() -> None:
    # Microbatches go round the replicas: A and B, then C and D, in each.
    found = deferred(A, B, A, B, C, D, C, D, dp=2)
    assert found.modules[1].replica.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert microbatches(found) == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1, 1, 1]]


def test_items_cut_away_from_their_sample_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrain_bench_strategies.dip.EFFICIENCY", 0.01)
    with pytest.raises(IncompatibleError, match="base=DipAssigner: puts vision items of sample 1 and"):
        deferred((100, [40]), (100, [40]), (100, [40]), (100, [40]), base=DipAssigner())


def test_a_base_still_learns_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = object.__new__(Timeline), object.__new__(Profile)
    monkeypatch.setattr(DflopAssigner, "observe", lambda *_: DflopAssigner(0.5))
    assert DeferringAssigner(DflopAssigner()).observe(*nothing).base == DflopAssigner(0.5)
    assert DeferringAssigner(DflopAssigner()).draft().base == DflopAssigner(0.0)
    plain = DeferringAssigner(ArrivalOrder())
    assert plain.observe(*nothing) is plain
    assert plain.draft() is plain


@pytest.mark.parametrize(("workload", "least", "most"), [("synthchartnet_like", 28, 32), ("opencqa_ocr", 12, 25)])
def test_k_eff_is_near_k_on_the_capped_trace_only(workload: str, least: int, most: int) -> None:
    setting = prepare(compose("strategy=entrain", f"workload={workload}"))
    found = []
    for iteration in range(4):
        shapes = setting.source.batch(iteration, 512, seed=0)
        encoder_s, llm_s = setting.profile.estimates.samples(shapes, 2, 1)
        replica = fill_groups(np.argsort(-encoder_s, kind="stable"), llm_s, np.zeros(4), False)
        found += effective_microbatches(encoder_s[np.argsort(replica, kind="stable").reshape(4, -1)], 32).tolist()
    # Figure 15 of arXiv:2605.27918 shows about 30 microbatches of K = 32.
    assert least <= float(np.mean(found)) <= most
