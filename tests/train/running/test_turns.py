"""Collective passes: every rank goes through all of them, in one order, with empty ones where it has no chunk."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.costs.sharding import collective_passes
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.train.messages.positions import order_of_actions, order_of_groups
from entrain_bench.train.messages.rank_plan import empty_passes, plan_rank
from support.builders import AV_MODEL, av_samples, placed, rngs

RANKS = 3


def scattered(rng: np.random.Generator, *, sharded: bool) -> Program:
    """A few samples on three ranks, items and samples anywhere within their microbatch."""
    modules = tuple(
        replace(placed(module, [[[rank]] for rank in range(RANKS)]), sharded=sharded) for module in AV_MODEL.modules
    )
    layout, shapes = Layout(modules, 2), av_samples(rng, int(rng.integers(2, 7)))
    microbatch = np.sort(rng.integers(0, 2, len(shapes)))
    labels = []
    for module in AV_MODEL.modules:
        owner = module.owners(shapes, module.units(shapes))
        labels.append(ModuleAssignment(rng.integers(0, RANKS, len(owner)), microbatch[owner]))
    return chain_program(AV_MODEL, shapes, layout, Assignment(tuple(labels)), stages_behind(layout))


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(rngs)
def test_the_order_of_all_actions_keeps_turns(rng: np.random.Generator) -> None:
    """Else a rank that is in a collective would post no receive for one that cannot come to it."""
    program = scattered(rng, sharded=True)
    group, order = collective_passes(program), order_of_actions(program)
    turns = order_of_groups(program, group)
    bounds = [(int(order[group == turn].min()), int(order[group == turn].max())) for turn in turns]
    assert all(last < first for (_, last), (first, _) in pairwise(bounds))


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(rngs)
def test_all_ranks_go_through_the_same_passes(rng: np.random.Generator) -> None:
    program = scattered(rng, sharded=True)
    group = collective_passes(program)
    turns = []
    for rank in range(RANKS):
        plan = plan_rank(program, rank)
        empty, mine = empty_passes(program, plan.steps), []
        for place, step in enumerate(plan.steps):
            mine += [(one.module, one.kind, one.microbatch, one.part) for one in empty.get(place, ())]
            if step.kind <= Pass.BACKWARD:
                chunks = program.chunks[step.place.module]
                label = int(chunks.microbatch[step.chunk]), int(chunks.part[step.chunk])
                mine.append((step.place.module, step.kind, *label))
        turns.append(mine)
    assert turns[0] == turns[1] == turns[2]
    assert len(turns[0]) == len({*group[group >= 0].tolist()})
    # A backward follows its forward.
    for module, kind, microbatch, part in turns[0]:
        if kind is Pass.BACKWARD:
            forward = turns[0].index((module, Pass.FORWARD, microbatch, part))
            assert forward < turns[0].index((module, kind, microbatch, part))


@settings(max_examples=5, deadline=None)
@given(rngs)
def test_whole_weights_need_no_empty_passes(rng: np.random.Generator) -> None:
    program = scattered(rng, sharded=False)
    assert all(not empty_passes(program, plan_rank(program, rank).steps) for rank in range(RANKS))
