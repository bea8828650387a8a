"""The recommendation for a job: who is the fastest, with what plan, where time goes, and how firm that is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.answers.comparison import FAILED, FASTEST, TIME, Comparison, Standing, Times, with_result
from entrain_bench.answers.recommend.strategy_race import Raced, StrategyRace, StrategyVariant, standings
from entrain_bench.answers.statistics import Interval, ratio_interval
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import RunConfig
from entrain_bench.program.layout import Layout
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan
from entrain_bench.records.records import Record
from entrain_bench.records.time_shares import TIME_SHARES
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Job

# What can be wrong with what strategies and the cost model assume: a label, and the override.
ASSUMPTIONS = {
    "estimates off by up to 30%, each its own way": "belief_error=0.3",
    "estimates off by up to 30%, alike for a length": "belief_bias=0.3",
    "network at half its bandwidth": "speed.network=0.5",
    "network at twice its bandwidth": "speed.network=2",
}


def spent_s(records: Sequence[Record]) -> dict[str, float]:
    """Seconds of an iteration by class of ``TIME_SHARES``, the average GPU's; together they are the iteration.

    Means over the iterations of at least one record: a share of a mean time would not be one.
    """
    rows = [row for record in records for row in record.iterations]
    return {name: math.fsum(row[name] * row[TIME] for row in rows) / len(rows) for name in TIME_SHARES}


@dataclass(frozen=True, slots=True)
class Firm:
    """What an assumption changes.

    Attributes:
        label: the assumption that does not hold, in words.
        change: the fastest's time over its usual one, at the same seeds; None if it has no result there.
        rivals: by strategy its time over the fastest's under the changed assumption, or where that has no result there
            over its usual one; None without a result.
    """

    label: str
    change: Interval | None
    rivals: Mapping[str, Interval | None]

    @property
    def overtaking(self) -> list[str]:
        """Who is faster then."""
        return [name for name, ratio in self.rivals.items() if ratio and (self.change is None or ratio.mean < 1)]


def firm(label: str, best: str, usual: Times, changed: Mapping[str, Times]) -> Firm:
    """What an assumption changes for the fastest strategy, whose usual times are given, and for its rivals."""
    own = changed[best]
    change = _ratio(own, usual)
    rivals = {name: _ratio(times, own if change else usual) for name, times in changed.items() if name != best}
    return Firm(label, change, rivals)


def _ratio(times: Times, others: Times) -> Interval | None:
    """Over the seeds at which both have a result, if those are all."""
    one, other = with_result(times), with_result(others)
    shared = [seed for seed in one if seed in other]
    if not shared or len(shared) < len(times):
        return None
    return ratio_interval([one[seed] for seed in shared], [other[seed] for seed in shared])


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
        comparison: of all, at the seeds that each ran.
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
    def microbatch_size(self) -> float:
        """Samples of a microbatch on average, at the first seed."""
        layout = self.layouts[0]
        return self.config.global_batch / (layout.modules[self.job.model.llm_index].dp * layout.num_microbatches)


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
        microbatch_size=config.microbatch_size or math.ceil(answer.microbatch_size),
        seed=config.seed,
        overrides=tuple(text for key, text in keys.items() if key not in STATED),
    )
    options = tuple(text for text in answer.variant.overrides[1:] if not text.startswith(OF_THE_PLANNER))
    expected = Expected(time.mean, time.low, time.high, time.num_values)
    return TrainingPlan(answer.variant.strategy, options, planned, layout, expected)
