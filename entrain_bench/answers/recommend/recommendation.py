"""The recommendation for a job: the fastest strategy, its frozen plan, where time goes, and how robust the answer is.

The race chooses a strategy, and the choice favors lucky seeds. So its plan is then judged on fresh seeds, which decide
nothing: the stated time is their mean. Records of these runs are in a folder of their own, so a report on the results
folder compares the runs of the race and names the same strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from entrain_bench.answers.comparison import MARGIN, TIME, Comparison, Times, Verdict, shared_ratio, with_result
from entrain_bench.answers.documents.posterior import lacks_draws, read_plan
from entrain_bench.answers.documents.sides import FREE
from entrain_bench.answers.posterior import KEY, Chance, ChanceSummary, chances
from entrain_bench.answers.recommend.strategy_race import Raced, Refuse, StrategyRace, StrategyVariant, standings
from entrain_bench.answers.statistics import Interval, prediction_interval
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.files import write_atomically
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import RunConfig
from entrain_bench.program.layout import Layout
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan, plan_overrides, plan_text
from entrain_bench.records.records import Record, labels_of
from entrain_bench.records.time_shares import TIME_SHARES
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Job

# Keys that the tuner chooses unless the user gives them.
KNOBS = tuple(text.removesuffix("=null") for text in FREE if text.endswith("=null"))
# What can be wrong with what strategies and the cost model assume: a label, and the override.
ASSUMPTIONS = {
    "estimates off by up to 30%, for each sample differently": "belief_error=0.3",
    "estimates off by up to 30%, equally for equal lengths": "belief_bias=0.3",
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
class AssumptionEffect:
    """Effect of a changed assumption.

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
        """Strategies that are then faster."""
        return [name for name, ratio in self.rivals.items() if ratio and (self.change is None or ratio.mean < 1)]

    def to_dict(self) -> dict[str, Any]:
        """Return the effect as plain values, with the speedups of strategies over the fastest."""
        return {
            "label": self.label,
            "change": asdict(self.change) if self.change else None,
            "overtaking": self.overtaking,
            "speedups": {name: 1 / ratio.mean for name, ratio in self.rivals.items() if ratio and ratio.mean < 1},
            "has_rivals": bool(self.rivals),
        }


def assumption_effect(label: str, best: str, usual: Times, changed: Mapping[str, Times]) -> AssumptionEffect:
    """Return the effect of an assumption on the fastest strategy and its rivals."""
    change = _ratio(changed[best], usual)
    reference = changed[best] if change else usual
    return AssumptionEffect(
        label, change, {name: _ratio(times, reference) for name, times in changed.items() if name != best}
    )


def _ratio(times: Times, others: Times) -> Interval | None:
    """Over the seeds at which both have a result, if those are all."""
    ratio = shared_ratio(with_result(times), with_result(others))
    return ratio if ratio and ratio.num_values == len(times) else None


# Strategies behind the fastest whose time and robustness are examined.
NUM_RIVALS = 2
# Seeds that judge the plan; the stated interval is for the mean over so many further seeds.
NUM_FRESH = 12
FURTHER = 5
# Of these, how many are run under changed assumptions, and with keys that the user gave freed.
NUM_CHANGED = 3
# Ratio of the times with and without a given key above which the answer names the key.
COSTLY = 1.5
# Folder of the judging runs' records, and of the plans that assumptions are changed for, in the results folder.
JUDGED = "judged"
FROZEN = "frozen"
# Posterior draws of the hardware constants that the fastest and its rivals run under, each at a fresh seed.
NUM_DRAWS = 6
CHOSEN = ("model", "workload", "cluster")
# What a plan's file states by itself; that a planner's options led to the layout, no one who takes it has to know.
STATED = (*CHOSEN, "global_batch", "microbatch_size")
OF_THE_PLANNER = ("strategy/planner", "strategy.planner", "layout.")


@dataclass(frozen=True, slots=True)
class KnobCost:
    """Slowdown by keys that the user gave.

    Attributes:
        given: the overrides, ``layout.dp=4``.
        cost: the strategy's time with them over its time without, at the same fresh seeds.
        given_s, free_s: mean seconds an iteration with and without.
    """

    given: Sequence[str]
    cost: Interval
    given_s: float
    free_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as plain values; ``freed`` are the overrides that free the keys."""
        return asdict(self) | {"freed": [f"{parse(text).key_or_group}=null" for text in self.given]}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommendation for a job, with its evidence.

    Attributes:
        comparison: of all, at the seeds of the race that each ran.
        reasons: of the strategies without a result, why.
        layout: the frozen plan's.
        records: of the fastest in the race, by seed.
        fresh: of the fastest at fresh seeds.
        time: its mean over the fresh seeds, with the interval for the mean over ``FURTHER`` further seeds.
        speedup: over the baseline at the fresh seeds; None if it is the fastest, or lacks results.
        baseline: the strategy that the speedup is over; empty if it is the fastest.
        spent: where time goes (``spent_s``), for the fastest and its rivals at ``spent_seeds``, which they share.
        effects: what changed assumptions do, at the first ``NUM_CHANGED`` fresh seeds.
        drawn: chances of the fastest and its rivals over posterior draws; empty if there are none, or no time for them.
        costs: of given keys that cost more than ``COSTLY``.
        plan: the frozen plan.
    """

    variant: StrategyVariant
    config: RunConfig
    job: Job
    raced: Raced
    comparison: Comparison[str]
    reasons: Mapping[str, str]
    baseline: str
    layout: Layout
    records: Sequence[Record]
    fresh: Sequence[Record]
    time: Interval
    speedup: Interval | None
    spent: Mapping[str, Mapping[str, float]]
    spent_seeds: Sequence[int]
    effects: Sequence[AssumptionEffect]
    drawn: Mapping[str, Chance]
    costs: Sequence[KnobCost]
    plan: TrainingPlan

    @property
    def best(self) -> str:
        """The name of the fastest."""
        return self.variant.name

    @property
    def fresh_seeds(self) -> list[int]:
        """The seeds that judge the plan."""
        return [int(record.labels["seed"]) for record in self.fresh]

    @property
    def microbatch_size(self) -> float:
        """Samples of a microbatch on average."""
        return _mean_size(self.config, self.job, self.layout)

    def to_dict(self) -> dict[str, Any]:
        """Return the recommendation as plain values; templates word them (``templates/recommendation.jinja``)."""
        changed = self.fresh_seeds[:NUM_CHANGED]
        return {
            "best": self.best,
            "overrides": [*self.variant.overrides],
            "time": asdict(self.time),
            "speedup": asdict(self.speedup) if self.speedup else None,
            "baseline": self.baseline,
            "chance": asdict(chance) if (chance := ChanceSummary.of([self.drawn], self.best)) else None,
            "compared": [self.best, *(name for name in self.drawn if name != self.best)],
            "costs": [cost.to_dict() for cost in self.costs],
            "job": labels_of(self.config),
            "global_batch": self.config.global_batch,
            "num_gpus": self.job.cluster.num_ranks,
            "planning_seed": self.config.planning_seed,
            "raced_seeds": sorted(self.raced.times[self.best]),
            "fresh_seeds": self.fresh_seeds,
            "changed_seeds": changed,
            "num_further": FURTHER,
            "margin": MARGIN,
            "out_of_time": self.raced.out_of_time,
            "reasons": dict(self.reasons),
            "num_compared": len(self.spent),
            "spent_seeds": [*self.spent_seeds],
            "is_grouped": any(len(placed.widths) > 1 for placed in self.layout.modules),
            "num_microbatches": self.layout.num_microbatches,
            "microbatch_size": f"{self.microbatch_size:g}",
            "scheduler_memory": self.config.strategy["scheduler"].get("memory", "module"),
            "memory": {
                "peak": max(record.metrics["peak_memory_bytes"] for record in (*self.records, *self.fresh)),
                "capacity": self.job.cluster.device.memory_bytes,
                "budget": self.job.memory_budget_bytes,
                "fraction": f"{self.config.memory_fraction:g}",
            },
            "bounds": {"cluster": self._bound("cluster_bound_s"), "layout": self._bound("lower_bound_s")},
            "effects": [effect.to_dict() for effect in self.effects],
            "rivals": [*self.effects[0].rivals] if self.effects else [],
        }

    def _bound(self, name: str) -> dict[str, float]:
        """A lower bound, the mean over the fresh seeds in seconds, and the winner's time over it."""
        bound_s = math.fsum(record.metrics[name] for record in self.fresh) / len(self.fresh)
        return {"seconds": bound_s, "gain": self.time.mean / bound_s}


def answer_of(
    runner: StrategyRace,
    raced: Raced,
    baseline: str,
    refuse: Refuse,
    given: Mapping[str, str],
    usual: Mapping[str, str],
    has_time: Callable[[], bool] = lambda: True,
) -> Recommendation | None:
    """The answer of a race; None if no strategy has a result.

    Runs the fastest at fresh seeds. If it fails at one of them, that run joins the race's, and the next strategy is
    the fastest. Then runs the fastest and its rivals under changed assumptions, and the fastest with given keys freed.

    Args:
        runner: of the race.
        raced: what the race found.
        baseline: the strategy that speedups are over.
        refuse: says which runs are not taken.
        given: the overrides by key; assumptions about their keys stay unmodified.
        usual: choices and values of the keys that these leave open.
        has_time: whether posterior draws may start; they come last.
    """
    judge = runner.beside(runner.results.root / JUDGED)
    seeds = runner.fresh_seeds(NUM_FRESH)
    while True:
        anyone, times = next(iter(raced.times.items()))
        iterations = runner.config(anyone, min(times)).iterations
        comparison = standings(raced.times, baseline, iterations)
        if not comparison.with_verdict(Verdict.FASTEST):
            return None
        (best,) = comparison.with_verdict(Verdict.FASTEST)
        names = [*dict.fromkeys((best, *([baseline] if comparison.standings[baseline].num_ok else [])))]
        for name in names:
            judge.keep_plan(name, runner.plan(name))
        judged = judge.times(names, seeds)
        lost = [seed for seed, time in judged[best].items() if time is None]
        if not lost:
            break
        raced = raced.with_times(best, runner.times([best], lost[:1])[best])
    fresh = with_result(judged[best])
    lacking = comparison.with_verdict(Verdict.FAILED)
    ranked = [name for name in comparison.ranked if name not in lacking]
    rivals = [name for name in ranked if comparison.standings[name].behind][:NUM_RIVALS]
    raced_seeds = sorted(raced.times[best])
    shared = [seed for seed in raced_seeds if all(seed in raced.times[name] for name in rivals)]
    config = runner.config(best, runner.first_seed)
    placed = {runner.variants[name].strategy for name in ranked}
    time = prediction_interval([*fresh.values()], FURTHER, iterations)
    raced_s = {name: standing.time for name, standing in comparison.standings.items()}
    plans = {
        name: plan_of(runner, name, found, usual)
        for name in (best, *rivals)
        if (found := raced_s[name] if name != best else time)
    }
    within = read_plan().within
    close = [name for name in rivals if (behind := comparison.standings[name].behind) and behind.mean <= within]
    effects = _effects(judge, plans, fresh, given)
    costs = _knob_costs(judge, best, refuse, fresh, given)
    reference = with_result(judged[baseline]) if baseline in judged and baseline != best else {}
    return Recommendation(
        variant=runner.variants[best],
        config=config,
        job=prepare(config).job,
        raced=raced,
        comparison=comparison,
        reasons={
            name: reason_of(runner, raced, name) for name in lacking if runner.variants[name].strategy not in placed
        },
        baseline="" if best == baseline else baseline,
        layout=plans[best].layout,
        records=runner.records([best], raced_seeds),
        fresh=judge.records([best], seeds),
        time=time,
        speedup=shared_ratio(reference, fresh, iterations),
        spent={name: spent_s(runner.records([name], shared)) for name in (best, *rivals)},
        spent_seeds=shared,
        effects=effects,
        drawn=_drawn(judge, [best, *close], given) if has_time() else {},
        costs=costs,
        plan=plans[best],
    )


def _effects(
    judge: StrategyRace, plans: Mapping[str, TrainingPlan], fresh: Mapping[int, float], given: Mapping[str, str]
) -> list[AssumptionEffect]:
    """Effects of changed assumptions on frozen plans, the fastest's first, at the first fresh seeds."""
    folder = judge.results.root / FROZEN
    best = next(iter(plans))
    variants = dict[str, StrategyVariant]()
    for name, plan in plans.items():
        text = plan_text(plan).encode()
        path = folder / f"{sha256(text).hexdigest()[:16]}.yaml"
        write_atomically(path, text)
        variants[name] = StrategyVariant(name, plan_overrides(plan, path))
    frozen = judge.beside(judge.results.root, variants, ())
    usual = dict([*fresh.items()][:NUM_CHANGED])
    changes = {label: change for label, change in ASSUMPTIONS.items() if change.partition("=")[0] not in given}
    frozen.fetch((name, seed, (change,)) for seed in usual for change in changes.values() for name in plans)
    return [
        assumption_effect(label, best, usual, frozen.times([*plans], [*usual], [change]))
        for label, change in changes.items()
    ]


def _drawn(judge: StrategyRace, names: Sequence[str], given: Mapping[str, str]) -> dict[str, Chance]:
    """Chances of strategies under the first posterior draws, each with plans of its own and at a fresh seed.

    Empty without a rival, if the user gave ``constants``, and for a device without draws.
    """
    config = judge.config(names[0], judge.first_seed)
    seeds = judge.fresh_seeds(NUM_DRAWS)
    if len(names) < 2 or KEY in given or lacks_draws(config, NUM_DRAWS):
        return {}
    noise = () if "action_noise" in given else (f"action_noise={read_plan().action_noise:g}",)
    changed = {draw: (f"{KEY}={draw}", *noise) for draw in range(1, NUM_DRAWS + 1)}
    pairs = [*zip(changed.items(), seeds, strict=True)]
    judge.fetch((name, seed, keys) for (_, keys), seed in pairs for name in names)
    times_by_draw: dict[str, dict[int, float | None]] = {name: {} for name in names}
    for (draw, keys), seed in pairs:
        for name, times in judge.times(names, [seed], keys).items():
            times_by_draw[name][draw] = times[seed]
    return chances(times_by_draw)


def _knob_costs(
    judge: StrategyRace, best: str, refuse: Refuse, fresh: Mapping[int, float], given: Mapping[str, str]
) -> list[KnobCost]:
    """Slowdowns of the fastest strategy by the user's values of free keys, if above ``COSTLY``.

    It is tuned with all of them free, and only if that is much faster, with each of them free.
    """
    knobs = {key: given[key] for key in KNOBS if key in given and parse(given[key]).value() is not None}
    usual = dict([*fresh.items()][:NUM_CHANGED])

    def costs(of: Sequence[Sequence[str]]) -> list[KnobCost]:
        freed = [tuple(f"{key}=null" for key in keys) for keys in of]
        # The plans first, each by one run: others take them from there.
        judge.fetch((best, next(iter(usual)), changed) for changed in freed)
        judge.fetch((best, seed, changed) for seed in usual for changed in freed)
        costs = []
        for keys, changed in zip(of, freed, strict=True):
            free = with_result(judge.times([best], [*usual], changed)[best])
            cost = _ratio(usual, free)
            alike = judge.beside(judge.results.root, overrides=(*judge.overrides, *changed))
            if cost and decisive(cost.mean) > decisive(COSTLY) and not refuse(alike, best, next(iter(usual))):
                means = (math.fsum(times.values()) / len(times) for times in (usual, free))
                costs.append(KnobCost([knobs[key] for key in keys], cost, *means))
        return costs

    together = costs([[*knobs]]) if knobs else []
    alone = costs([[key] for key in knobs]) if together and len(knobs) > 1 else []
    return alone or together


def reason_of(runner: StrategyRace, raced: Raced, name: str) -> str:
    """Why a strategy has no result, at the first of its seeds without one."""
    if name in raced.refusals:
        return raced.refusals[name]
    seeds = sorted(raced.times[name])
    pairs = zip(seeds, runner.records([name], seeds), strict=True)
    seed, record = next((seed, record) for seed, record in pairs if record.status != "ok")
    return f"at seed {seed}: {record.reason}" if seed != seeds[0] else record.reason


def plan_of(runner: StrategyRace, name: str, time: Interval, usual: Mapping[str, str]) -> TrainingPlan:
    """The frozen plan of a strategy with the time to expect; ``usual`` are choices that the overrides leave open."""
    keys = {parse(text).key_or_group: text for text in runner.overrides}
    chosen = {key: keys[key].partition("=")[2] if key in keys else usual[key] for key in CHOSEN}
    variant = runner.variants[name]
    config = runner.config(name, runner.first_seed)
    layout = runner.layout(name)
    planned = PlannedJob(
        **chosen,
        global_batch=config.global_batch,
        microbatch_size=config.microbatch_size or math.ceil(_mean_size(config, prepare(config).job, layout)),
        seed=config.seed,
        overrides=tuple(text for key, text in keys.items() if key not in STATED),
    )
    options = tuple(text for text in variant.overrides[1:] if not text.startswith(OF_THE_PLANNER))
    expected = Expected(time.mean, time.low, time.high, time.num_values)
    return TrainingPlan(variant.strategy, options, planned, layout, expected)


def _mean_size(config: RunConfig, job: Job, layout: Layout) -> float:
    """Samples of an LLM microbatch on average."""
    return config.global_batch / (layout.modules[job.model.llm_index].dp * layout.num_microbatches)
