"""Sharded weights: FSDP's degrees, VeOmni's and OrchMLLM's balance within micro-steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program.assignment import Assignment
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.specs.job import Job
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.fsdp import micro_step_s, sharded_degrees, sharded_job
from entrain_bench_strategies.orchmllm import cut_padded, place_batches
from support.builders import as_ints, placed, profile_of, samples, tiny_job, tiny_model

SMALL = (
    "model=tiny",
    "cluster=tiny",
    "global_batch=16",
    "microbatch_size=2",
    "workload=synthetic",
    "layout.tp=null",
    "layout.dp=null",
)


def setting(*overrides: str) -> tuple[Job, Profile, Strategy]:
    made = prepare(compose_cells([*SMALL, *overrides])[0].config)
    return made.job, made.profile, made.strategy


def triples(job: Job) -> list[tuple[int, int, int]]:
    return [(degrees.tp, degrees.cp, degrees.dp) for degrees in sharded_degrees(job)]


def test_dp_is_what_tp_and_cp_leave_and_a_multiple_of_what_is_asked_for() -> None:
    job, _, _ = setting("strategy=fsdp", "layout.cp=1")
    assert triples(job) == [(1, 1, 4), (2, 1, 2), (4, 1, 1)]
    asked = replace(job, request=replace(job.request, dp=2))
    assert triples(asked) == [(1, 1, 4), (2, 1, 2)]
    default = prepare(compose_cells(["strategy=fsdp"])[0].config).job
    with pytest.raises(IncompatibleError, match=r"^layout\.dp=4: must be null or 32 with layout.cp=1"):
        sharded_job(default)
    free_tp = sharded_job(replace(default, request=replace(default.request, tp=None, dp=32)))
    assert triples(free_tp) == [(2, 1, 32)]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["layout.pp=2"], IncompatibleError, r"layout.pp=2: must be 1 or null with sharded weights"),
        (["encoder_optimizers=2"], IncompatibleError, r"encoder_optimizers=2: must be 1 with sharded weights"),
        (["layout.tp=2", "layout.dp=4", "layout.cp=1"], IncompatibleError, r"layout.dp=4: must be null or 2 with"),
        (["layout.dp=3", "layout.cp=1"], IncompatibleError, r"layout.dp=3: must be null or 4 or 2 or 1 with"),
        (["strategy.planner.num_trials=0"], UserError, r"strategy.planner.num_trials=0: must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(overrides: Sequence[str], error: type[UserError], message: str) -> None:
    def plan() -> None:
        _, profile, strategy = setting("strategy=fsdp", *overrides)
        strategy.plan(profile)

    with pytest.raises(error, match=message) as caught:
        plan()
    assert "\n" not in str(caught.value)


def test_recomputation_adds_a_forward_to_layers_that_compute_for_longer_than_they_gather() -> None:
    model = tiny_model()
    shapes = samples((64, [128]), (64, [128]))
    profile = profile_of(tiny_job(model), shapes)
    llm = model.llm
    alone = replace(placed(llm, [[[0]]]), sharding="zero3")
    # A microbatch of two samples of 96 tokens; one rank gathers nothing.
    times = profile.layers.measure(llm, np.full(2, 96), 1, 1)
    again_s = sum(float(times[kind].again_s[0]) for kind in llm.layer_kind if llm.kinds[kind].recomputed)
    plain_s = micro_step_s(profile, llm, alone, shapes)
    assert plain_s == pytest.approx(float(profile.layers.layer_s(llm, np.full(2, 96), 1, 1).sum()))
    assert micro_step_s(profile, llm, replace(alone, recompute=True), shapes) == pytest.approx(plain_s + again_s)


def test_veomni_moves_items_within_their_micro_step_and_leaves_samples() -> None:
    job, profile, strategy = setting("strategy=veomni", "layout.tp=1", "layout.cp=1")
    layout, plain = strategy.plan(profile), setting("strategy=fsdp")[2]
    shapes = profile.samples.draw(job.global_batch)
    ours, arrived = (each.assigner.assign(shapes, layout, profile) for each in (strategy, plain))
    np.testing.assert_array_equal(ours.modules[-1].replica, arrived.modules[-1].replica)
    np.testing.assert_array_equal(ours.modules[0].microbatch, arrived.modules[0].microbatch)
    tokens = job.model.encoders[0].lengths(shapes, job.model.encoders[0].units(shapes))
    row = ours.modules[0].microbatch
    assert fullest(tokens**2, ours.modules[0].replica, row) < fullest(tokens**2, arrived.modules[0].replica, row)


def prepared(*overrides: str) -> RunContext:
    small = ["strategy=orchmllm", "model=tiny_av", "workload=synthetic_av", "cluster=a40x16", "global_batch=64"]
    return prepare(compose_cells([*small, "microbatch_size=2", "layout.tp=1", "layout.dp=null", *overrides])[0].config)


def assigned(made: RunContext) -> tuple[SampleShapes, Assignment]:
    layout = made.strategy.plan(made.profile)
    shapes = made.profile.samples.draw(made.job.global_batch)
    return shapes, made.strategy.assigner.assign(shapes, layout, made.profile)


def fullest(values: np.ndarray, replica: np.ndarray, row: np.ndarray) -> float:
    table = np.zeros((row.max() + 1, 16))
    np.add.at(table, (row, replica), values)
    return float(table.max(axis=1).sum())


def test_every_phase_is_evener_than_on_arrival_and_keeps_its_micro_steps() -> None:
    made, plain = prepared(), prepared("strategy=fsdp")
    (shapes, ours), (same, arrived) = assigned(made), assigned(plain)
    np.testing.assert_array_equal(shapes.sample_ids, same.sample_ids)
    for module, one, other in zip(made.job.model.modules, ours.modules, arrived.modules, strict=True):
        np.testing.assert_array_equal(one.microbatch, other.microbatch)
        cost = module.forward_flops(module.lengths(shapes, module.units(shapes)))
        ours_most, arrived_most = (fullest(cost, each.replica, one.microbatch) for each in (one, other))
        # Of audio the longest segment is more than the others' share.
        assert ours_most <= arrived_most if module.name == "audio" else ours_most < arrived_most, module.name


def test_rearrangement_leaves_balance_alone_and_keeps_more_on_its_node() -> None:
    (shapes, near), (_, far) = assigned(prepared()), assigned(prepared("strategy.assigner.node_wise=false"))
    model, kept = prepared().job.model, []
    for labels in (near, far):
        llm, total = labels.modules[-1], 0
        for module, own in zip(model.encoders, labels.modules, strict=False):
            units = module.units(shapes)
            home = llm.replica[shapes.item_sample[units]]
            total += int(shapes.item_llm_tokens[units][own.replica // 4 == home // 4].sum())
        kept.append(total)
    assert kept[0] > kept[1]
    for module, one, other in zip(model.modules, near.modules, far.modules, strict=True):
        cost = module.forward_flops(module.lengths(shapes, module.units(shapes)))
        rows = [fullest(cost, each.replica, each.microbatch) for each in (one, other)]
        assert rows[0] == pytest.approx(rows[1], rel=1e-12)


@pytest.mark.wide
def test_a_padded_module_must_be_one_of_the_models() -> None:
    made = prepared("strategy.assigner.padded=[pictures]")
    layout = prepared("strategy=fsdp").strategy.plan(made.profile)
    drawn = made.profile.samples.draw(64)
    with pytest.raises(UserError, match=r"strategy.assigner.padded=pictures"):
        made.strategy.assigner.assign(drawn, layout, made.profile)
    shapes, padded = assigned(prepared("strategy.assigner.padded=[audio]"))
    assert len(padded.modules[1].replica) == len(prepared().job.model.encoders[1].units(shapes))


def dearest(rising: np.ndarray, batch: np.ndarray) -> float:
    """Cost of the dearest padded batch: its units times the dearest of them."""
    return max((np.sum(batch == one) * rising[batch == one].max() for one in np.unique(batch)), default=0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_padded_batches_are_the_best_cuts(lengths: list[int], count: int) -> None:
    rising = np.sort(np.array(lengths, float), kind="stable")
    batch = cut_padded(rising, count)
    assert batch.max() < count
    cuts = (cut for most in range(count) for cut in combinations(range(1, len(rising)), most))
    best = min(dearest(rising, np.searchsorted(np.array(cut), np.arange(len(rising)), side="right")) for cut in cuts)
    assert dearest(rising, batch) == pytest.approx(best, rel=1e-9)


def stays(replica: np.ndarray, home: np.ndarray, tokens: np.ndarray, node: np.ndarray) -> tuple[int, int]:
    """Tokens that stay on their node, and on their replica."""
    return int(tokens[node[replica] == node[home]].sum()), int(tokens[replica == home].sum())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_batches_are_placed_as_well_as_any_permutation_places_them(data: st.DataObject) -> None:
    node = as_ints(data.draw(st.sampled_from([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 1, 2]])))
    count = data.draw(st.integers(1, 8))
    draws = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    batch, home = as_ints(data.draw(draws)), as_ints(data.draw(draws))
    tokens = as_ints(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    row = np.zeros(count, np.int64)
    replica = place_batches(row, batch, home, tokens, node)
    for one in np.unique(batch):
        assert len(np.unique(replica[batch == one])) == 1
    assert len(np.unique(replica)) == len(np.unique(batch))
    best = max(stays(np.array(order)[batch], home, tokens, node) for order in permutations(range(4)))
    assert stays(replica, home, tokens, node) == best
