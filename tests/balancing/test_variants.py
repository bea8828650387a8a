"""Options as knobs: one that helps wins, ties keep the strategy's own, the user's value and the authors' stay."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from entrain_bench.balancing.interface import MakeProgram, Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.balancing.tuning import Trials, eased, tuning_batches
from entrain_bench.balancing.variants import Option, free_options
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout, layout_from_json, layout_to_json
from entrain_bench.records.sealed import CachedLayout, CachedLayouts
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import PLANNING_SHARE
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.megatron import MegatronPlanner
from support.builders import profile_of, random_samples, tiny_job, tiny_model

MODEL = tiny_model(encoder=2, llm=4)
SHAPES = random_samples(np.random.default_rng(3), 400, longest=2000)
JOB = replace(tiny_job(MODEL, global_batch=64, microbatch_size=1), free_microbatch_size=True)


@dataclass(frozen=True, slots=True)
class Dealt:
    """Samples by length: neighbours to one replica, or in turn to all of them."""

    handles_generators: ClassVar[bool] = True
    in_turn: bool = False
    unused: int = 1

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        dp = layout.modules[-1].dp
        place = np.argsort(np.argsort(shapes.llm_tokens, kind="stable"), kind="stable")
        if not self.in_turn:
            place = place % (len(shapes) // dp) * dp + place // (len(shapes) // dp)
        microbatch = place // dp // profile.job.microbatch_size
        return same_microbatches(MODEL, shapes, place % dp, microbatch, microbatch)


IN_TURN = Option("assigner", "in_turn", (False, True))
UNUSED = Option("assigner", "unused", (1, 2, 3))
STRATEGY = Strategy("tiny", MegatronPlanner(profile_samples=16), Dealt(), Interleaved(), (UNUSED, IN_TURN))
CHOSEN = ("strategy.assigner.in_turn=true",)


def profile_for(budget: int | None = 48) -> Profile:
    return replace(profile_of(JOB, SHAPES), tuning_budget=budget)


def test_an_option_that_helps_wins_and_ties_keep_the_own_value() -> None:
    profile = profile_for()
    chosen = STRATEGY.plan(profile)
    assert chosen.options == CHOSEN
    plain = replace(STRATEGY, options=()).plan(profile_for())
    assert plain.options == ()
    batch = profile.samples.draw(JOB.global_batch)
    programs = MakeProgram(STRATEGY, profile)
    assert profile.trial_s(programs(batch, chosen)) < profile.trial_s(programs(batch, plain))
    # The strategy itself may have the value; then nothing is chosen.
    better = replace(STRATEGY, assigner=Dealt(in_turn=True), options=(Option("assigner", "in_turn", (True, False)),))
    assert better.plan(profile_for()).options == ()


@pytest.mark.parametrize("budget", [16, 48, 96])
def test_options_are_walked_within_the_same_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, plain = list[int](), Profile.trial_s

    def trial_s(self: Profile, program: object) -> float:
        counted.append(1)
        return plain(self, program)  # type: ignore[arg-type]

    monkeypatch.setattr(Profile, "trial_s", trial_s)
    STRATEGY.plan(profile_for(budget))
    assert budget / 2 < len(counted) <= 2 * budget


def test_a_value_that_exceeds_memory_is_tried_with_recomputation() -> None:
    profile = profile_for()
    memory = Option("scheduler", "memory", ("module", "greedy"))
    programs = MakeProgram(replace(STRATEGY, options=(memory,)), profile)
    trials = Trials(profile, programs, tuning_batches(profile))
    plan = STRATEGY.plan(profile_for(None))
    assert eased(trials, plan, programs.variants) is plan
    program = programs(trials.batches.drawn[trials.batches.drafts[0]], plan)
    needs = [profile.memory.peak_bytes(one).max() for one in (program, recompute_all(program))]
    assert needs[1] < needs[0]
    tight = profile.for_job(replace(JOB, memory_budget_bytes=float(np.mean(needs)) / PLANNING_SHARE))
    trials = Trials(tight, MakeProgram(replace(STRATEGY, options=(memory,)), tight), trials.batches)
    assert eased(trials, plan, programs.variants).options == ("strategy.scheduler.memory=greedy",)


@dataclass(frozen=True, slots=True)
class Searched(Interleaved):
    """Finds with the second round that nothing must be recomputed."""

    rounds: int = 1

    def draft(self) -> "Searched":
        return replace(self, rounds=0)

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        program = Interleaved.schedule(self, shapes, layout, assignment, profile)
        return program if self.rounds > 1 else recompute_all(program)


def test_an_option_of_a_search_is_drafted_without_it_and_wins_by_whole_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches = list[int]()
    whole = Searched.schedule

    def schedule(self: Searched, *parts: Any) -> Program:
        searches.append(self.rounds)
        return whole(self, *parts)

    monkeypatch.setattr(Searched, "schedule", schedule)
    rounds = Option("scheduler", "rounds", (1, 2))
    chosen = replace(STRATEGY, scheduler=Searched(), options=(rounds,)).plan(profile_for())
    assert chosen.options == ("strategy.scheduler.rounds=2",)
    assert 0 < len([one for one in searches if one]) < len(searches) / 4


def test_without_the_tuner_options_stay() -> None:
    assert STRATEGY.plan(profile_for(None)).options == ()


def test_a_program_has_the_options_of_its_plan() -> None:
    layout = replace(STRATEGY.plan(profile_for(None)), options=CHOSEN)
    assert STRATEGY.under(layout).assigner == Dealt(in_turn=True)
    assert STRATEGY.under(STRATEGY.under(layout).plan(profile_for(None))).assigner == Dealt()
    with pytest.raises(UserError, match="in_turn"):
        STRATEGY.under(replace(layout, options=("strategy.assigner.in_turn=2",)))


def test_a_cached_plan_keeps_its_options(tmp_path: Path) -> None:
    layout = replace(STRATEGY.plan(profile_for(None)), options=CHOSEN)
    plans = CachedLayouts(tmp_path)
    plans.write("key", CachedLayout(layout, 1.0))
    known = plans.read("key")
    assert known
    assert known.layout.options == CHOSEN
    assert layout_to_json(layout_from_json(layout_to_json(layout))) == layout_to_json(layout)


def test_values_of_the_user_are_kept() -> None:
    parts = {"assigner": Dealt(unused=2), "scheduler": Interleaved()}
    declared = {"assigner": {"in_turn": [False, True], "unused": [1, 2], "of_another_part": [1, 2]}}
    assert [*free_options(declared, parts)] == [IN_TURN]
    assert [*free_options({"assigner": {"in_turn": [False]}}, parts)] == []
    wrong = {"planner": {}}, {"assigner": {"in_turn": True}}, {"assigner": {"in_turn": [False, "maybe"]}}
    for one, field in zip(wrong, ("=planner", ".assigner.in_turn=True", ".assigner.in_turn=maybe"), strict=True):
        with pytest.raises(UserError, match=rf"^strategy\.options{field}: must be "):
            [*free_options(one, parts)]


@pytest.mark.parametrize("name", choices("strategy"))
def test_declared_options_begin_with_the_own_value(name: str) -> None:
    declared = compose(f"strategy={name}").strategy.get("options", {})
    keys = {f"strategy.{part}.{option}" for part, named in declared.items() for option in named}
    assert {option.key for option in prepare(compose(f"strategy={name}")).strategy.options} == keys


def test_options_are_free_with_equal_tuning_only() -> None:
    for text in ("tuning=own", "tuning_options=false", "strategy.options.scheduler={memory:[module],eager:[none]}"):
        assert prepare(compose("strategy=megatron", text)).strategy.options == ()
    assert prepare(compose("strategy=megatron")).strategy.options


def test_a_scheduler_that_chooses_recomputation_chooses_all_of_it() -> None:
    profile = profile_for(None)
    memory = Option("scheduler", "memory", ("module", "greedy"))
    layout = STRATEGY.plan(profile)
    recomputed = replace(layout, modules=tuple(replace(placed, recompute=True) for placed in layout.modules))
    for request, stays in ((None, False), (("llm",), True)):
        job = replace(JOB, request=replace(JOB.request, recompute=request))
        programs = MakeProgram(replace(STRATEGY, options=(memory,)), profile.for_job(job))
        plain, greedy = (variant.of(recomputed) for variant in programs.variants)
        assert plain == recomputed
        assert greedy.options == ("strategy.scheduler.memory=greedy",)
        assert {placed.recompute for placed in greedy.modules} == {stays}
