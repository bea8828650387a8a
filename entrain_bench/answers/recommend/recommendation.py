"""The recommendation for a job: who is the fastest, with what plan, why, and how firm that is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.answers.comparison import FAILED, FASTEST, Comparison, Standing
from entrain_bench.answers.recommend.evidence import ASSUMPTIONS, Firm, firm, spent_s
from entrain_bench.answers.recommend.race import standings
from entrain_bench.answers.recommend.strategy_race import Raced, StrategyRace, StrategyVariant
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import RunConfig
from entrain_bench.program.layout import Layout
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan
from entrain_bench.records.records import Record
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Job

# Strategies behind the fastest whose time and firmness are looked into.
NUM_RIVALS = 2
# Seeds at which assumptions are changed: as many runs as a round of the race.
NUM_CHANGED = 1
CHOSEN = ("model", "workload", "cluster")
# What a plan's file states by itself; that a planner's options led to the layout, no one who takes it has to know.
STATED = (*CHOSEN, "global_batch", "microbatch_size")
OF_THE_PLANNER = ("strategy/planner", "strategy.planner", "layout.")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What is known of a job.

    Attributes:
        variant: the fastest.
        config: its run at the first seed.
        job: what it is planned for.
        raced: the race.
        comparison: of all, at the seeds that each ran.
        reasons: why strategies have no result, by name; of those that have none under any overrides.
        baseline: the strategy that the speedup is over; empty if it is the fastest.
        layouts: the fastest's, by seed.
        records: of the fastest, by seed.
        spent: where time goes (``spent_s``), for the fastest and its rivals at ``spent_seeds``, which they share.
        firm: what changed assumptions do, at the first ``NUM_CHANGED`` seeds.
    """

    variant: StrategyVariant
    config: RunConfig
    job: Job
    raced: Raced
    comparison: Comparison[str]
    reasons: Mapping[str, str]
    baseline: str
    layouts: Sequence[Layout]
    records: Sequence[Record]
    spent: Mapping[str, Mapping[str, float]]
    spent_seeds: Sequence[int]
    firm: Sequence[Firm]

    @property
    def best(self) -> str:
        """The name of the fastest."""
        return self.variant.name

    @property
    def standing(self) -> Standing:
        """How the fastest does."""
        return self.comparison.standings[self.best]

    @property
    def seeds(self) -> list[int]:
        """Those of the fastest."""
        return sorted(self.raced.times[self.best])

    @property
    def num_replicas(self) -> int:
        """Of the LLM, at the first seed."""
        return self.layouts[0].modules[self.job.model.llm_index].dp


def answer_of(runner: StrategyRace, raced: Raced, baseline: str, given: Collection[str]) -> Recommendation | None:
    """The answer of a race; None if nobody has a result. Runs the fastest and its rivals under changed assumptions.

    Assumptions about the keys that the user has ``given`` stay as they are.
    """
    anyone, times = next(iter(raced.times.items()))
    iterations = runner.config(anyone, min(times)).iterations
    comparison = standings(raced.times, baseline, iterations)
    if not comparison.with_verdict(FASTEST):
        return None
    (best,) = comparison.with_verdict(FASTEST)
    lost = comparison.with_verdict(FAILED)
    ranked = [name for name in comparison.ranked if name not in lost]
    rivals = [name for name in ranked if comparison.standings[name].behind][:NUM_RIVALS]
    seeds = sorted(raced.times[best])
    shared = [seed for seed in seeds if all(seed in raced.times[name] for name in rivals)]
    config = runner.config(best, seeds[0])
    placed = {runner.variants[name].strategy for name in ranked}
    return Recommendation(
        variant=runner.variants[best],
        config=config,
        job=prepare(config).job,
        raced=raced,
        comparison=comparison,
        reasons={name: reason_of(runner, raced, name) for name in lost if runner.variants[name].strategy not in placed},
        baseline="" if best == baseline else baseline,
        layouts=[runner.layout(best, seed) for seed in seeds],
        records=runner.records([best], seeds),
        spent={name: spent_s(runner.records([name], shared)) for name in (best, *rivals)},
        spent_seeds=shared,
        firm=_firmness(runner, raced, [best, *rivals], given),
    )


def _firmness(runner: StrategyRace, raced: Raced, names: Sequence[str], given: Collection[str]) -> list[Firm]:
    """What changed assumptions do to the first of some strategies and to the others, at the first seeds."""
    seeds = runner.seeds(NUM_CHANGED)
    usual = {seed: raced.times[names[0]][seed] for seed in seeds}
    changes = {label: change for label, change in ASSUMPTIONS.items() if change.partition("=")[0] not in given}
    runner.fetch((name, seed, (change,)) for seed in seeds for change in changes.values() for name in names)
    return [firm(label, names[0], usual, runner.times(names, seeds, [change])) for label, change in changes.items()]


def reason_of(runner: StrategyRace, raced: Raced, name: str) -> str:
    """Why a strategy has no result, at the first of its seeds without one."""
    if name in raced.refusals:
        return raced.refusals[name]
    seeds = sorted(raced.times[name])
    found = zip(seeds, runner.records([name], seeds), strict=True)
    seed, record = next((seed, record) for seed, record in found if record.status != "ok")
    return f"at seed {seed}: {record.reason}" if seed != seeds[0] else record.reason


def plan_of_answer(answer: Recommendation, overrides: Sequence[str], usual: Mapping[str, str]) -> TrainingPlan:
    """The plan of the fastest strategy for a job by its overrides; ``usual`` are choices that these leave open."""
    keys = {parse(text).key_or_group: text for text in overrides}
    chosen = {name: keys[name].partition("=")[2] if name in keys else usual[name] for name in CHOSEN}
    config, layout, time = answer.config, answer.layouts[0], answer.standing.time
    assert time
    planned = PlannedJob(
        **chosen,
        global_batch=config.global_batch,
        microbatch_size=config.microbatch_size
        or -(-config.global_batch // (answer.num_replicas * layout.num_microbatches)),
        seed=config.seed,
        overrides=tuple(text for key, text in keys.items() if key not in STATED),
    )
    options = tuple(text for text in answer.variant.overrides[1:] if not text.startswith(OF_THE_PLANNER))
    expected = Expected(time.mean, time.low, time.high, time.num_values)
    return TrainingPlan(answer.variant.strategy, options, planned, layout, expected)
