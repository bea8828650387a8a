"""Which transfers programs need where a send waits for its receiver: by hand, and against ranks that step on and on."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.answers.labels import strategy_facts
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.config.compose import compose
from entrain_bench.conformance.suite import find_transfer_rule
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.simulate.rendezvous import AHEAD, BATCHED, RULES, SEPARATE, find_receive_rule
from entrain_bench.specs.framework import FrameworkOptions
from support.builders import chain_layout, tiny_cluster, uniform_batch
from support.programs import MODEL, handmade_layout, random_program, swap_entries
from support.wide import each_strategy, own_dp

FRAMEWORK, CLUSTER = FrameworkOptions(), tiny_cluster()
# Without collectives between grids on the same ranks.
LAYOUTS = ("disjoint chain", "disjoint chains", "disjoint, encoder dp 3, llm dp 1", "disjoint, encoder dp 1, llm dp 2",
           "partly shared ranks", "reversed chain")  # fmt: skip
SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)
# Small jobs with one encoder; on each strategy's own layouts the second and third have several stages a rank.
COMMON = ("model=tiny", "tuning=own", "layout.tp=1", "microbatch_size=2", "iterations=1")
JOBS = (
    ("workload=chartqa", "cluster=a40x16", "global_batch=32", "layout.dp=2"),
    ("workload=nextqa", "cluster=tiny", "global_batch=16", "layout.dp=1"),
)


def chain(stages: int, microbatches: int, warmup: int | None = None) -> Program:
    """1F1B of an encoder stage and LLM stages; ``warmup`` forwards instead of the usual number."""
    layout = chain_layout(MODEL, 1, stages - 1, microbatches)
    shapes, assignment = uniform_batch(MODEL, microbatches)
    ahead = stages_behind(layout)
    if warmup is not None:
        ahead = [np.full_like(each, warmup) for each in ahead]
    return chain_program(MODEL, shapes, layout, assignment, ahead)


def of(program: Program) -> str:
    return find_receive_rule(program, CLUSTER, FRAMEWORK)


def reordered(program: Program, lane: int, order: list[int]) -> Program:
    """The program with the entries of a lane in another order."""
    actions, first = program.lane_actions.copy(), program.lane_offsets[lane]
    actions[first : first + len(order)] = actions[first + np.array(order)]
    return replace(program, lane_actions=actions)


def test_1f1b_needs_batches() -> None:
    """Encoder F0 F1 B0 ..., LLM F0 B0 ...: after F1 and B0, both would send before they receive."""
    assert of(chain(2, 2)) == BATCHED
    assert of(chain(4, 8)) == BATCHED


def test_a_pass_that_comes_before_an_earlier_sent_one_needs_receives_posted_ahead() -> None:
    """Encoder F0 F1 F2 ...; the LLM begins with microbatch 1, so the batch behind the encoder's F0 never ends."""
    program = chain(2, 3, warmup=3)
    lane = program.lane_actions[program.lane_offsets[1] : program.lane_offsets[2]].tolist()
    forwards = [place for place, action in enumerate(lane) if program.kind[action] == Pass.FORWARD]
    assert forwards == [0, 1, 2]
    assert of(program) == SEPARATE
    assert of(reordered(program, 1, [1, 0, 2])) == AHEAD


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(0, 2))
def test_rules_are_those_under_which_ranks_come_to_the_end(name: str, rng: np.random.Generator, swaps: int) -> None:
    check(swap_entries(rng, random_program(rng, handmade_layout(name)), swaps))


@settings(max_examples=60, deadline=None)
@given(
    SEEDS, st.integers(2, 4), st.integers(1, 6), st.sampled_from([None, None, 1, 2, 6]), st.sampled_from([0, 0, 1, 2])
)
def test_the_same_holds_around_1f1b(
    rng: np.random.Generator, stages: int, microbatches: int, warmup: int | None, swaps: int
) -> None:
    check(swap_entries(rng, chain(stages, microbatches, warmup), swaps))


def check(program: Program) -> None:
    """The rule is the first of those under which ranks come to the end."""
    ending = [rule for rule in (SEPARATE, BATCHED) if comes_to_an_end(program, rule)]
    # Whatever runs on less runs on more.
    assert ending in ([], [BATCHED], [SEPARATE, BATCHED])
    assert of(program) == (ending or [AHEAD])[0]


def comes_to_an_end(program: Program, rule: str) -> bool:
    """Whether all lanes run out of actions if each does what it can until nothing changes."""
    offsets = program.lane_offsets.tolist()
    lanes = [program.lane_actions[a:b].tolist() for a, b in pairwise(offsets)]
    places: dict[int, list[tuple[int, int]]] = {action: [] for action in range(program.num_actions)}
    for lane, actions in enumerate(lanes):
        for at, action in enumerate(actions):
            places[action].append((lane, at))
    needs: dict[int, list[tuple[int, bool]]] = {action: [] for action in places}
    sends: dict[int, list[int]] = {action: [] for action in places}
    for target in places:
        for entry in range(program.dep_offsets[target], program.dep_offsets[target + 1]):
            source = int(program.dep_actions[entry])
            travels = program.dep_bytes[entry] > 0 and ranks_of(program, source) != ranks_of(program, target)
            needs[target].append((source, travels))
            if travels:
                sends[source].append(target)
    done: set[int] = set()
    posted: set[tuple[int, int]] = set()
    ready: set[tuple[int, int]] = set()

    def has_sent(lane: int, at: int) -> bool:
        having = {holder for holder, _ in places[lanes[lane][at]]}
        behind = [place for target in sends[lanes[lane][at]] for place in places[target] if place[0] not in having]
        return all(place in posted for place in behind)

    def has_data(lane: int, action: int) -> bool:
        return all(s in done for s, travels in needs[action] if travels and lane not in {p[0] for p in places[s]})

    before = -1
    while before != len(done) + len(posted) + len(ready):
        before = len(done) + len(posted) + len(ready)
        for lane, actions in enumerate(lanes):
            for at, action in enumerate(actions):
                if at and actions[at - 1] not in done:
                    break
                sent = not at or has_sent(lane, at - 1)
                if rule == BATCHED or sent:
                    posted.add((lane, at))
                if (lane, at) in posted and sent and (rule == SEPARATE or has_data(lane, action)):
                    ready.add((lane, at))
        for action, held in places.items():
            if all(place in ready for place in held) and all(source in done for source, _ in needs[action]):
                done.add(action)
    return len(done) == program.num_actions


def ranks_of(program: Program, action: int) -> frozenset[int]:
    layout: Layout = program.layout
    module = layout.modules[program.module[action]]
    return frozenset(module.ranks[program.replica[action], program.stage[action]].tolist())


@pytest.mark.parametrize("name", each_strategy())
def test_strategies_need_the_transfers_that_their_facts_state(name: str) -> None:
    found = {find_transfer_rule(compose(f"strategy={name}", *COMMON, *job, *own_dp(name))) for job in JOBS}
    (stated,) = (facts.transfers for facts in strategy_facts() if facts.name == name)
    assert max(found, key=RULES.index) == stated


def test_the_documentation_names_the_strategies_of_each_rule() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs/training/communication.md").read_text().split())
    ((ahead, separate),) = re.findall(r"With one encoder, (.+) need `ahead`, (.+) needs `separate`", text)
    for rule, names in ((AHEAD, ahead), (SEPARATE, separate)):
        assert re.findall(r"`(\w+)`", names) == sorted(each.name for each in strategy_facts() if each.transfers == rule)
