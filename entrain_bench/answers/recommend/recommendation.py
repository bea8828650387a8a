"""The answer for a job: the fastest way to train it for each of three readers, with its plan, and how sure it is.

The readers keep their framework, change their loader, or change their runtime (``engines.READERS``). The race chooses,
and the choice favors lucky seeds. So the chosen plans are then judged on fresh seeds, which decide nothing: the stated
times are their means. Records of these runs are in a folder of their own, so a report on the results folder compares
the runs of the race.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.comparison import TIME, Comparison, Times, Verdict, shared_ratio, with_result
from entrain_bench.answers.documents.claim import FREE
from entrain_bench.answers.documents.posterior import lacks_draws, read_plan
from entrain_bench.answers.labels import PUBLISHED
from entrain_bench.answers.layouts import layout_texts
from entrain_bench.answers.posterior import KEY, SURE, share_ahead
from entrain_bench.answers.recommend.engines import READERS, SUITE, Variant
from entrain_bench.answers.recommend.strategy_race import ROUNDS, Raced, StrategyRace, standings
from entrain_bench.answers.statistics import Interval, mean_interval
from entrain_bench.base.files import write_atomically
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import RunConfig
from entrain_bench.program.layout import Layout
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan, plan_overrides, plan_text
from entrain_bench.records.records import Record, Results
from entrain_bench.records.time_shares import EXPERT_SHARES, TIME_SHARES
from entrain_bench.run.experiment import prepare

# Keys that the tuner chooses unless the user gives them.
KNOBS = tuple(text.removesuffix("=null") for text in FREE if text.endswith("=null"))
# Assumptions of strategies and of the cost model that can be wrong: a label, and the override.
ASSUMPTIONS = {
    "estimates off by up to 30%": "belief_error=0.3",
    "network at half its bandwidth": "speed.network=0.5",
    "network at twice its bandwidth": "speed.network=2",
}
# Rivals of the fastest overall that are judged, too, if they are this close.
NUM_RIVALS = 2
# Seeds that judge the plans; the stated interval is for the mean over this number of further seeds.
NUM_FRESH = 12
FURTHER = 5
# Folder of the judging runs' records, in the results folder; in it, one of the plans that assumptions are changed for.
JUDGED = "judged"
FROZEN = "frozen"
# Posterior draws of the hardware constants that the plans run under, each at a fresh seed.
NUM_DRAWS = 6
CHOSEN = ("model", "workload", "cluster")
# Keys that a plan's file states separately; the planner's options that led to the layout are left out.
STATED = (*CHOSEN, "global_batch", "microbatch_size")
OF_THE_PLANNER = ("strategy/planner", "strategy.planner", "layout.")
# The variant that gains are over: the usual setting without this suite.
OTHERWISE = "a layout by rules of thumb"
YOURS = "as you run it"
# Classes of time that balancing can save.
IMBALANCE = ("time_stages_share", "time_replicas_share", "time_microbatches_share")
# Beyond this factor a measured time differs from an expected one by more than most errors of the model.
NEAR = 1.1
# Seconds per iteration by name and class.
type Spent = Mapping[str, Mapping[str, float]]
# A seed, and overrides at it.
type Change = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer for one reader.

    Attributes:
        time: mean over the fresh seeds, with the 95% CI of the mean over ``FURTHER`` others.
        gain: speedup over ``over`` at these seeds; None for that variant itself and without a result of it.
        sure: P(gain > 1) under the posterior; None without draws.
        ties: names of judged plans over which it has no lead that counts, nor they over it.
        path, script, settings: files of the plan and of training by it, and the lines to type, once they are written.
    """

    reader: str
    name: str
    engine: str
    plan: TrainingPlan
    time: Interval
    gain: Interval | None
    over: str
    sure: float | None
    peak_bytes: float
    ties: Sequence[str]
    path: Path | None = None
    script: Path | None = None
    settings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer for every reader with a result, and the race behind it; ``spent``: where the time of each goes."""

    replies: Mapping[str, Reply]
    comparison: Comparison[str]
    spent: Spent
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A question: variants, the name of the one that gains are over, and the user's overrides by key.

    ``usual`` has choices and values of the keys that are not given.
    """

    variants: Mapping[str, Variant]
    baseline: str
    given: Mapping[str, str]
    usual: Mapping[str, str]

    def field(self, reader: str) -> list[str]:
        """Names of the variants of a reader; one who changes the runtime may take any variant."""
        return [name for name, one in self.variants.items() if one.reader == reader]


def recommend(
    question: Question, runner: StrategyRace, raced: Raced, has_time: Callable[[], bool] = lambda: True
) -> Recommendation | None:
    """Return the answer of a race; None if no variant has a result.

    Runs the fastest of each reader at fresh seeds. If one fails there, that run joins ``raced``, and the next is the
    fastest. Then runs the frozen plans under changed assumptions, except about keys that are ``given``, and if it
    ``has_time``, under posterior draws.
    """
    judge = replace(runner, results=Results(runner.results.root / JUDGED), timelines=False)
    seeds = runner.seeds(NUM_FRESH, after=ROUNDS[-1])
    outcome = _judged(question, runner, judge, raced, seeds)
    if not outcome:
        return None
    chosen, rivals, judged = outcome
    fresh = {name: with_result(times) for name, times in judged.items()}
    names = [*dict.fromkeys([*chosen.values(), *rivals])]
    times = {name: mean_interval([*fresh[name].values()], FURTHER) for name in names}
    plans = {name: frozen_plan(question, runner, name, times[name]) for name in names}
    config = runner.config(names[0], runner.first_seed)
    changes: dict[str, list[Change]] = {
        label: [(seeds[0], (change,))]
        for label, change in ASSUMPTIONS.items()
        if change.partition("=")[0] not in question.given
    }
    draws = _draws(config, seeds, question.given) if has_time() else []
    changed = _under(judge, plans, {**changes, KEY: draws})
    drawn = {name: dict(enumerate(own)) for name, own in changed.pop(KEY).items()}
    comparison = standings(raced.times, question.baseline)
    replies = {reader: _reply(question, runner, judge, chosen, reader, plans, times, fresh, drawn) for reader in chosen}
    records = {name: judge.records([name], seeds) for name in names}
    best = replies.get(SUITE, next(iter(replies.values())))
    values = {
        "config": config,
        "job": prepare(config).job,
        "layouts": {one.name: layout_texts(prepare(config).job.model, one.plan.layout) for one in replies.values()},
        "num_seeds": NUM_FRESH,
        "num_draws": len(draws),
        "raced_seeds": sorted(raced.times[best.name]),
        "fresh_seeds": seeds,
        "num_further": FURTHER,
        "out_of_time": raced.out_of_time,
        "reasons": {name: reason_of(runner, raced, name) for name in comparison.with_verdict(Verdict.FAILED)},
        "bound_s": math.fsum(one.metrics["cluster_bound_s"] for one in records[best.name]) / NUM_FRESH,
        "best": best,
        "published": _published(question, runner, comparison),
        "effects": [
            assumption_effect(label, {n: fresh[n][seeds[0]] for n in names}, changed[label]) for label in changes
        ],
        "commands": commands_of(records[best.name], judge.results.root),
        "measured": None,
    }
    spent = {one.name: spent_s(records[one.name]) for one in replies.values()}
    return Recommendation(replies, comparison, spent, values)


def _judged(
    question: Question, runner: StrategyRace, judge: StrategyRace, raced: Raced, seeds: Sequence[int]
) -> tuple[dict[str, str], list[str], Mapping[str, Times]] | None:
    """Return the fastest of each reader, close rivals, and all their times at fresh seeds; None without a result."""
    within = read_plan().within
    while True:
        chosen: dict[str, str] = {}
        rivals: list[str] = []
        for reader in READERS:
            field = {name: raced.times[name] for name in question.field(reader)}
            comparison = standings(field) if field else None
            if not comparison or not comparison.with_verdict(Verdict.FASTEST):
                continue
            (chosen[reader],) = comparison.with_verdict(Verdict.FASTEST)
            behind = ((name, comparison.standings[name]) for name in comparison.ranked)
            close = [
                n for n, one in behind if one.verdict != Verdict.FAILED and one.behind and one.behind.mean <= within
            ]
            rivals = close[:NUM_RIVALS] if reader == SUITE else rivals
        if not chosen:
            return None
        base = [question.baseline] if any(with_result(raced.times.get(question.baseline, {}))) else []
        names = [*dict.fromkeys([*chosen.values(), *rivals, *base])]
        for name in names:
            judge.keep_plan(name, runner.plan(name))
        judged = judge.times(names, seeds)
        lost = {
            name: seed for name in names for seed, time in judged[name].items() if time is None and name not in base
        }
        if not lost:
            return chosen, rivals, judged
        for name, seed in lost.items():
            raced.times[name] = {**raced.times[name], **runner.times([name], [seed])[name]}


def _reply(
    question: Question,
    runner: StrategyRace,
    judge: StrategyRace,
    chosen: Mapping[str, str],
    reader: str,
    plans: Mapping[str, TrainingPlan],
    times: Mapping[str, Interval],
    fresh: Mapping[str, Mapping[int, float]],
    drawn: Mapping[str, Times],
) -> Reply:
    name = chosen[reader]
    first = chosen.get(READERS[0], name)
    over = first if name != first and question.baseline != YOURS else question.baseline
    done = fresh.get(over, {})
    raced_seeds = [runner.first_seed]
    records = [*judge.records([name], [*fresh[name]]), *runner.records([name], raced_seeds)]
    return Reply(
        reader,
        name,
        question.variants[name].engine,
        plans[name],
        times[name],
        shared_ratio(done, fresh[name]) if name != over else None,
        over,
        share_ahead(drawn.get(name, {}), drawn.get(over, {})),
        max(one.metrics["peak_memory_bytes"] for one in records),
        [other for other in plans if other != name and is_tie(fresh[name], fresh[other], drawn[name], drawn[other])],
    )


def is_tie(own: Times, other: Times, own_drawn: Times, other_drawn: Times) -> bool:
    """Whether neither of two plans has a lead that counts: over paired seeds, and under the posterior if drawn."""
    ratio = shared_ratio(with_result(other), with_result(own))
    if not ratio or not ratio.excludes(1.0):
        return True
    ahead, behind = (own_drawn, other_drawn) if ratio.mean > 1 else (other_drawn, own_drawn)
    share = share_ahead(ahead, behind)
    return share is not None and share < SURE


def _published(question: Question, runner: StrategyRace, comparison: Comparison[str]) -> dict[str, Any] | None:
    """Return the fastest published strategy of the race and its time over that of the fastest."""
    for name in comparison.ranked:
        own = comparison.standings[name]
        family = runner.config(name, runner.first_seed).strategy.get("family")
        if own.time and own.verdict != Verdict.FAILED and family == PUBLISHED and name in question.variants:
            return {"name": name, "time": own.time, "behind": own.behind}
    return None


def spent_s(records: Sequence[Record]) -> dict[str, float]:
    """Return seconds per iteration by class of ``TIME_SHARES``, the average GPU's; together they are the iteration.

    Means over the iterations of at least one record: a share of a mean time would not be one.
    """
    rows = [row for record in records for row in record.iterations]
    names = [name for name in (*TIME_SHARES, *EXPERT_SHARES) if name in rows[0] or name in TIME_SHARES]
    return {name: math.fsum(row[name] * row[TIME] for row in rows) / len(rows) for name in names}


def reason_of(runner: StrategyRace, raced: Raced, name: str) -> str:
    """Return why a variant has no result, at the first of its seeds without one."""
    if name in raced.refusals:
        return raced.refusals[name]
    seeds = sorted(raced.times[name])
    pairs = zip(seeds, runner.records([name], seeds), strict=True)
    seed, record = next((seed, record) for seed, record in pairs if record.status != "ok")
    return f"at seed {seed}: {record.reason}" if seed != seeds[0] else record.reason


def frozen_plan(question: Question, runner: StrategyRace, name: str, time: Interval) -> TrainingPlan:
    """Return the frozen plan of a variant with the time to expect."""
    choice, *own = runner.variants[name]
    settings = [text for text in own if not text.startswith(("strategy", *OF_THE_PLANNER))]
    keys = {parse(text).key_or_group: text for text in (*runner.free, *settings, *runner.overrides)}
    chosen = {key: keys[key].partition("=")[2] if key in keys else question.usual[key] for key in CHOSEN}
    config = runner.config(name, runner.first_seed)
    layout = runner.plan(name).layout
    planned = PlannedJob(
        **chosen,
        global_batch=config.global_batch,
        microbatch_size=config.microbatch_size or math.ceil(mean_size(config, layout)),
        seed=config.seed,
        overrides=tuple(text for key, text in keys.items() if key not in STATED),
    )
    options = tuple(text for text in own if text not in settings and not text.startswith(OF_THE_PLANNER))
    # Chosen options stand where given ones do, so that a run of the plan has them as its own.
    options += layout.options
    layout = replace(layout, options=())
    expected = Expected(time.mean, time.low, time.high, time.num_values)
    return TrainingPlan(choice.partition("=")[2], options, planned, layout, expected)


def assumption_effect(
    label: str, usual: Mapping[str, float], changed: Mapping[str, Sequence[float | None]]
) -> dict[str, Any]:
    """Return time over the usual one of each plan (None without a result), and who is then the fastest."""
    after = {name: times[0] for name, times in changed.items()}
    done = {name: time for name, time in after.items() if time is not None}
    return {
        "label": label,
        "changes": {name: time and time / usual[name] for name, time in after.items()},
        "fastest": min(done, key=lambda name: done[name]) if done else "",
    }


def _draws(config: RunConfig, seeds: Sequence[int], given: Mapping[str, str]) -> list[Change]:
    """Return seed and overrides of every posterior draw; none if the device has none or the user chose one."""
    if KEY in given or lacks_draws(config, NUM_DRAWS):
        return []
    noise = () if "action_noise" in given else (f"action_noise={read_plan().action_noise:g}",)
    return [(seed, (f"{KEY}={draw}", *noise)) for draw, seed in enumerate(seeds[:NUM_DRAWS], 1)]


def _under(
    judge: StrategyRace,
    plans: Mapping[str, TrainingPlan],
    changes: Mapping[str, Sequence[Change]],
) -> dict[str, dict[str, list[float | None]]]:
    """Return seconds of frozen plans under every change (seed and overrides), by its label and by plan."""
    variants: dict[str, Sequence[str]] = {}
    for name, plan in plans.items():
        text = plan_text(plan).encode()
        path = judge.results.root / FROZEN / f"{sha256(text).hexdigest()[:16]}.yaml"
        write_atomically(path, text)
        variants[name] = plan_overrides(plan, path)
    frozen = replace(judge, variants=variants, free=(), overrides=())
    frozen.fetch((name, *one) for ones in changes.values() for one in ones for name in plans)
    return {
        label: {name: [frozen.times([name], [seed], keys)[name][seed] for seed, keys in ones] for name in plans}
        for label, ones in changes.items()
    }


def mean_size(config: RunConfig, layout: Layout) -> float:
    """Return the samples of a microbatch on average."""
    llm = layout.modules[prepare(config).job.model.llm_index]
    return config.global_batch / (llm.dp * layout.num_microbatches)


def measured_step(measured: float, expected: Interval, spent: Mapping[str, float]) -> dict[str, Any]:
    """Compare a measured iteration time with the expected one, and with the part of it that balance could save.

    ``imbalance``: the most that perfect balance could gain; the expected time has the imbalance of the data in it.
    """
    total = math.fsum(spent.values())
    wasted = math.fsum(spent[name] for name in IMBALANCE) / total
    factor = measured / expected.mean
    return {
        "measured": measured,
        "expected": expected,
        "factor": factor,
        "imbalance": 1 / (1 - wasted),
        "imbalance_s": wasted * expected.mean,
        "is_near": 1 / NEAR <= factor <= NEAR,
    }
