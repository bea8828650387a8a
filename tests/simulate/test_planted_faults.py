"""Faults planted in one of two simulators make them disagree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs import layer_times, loads, roofline, sharding, steps, truth
from entrain_bench.costs.edges import LinkTransfers
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModuleSpec
from support.agreement import AGREE, FRAMEWORKS, GROUPS, SMALL, decided, disagreement, random_case


def backward_attention_takes_longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roofline, "ATTENTION_BACKWARD", 2.6)


def tiles_are_larger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loads, "KEY_TILE", 128)


def nobody_is_held(patch: pytest.MonkeyPatch) -> None:
    held = truth.held_s
    patch.setattr(truth, "held_s", lambda *given: 0 * held(*given))


def gradients_wait_for_the_end_of_a_backward(patch: pytest.MonkeyPatch) -> None:
    def lag_s(layer_s: FloatArray, traffic: steps.Traffic) -> FloatArray:
        return np.full(len(layer_s), traffic.sync_s.sum())

    patch.setattr(steps, "sync_lag_s", lag_s)


def weights_are_there_from_the_start(patch: pytest.MonkeyPatch) -> None:
    lead_s = steps.gather_lead_s
    patch.setattr(steps, "gather_lead_s", lambda *given: 0 * lead_s(*given))


def all_tiers_are_one_link(patch: pytest.MonkeyPatch) -> None:
    queue = truth.transfers_between_blocks

    def same_links(
        layout: Layout, source: IntArray, target: IntArray, tier: IntArray, link_s: FloatArray
    ) -> LinkTransfers:
        return queue(layout, source, target, 0 * tier, link_s)

    patch.setattr(truth, "transfers_between_blocks", same_links)


def rings_leave_nodes_over_one_link(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClusterSpec, "ring_tiers", lambda self, rings: [self.group_tier(ring) for ring in rings])


def every_stage_is_split_into_buckets(patch: pytest.MonkeyPatch) -> None:
    split = steps.bucket_parameters
    patch.setattr(steps, "bucket_parameters", lambda parameters, copies, _: split(parameters, copies, True))


def products_hide_nothing(patch: pytest.MonkeyPatch) -> None:
    exposed_s = roofline.Roofline._exposed_s
    patch.setattr(roofline.Roofline, "_exposed_s", lambda self, comm, _, *given: exposed_s(self, comm, 0, *given))


def gradients_are_reduced_before_weight_passes(patch: pytest.MonkeyPatch) -> None:
    def last_backwards(program: Program, index: int) -> list[IntArray]:
        return steps._last(program, index, Pass.BACKWARD, slice(None))

    patch.setattr(steps, "last_of_stages", last_backwards)


def no_pass_gathers_for_the_next(patch: pytest.MonkeyPatch) -> None:
    neighbours = sharding._neighbours
    patch.setattr(sharding, "_neighbours", lambda *given: tuple(np.full_like(each, -1) for each in neighbours(*given)))


def one_lane_of_a_pass_decides(patch: pytest.MonkeyPatch) -> None:
    neighbours = sharding._neighbours

    def of_one_lane(program: Program, sharded: IntArray) -> list[IntArray]:
        """Actions before and after each action on its last lane."""
        found = []
        for each in neighbours(program, sharded):
            last = np.zeros(program.num_actions, np.int64)
            last[program.lane_actions] = np.arange(len(program.lane_actions))
            found.append(each[last[program.lane_actions]])
        return found

    patch.setattr(sharding, "_neighbours", of_one_lane)


def replicas_do_not_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(truth, "passes_together", lambda program: np.full(program.num_actions, -1))


def buckets_slow_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps.StepCosts, "_slowed_s", lambda _, exposed_s, __: exposed_s)


def transfers_slow_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(truth, "held_s", lambda program, *_: np.zeros(program.num_actions))


def the_host_never_lags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(roofline.Roofline, "_issued_s", lambda _, __, *passes: passes[:2])


@pytest.mark.wide
@pytest.mark.parametrize("plant", [buckets_slow_nothing, transfers_slow_nothing, the_host_never_lags])
def test_a_fault_in_slowdowns_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    # Stages of several buckets.
    case, framework = decided("megatron"), FrameworkOptions(p2p="overlapped")
    device = replace(case.cluster.device, overlap_cost=0.4, host_launch_s=1e-3)
    case = replace(case, cluster=replace(case.cluster, device=device))
    case = replace(case, cluster_config={**case.cluster_config, "device": asdict(device)})
    assert disagreement(case, framework) < AGREE
    plant(monkeypatch)
    assert disagreement(case, framework) > 1e3 * AGREE


def all_groups_run_as_the_narrowest(patch: pytest.MonkeyPatch) -> None:
    degrees = ModuleLayout.at
    patch.setattr(ModuleLayout, "at", lambda placed, _: degrees(placed, 0))


def chunks_recompute_a_block_less(patch: pytest.MonkeyPatch) -> None:
    remade = layer_times.remade_kinds

    def one_less(module: ModuleSpec, layers: Sequence[int], counts: IntArray) -> FloatArray:
        return remade(module, layers, np.maximum(counts - 1, 0))

    patch.setattr(layer_times, "remade_kinds", one_less)


ZB_H1 = (*SMALL, "strategy.planner.schedules=[zb_h1]")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("plant", "name", "strategy", "overrides"),
    [
        (backward_attention_takes_longer, "default", "megatron", SMALL),
        (tiles_are_larger, "default", "dip", SMALL),
        (nobody_is_held, "default", "entrain", SMALL),
        (weights_are_there_from_the_start, "default", "hetero_colocated", SMALL),
        (all_tiers_are_one_link, "overlapped transfers", "disttrain", ()),
        (rings_leave_nodes_over_one_link, "nothing overlaps", "dflop", SMALL),
        (every_stage_is_split_into_buckets, "default", "disttrain", ()),
        (products_hide_nothing, "whole hidden states", "megatron", SMALL),
        # Stages of several buckets.
        (gradients_wait_for_the_end_of_a_backward, "default", "megatron", ()),
        (gradients_are_reduced_before_weight_passes, "default", "megatron_schedules", ZB_H1),
        (no_pass_gathers_for_the_next, "default", "fsdp", SMALL),
        (replicas_do_not_wait_for_each_other, "default", "orchmllm", SMALL),
        (replicas_do_not_wait_for_each_other, "default", "flexsp", SMALL),
        (all_groups_run_as_the_narrowest, "default", "flexsp", SMALL),
        (all_groups_run_as_the_narrowest, "default", "hybrid_cp", GROUPS),
        (chunks_recompute_a_block_less, "default", "braid", GROUPS),
    ],
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    strategy: str,
    overrides: tuple[str, ...],
) -> None:
    case, framework = decided(strategy, *overrides), FRAMEWORKS[name]
    assert disagreement(case, framework) < AGREE
    plant(monkeypatch)
    assert disagreement(case, framework) > 1e3 * AGREE


def test_a_fault_on_lanes_of_sharded_passes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    one_lane_of_a_pass_decides(monkeypatch)
    rng, found = np.random.default_rng(0), 0.0
    while found < 1e3 * AGREE:
        case = random_case(rng, ())
        if any(placed.sharded and placed.widths for placed in case.program.layout.modules):
            found = max(found, disagreement(case, FrameworkOptions()))


@pytest.mark.parametrize("fault", ["a dependency is lost", "a dependency carries too little"])
def test_a_fault_in_what_programs_derive_is_noticed(fault: str) -> None:
    case = decided("megatron", *SMALL)
    program = case.program
    # The first forward that waits for another; many others have time to spare.
    edge = int(np.flatnonzero(program.dep_bytes > 0)[0])
    if fault == "a dependency is lost":
        action = int(np.searchsorted(program.dep_offsets, edge, side="right")) - 1
        offsets = program.dep_offsets - (np.arange(len(program.dep_offsets)) > action)
        without = {name: np.delete(getattr(program, name), edge) for name in ("dep_actions", "dep_bytes")}
        wrong = replace(program, dep_offsets=offsets, **without)
    else:
        wrong = replace(program, dep_bytes=np.where(np.arange(len(program.dep_bytes)) == edge, 1, program.dep_bytes))
    assert disagreement(case, FrameworkOptions(), wrong) > 1e3 * AGREE
