"""The recommendation for a job: the fastest strategy, its frozen plan, where time goes, and how robust the answer is.

The race chooses a strategy, and the choice favors lucky seeds. So its plan is then judged on fresh seeds, which decide
nothing: the stated time is their mean. Records of these runs are in a folder of their own, so a report on the results
folder compares the runs of the race and names the same strategy.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.comparison import (
    MARGIN,
    TIME,
    Comparison,
    Times,
    Verdict,
    shared_ratio,
    with_result,
)
from entrain_bench.answers.console_table import Column, fitting, table_lines
from entrain_bench.answers.documents.claim import FREE
from entrain_bench.answers.documents.posterior import lacks_draws, read_plan
from entrain_bench.answers.posterior import KEY, Chance, ChanceSummary, chances
from entrain_bench.answers.recommend.strategy_race import (
    ROUNDS,
    Raced,
    StrategyRace,
    standings,
)
from entrain_bench.answers.statistics import Interval, mean_interval
from entrain_bench.answers.text import NOTHING, TIME_WORDS, decimals, ends, listing, load_template, percent, seconds
from entrain_bench.base.files import write_atomically
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import RunConfig
from entrain_bench.program.layout import Layout
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan, plan_overrides, plan_text
from entrain_bench.records.records import Record, Results, labels_of
from entrain_bench.records.time_shares import TIME_SHARES
from entrain_bench.run.experiment import prepare

# Keys that the tuner chooses unless the user gives them.
KNOBS = tuple(text.removesuffix("=null") for text in FREE if text.endswith("=null"))
# Assumptions of strategies and of the cost model that can be wrong: a label, and the override.
ASSUMPTIONS = {
    "estimates off by up to 30%, for each sample differently": "belief_error=0.3",
    "estimates off by up to 30%, equally for equal lengths": "belief_bias=0.3",
    "network at half its bandwidth": "speed.network=0.5",
    "network at twice its bandwidth": "speed.network=2",
}
# Strategies behind the fastest whose time and robustness are examined.
NUM_RIVALS = 2
# Seeds that judge the plan; the stated interval is for the mean over so many further seeds.
NUM_FRESH = 12
FURTHER = 5
# The number of these that run under changed assumptions.
NUM_CHANGED = 3
# Folder of the judging runs' records, in the results folder; in it, one of the plans that assumptions are changed for.
JUDGED = "judged"
FROZEN = "frozen"
# Posterior draws of the hardware constants that the fastest and its rivals run under, each at a fresh seed.
NUM_DRAWS = 6
CHOSEN = ("model", "workload", "cluster")
# Keys that a plan's file states by itself; the planner's options that led to the layout are left out.
STATED = (*CHOSEN, "global_batch", "microbatch_size")
OF_THE_PLANNER = ("strategy/planner", "strategy.planner", "layout.")
# Seconds of an iteration by strategy and class, the fastest strategy first.
type Spent = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The frozen plan of the fastest strategy, and the race behind it.

    ``spent`` is where time goes, for the fastest and its rivals, ``values`` all else for
    ``templates/recommendation.jinja``.
    """

    best: str
    plan: TrainingPlan
    comparison: Comparison[str]
    spent: Spent
    values: Mapping[str, Any]


def recommend(
    runner: StrategyRace,
    raced: Raced,
    baseline: str,
    given: Mapping[str, str],
    usual: Mapping[str, str],
    has_time: Callable[[], bool] = lambda: True,
) -> Recommendation | None:
    """Return the answer of a race; None if no strategy has a result.

    Runs the fastest at fresh seeds. If it fails at one of them, that run joins ``raced``, and the next strategy is the
    fastest. Then runs the fastest and its rivals under changed assumptions, except about keys that are ``given``, and
    if it ``has_time``, under posterior draws. ``usual`` has choices and values of the keys that are not given.
    """
    judge = replace(runner, results=Results(runner.results.root / JUDGED), watch=lambda _: None, timelines=False)
    seeds = runner.seeds(NUM_FRESH, after=ROUNDS[-1])
    outcome = _judged(runner, judge, raced, baseline, seeds)
    if not outcome:
        return None
    comparison, best, judged = outcome
    fresh = with_result(judged[best])
    time = mean_interval([*fresh.values()], FURTHER)
    lacking = comparison.with_verdict(Verdict.FAILED)
    behind = {name: one.behind for name in comparison.ranked if (one := comparison.standings[name]).behind}
    rivals = {name: ratio for name, ratio in behind.items() if name not in lacking and ratio}
    names = [best, *rivals][: 1 + NUM_RIVALS]
    expected = {best: time} | {name: raced_time for name in rivals if (raced_time := comparison.standings[name].time)}
    plans = {name: frozen_plan(runner, name, expected[name], usual) for name in names}
    within = read_plan().within
    close = [name for name in names[1:] if rivals[name].mean <= within]
    raced_seeds = sorted(raced.times[best])
    shared = [seed for seed in raced_seeds if all(seed in raced.times[name] for name in names)]
    effects = _effects(judge, plans, dict([*fresh.items()][:NUM_CHANGED]), given)
    drawn = _drawn(judge, [best, *close], given) if has_time() else {}
    spent = {name: spent_s(runner.records([name], shared)) for name in names}
    records = judge.records([best], seeds)
    placed = {runner.strategy(name) for name in comparison.ranked if name not in lacking}
    config = runner.config(best, runner.first_seed)
    values = {
        "config": config,
        "labels": labels_of(config),
        "job": prepare(config).job,
        "layout": plans[best].layout,
        "mean_size": _mean_size(config, plans[best].layout),
        "best": best,
        "overrides": [*runner.variants[best]],
        "time": time,
        "speedup": shared_ratio(with_result(judged.get(baseline, {})), fresh),
        "baseline": "" if best == baseline else baseline,
        "chance": ChanceSummary.of([drawn], best),
        "compared": [best, *(name for name in drawn if name != best)],
        "raced_seeds": raced_seeds,
        "fresh_seeds": seeds,
        "changed_seeds": seeds[:NUM_CHANGED],
        "num_further": FURTHER,
        "margin": MARGIN,
        "out_of_time": raced.out_of_time,
        "reasons": {name: reason_of(runner, raced, name) for name in lacking if runner.strategy(name) not in placed},
        "num_compared": len(spent),
        "spent_seeds": shared,
        "peak": max(one.metrics["peak_memory_bytes"] for one in (*runner.records([best], raced_seeds), *records)),
        "bounds": {
            name: math.fsum(one.metrics[name] for one in records) / len(records)
            for name in ("cluster_bound_s", "lower_bound_s")
        },
        "effects": effects,
        "rivals": names[1:],
        "commands": commands_of(records, judge.results.root),
        "as_good": ties(comparison),
        "reason": reason(spent),
    }
    return Recommendation(best, plans[best], comparison, spent, values)


def _judged(
    runner: StrategyRace, judge: StrategyRace, raced: Raced, baseline: str, seeds: Sequence[int]
) -> tuple[Comparison[str], str, Mapping[str, Times]] | None:
    """Return the race, the fastest without a failure at fresh seeds, and times there; None if all have failures."""
    while True:
        comparison = standings(raced.times, baseline)
        if not comparison.with_verdict(Verdict.FASTEST):
            return None
        (best,) = comparison.with_verdict(Verdict.FASTEST)
        names = sorted({best, baseline} if comparison.standings[baseline].num_ok else {best})
        for name in names:
            judge.keep_plan(name, runner.plan(name))
        judged = judge.times(names, seeds)
        lost = [seed for seed, time in judged[best].items() if time is None]
        if not lost:
            return comparison, best, judged
        raced.times[best] = {**raced.times[best], **runner.times([best], lost[:1])[best]}


def spent_s(records: Sequence[Record]) -> dict[str, float]:
    """Return seconds of an iteration by class of ``TIME_SHARES``, the average GPU's; together they are the iteration.

    Means over the iterations of at least one record: a share of a mean time would not be one.
    """
    rows = [row for record in records for row in record.iterations]
    return {name: math.fsum(row[name] * row[TIME] for row in rows) / len(rows) for name in TIME_SHARES}


def reason_of(runner: StrategyRace, raced: Raced, name: str) -> str:
    """Return why a strategy has no result, at the first of its seeds without one."""
    if name in raced.refusals:
        return raced.refusals[name]
    seeds = sorted(raced.times[name])
    pairs = zip(seeds, runner.records([name], seeds), strict=True)
    seed, record = next((seed, record) for seed, record in pairs if record.status != "ok")
    return f"at seed {seed}: {record.reason}" if seed != seeds[0] else record.reason


def frozen_plan(runner: StrategyRace, name: str, time: Interval, usual: Mapping[str, str]) -> TrainingPlan:
    """Return the frozen plan of a strategy with the time to expect; ``usual`` has the choices that are not given."""
    keys = {parse(text).key_or_group: text for text in runner.overrides}
    chosen = {key: keys[key].partition("=")[2] if key in keys else usual[key] for key in CHOSEN}
    config = runner.config(name, runner.first_seed)
    layout = runner.plan(name).layout
    planned = PlannedJob(
        **chosen,
        global_batch=config.global_batch,
        microbatch_size=config.microbatch_size or math.ceil(_mean_size(config, layout)),
        seed=config.seed,
        overrides=tuple(text for key, text in keys.items() if key not in STATED),
    )
    options = tuple(text for text in runner.variants[name][1:] if not text.startswith(OF_THE_PLANNER))
    # Chosen options stand where given ones do, so that a run of the plan has them as its own.
    options += layout.options
    layout = replace(layout, options=())
    expected = Expected(time.mean, time.low, time.high, time.num_values)
    return TrainingPlan(runner.strategy(name), options, planned, layout, expected)


def assumption_effect(label: str, best: str, usual: Times, changed: Mapping[str, Times]) -> dict[str, Any]:
    """Return the effect of a changed assumption on the fastest strategy and its rivals.

    ``change`` is the fastest's time over its usual one (None without a result), ``speedups`` those over it of all that
    are then faster; if it has no result, over its usual time, of all that have one.
    """
    change = _ratio(changed[best], usual)
    reference = changed[best] if change else usual
    ratios = {name: _ratio(times, reference) for name, times in changed.items() if name != best}
    speedups = {name: 1 / ratio.mean for name, ratio in ratios.items() if ratio and (not change or ratio.mean < 1)}
    return {"label": label, "change": change, "speedups": speedups, "has_rivals": bool(ratios)}


def _ratio(times: Times, others: Times) -> Interval | None:
    """Over the seeds at which both have a result, if those are all."""
    ratio = shared_ratio(with_result(times), with_result(others))
    return ratio if ratio and ratio.num_values == len(times) else None


def _effects(
    judge: StrategyRace, plans: Mapping[str, TrainingPlan], usual: Times, given: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return effects of changed assumptions on frozen plans, the fastest's first, whose ``usual`` times are given."""
    variants = {}
    for name, plan in plans.items():
        text = plan_text(plan).encode()
        path = judge.results.root / FROZEN / f"{sha256(text).hexdigest()[:16]}.yaml"
        write_atomically(path, text)
        variants[name] = plan_overrides(plan, path)
    frozen = replace(judge, variants=variants, overrides=())
    changes = {label: change for label, change in ASSUMPTIONS.items() if change.partition("=")[0] not in given}
    frozen.fetch((name, seed, (change,)) for seed in usual for change in changes.values() for name in plans)
    return [
        assumption_effect(label, next(iter(plans)), usual, frozen.times([*plans], [*usual], [change]))
        for label, change in changes.items()
    ]


def _drawn(judge: StrategyRace, names: Sequence[str], given: Mapping[str, str]) -> dict[str, Chance]:
    """Return chances under the first draws, each at a fresh seed; empty without a rival, and without draws."""
    config = judge.config(names[0], judge.first_seed)
    if len(names) < 2 or KEY in given or lacks_draws(config, NUM_DRAWS):
        return {}
    noise = () if "action_noise" in given else (f"action_noise={read_plan().action_noise:g}",)
    draws = {
        draw: (seed, (f"{KEY}={draw}", *noise)) for draw, seed in enumerate(judge.seeds(NUM_DRAWS, after=ROUNDS[-1]), 1)
    }
    judge.fetch((name, *run) for run in draws.values() for name in names)
    times_by_draw: dict[str, dict[int, float | None]] = {name: {} for name in names}
    for draw, (seed, keys) in draws.items():
        for name, times in judge.times(names, [seed], keys).items():
            times_by_draw[name][draw] = times[seed]
    return chances(times_by_draw)


def _mean_size(config: RunConfig, layout: Layout) -> float:
    llm = layout.modules[prepare(config).job.model.llm_index]
    return config.global_batch / (llm.dp * layout.num_microbatches)


INDENT = "  "
# Strategies that a line on the race so far names.
NUM_NAMED = 3
# The first class: work that every strategy must do.
WORK = next(iter(TIME_WORDS))


def answer_lines(answer: Recommendation, omitted: Mapping[str, Any], width: int) -> list[str]:
    """Return the answer, wrapped at ``width``; ``omitted``: strategies and keys that were not considered."""
    tables = {
        "ranking": ranking_lines(answer.comparison, width),
        "spent": spent_lines(answer.spent, width - len(INDENT)),
    }
    return _lines("answer", {**answer.values, **tables, "omitted": omitted}, width)


def summary_lines(answer: Recommendation, width: int) -> list[str]:
    """Return the answer in few lines: strategy to run, P(fastest), the first rows of the ranking, and the bounds."""
    # Below two lines of heading.
    ranking = ranking_lines(answer.comparison, width)
    shown = [*ranking[: 2 + NUM_NAMED], *(["..."] if len(ranking) > 2 + NUM_NAMED else [])]
    return _lines("summary", {**answer.values, "ranking": shown}, width)


def no_result_lines(reasons: Mapping[str, str]) -> list[str]:
    """Return why no strategy has a result: the most frequent reason first; if there are several, a line for each."""
    (first, number), *others = Counter(reasons.values()).most_common()
    of = f", of {number} of {len(reasons)}" if others else ""
    lines = [f"no strategy has a result{of}: {first}"]
    for reason, _ in [(first, number), *others] if others else []:
        lines.append(f"{listing([name for name, text in reasons.items() if text == reason])}: {reason}")
    return lines


def _lines(macro: str, values: Mapping[str, Any], width: int) -> list[str]:
    text: str = getattr(load_template("recommendation.jinja").module, macro)(values, width)
    return text.splitlines()


def ties(comparison: Comparison[str]) -> dict[str, Any]:
    """Return the strategies that are not decided, as good, or perhaps behind by chance."""
    rivals = {name: one.behind.num_values for name, one in comparison.standings.items() if one.behind}
    behind = comparison.with_verdict(Verdict.BEHIND)
    unsure = [name for name in behind if rivals[name] > 1]
    return {
        "has_rivals": bool(rivals),
        "is_single_seed": max(rivals.values(), default=0) == 1,
        "undecided": comparison.with_verdict(Verdict.OPEN),
        "good": comparison.with_verdict(Verdict.AS_GOOD),
        "unsure": unsure,
        "num_far": len(behind) - len(unsure),
    }


def ranking_lines(comparison: Comparison[str], width: int) -> list[str]:
    """Return a table of strategies with a result; columns that do not fit the width are dropped."""
    ranked = [(name, comparison.standings[name]) for name in comparison.ranked]
    shown = [(name, one.time, one) for name, one in ranked if one.verdict != Verdict.FAILED and one.time]
    digits = decimals([time.mean for _, time, _ in shown])
    columns = [
        Column("strategy", [name for name, *_ in shown]),
        Column("s/iter", [seconds(time.mean, digits) for _, time, _ in shown]),
        Column("behind", [percent(one.behind.mean) if one.behind else NOTHING for *_, one in shown]),
        Column("95%", [ends(one.behind, percent) for *_, one in shown]),
        Column("seeds", [f"{time.num_values}" for _, time, _ in shown]),
        Column("", [one.verdict if one.verdict != Verdict.FASTEST else "" for *_, one in shown]),
    ]
    return table_lines(fitting(columns, width, ["strategy", "s/iter", "behind"]), 1)


def spent_lines(spent: Spent, width: int) -> list[str]:
    """Return a table: a row for each class with time, a column for each strategy that fits the width."""
    totals = [math.fsum(spent_s.values()) for spent_s in spent.values()]
    digits = decimals(totals)
    shown = [name for name in TIME_WORDS if any(round(spent_s[name], digits) for spent_s in spent.values())]
    columns = [Column("", [*(TIME_WORDS[name] for name in shown), "iteration"])]
    for (strategy, spent_s), total in zip(spent.items(), totals, strict=True):
        columns.append(
            Column(strategy, [f"{value:.{digits}f}" for value in (*(spent_s[name] for name in shown), total)])
        )
    return table_lines(fitting(columns, width, ["", next(iter(spent))]), 1)


def reason(spent: Spent) -> dict[str, Any]:
    """Return how much of its time the fastest strategy computes, and the largest part of the rest."""
    best, seconds_by_class = next(iter(spent.items()))
    total = math.fsum(seconds_by_class.values())
    rest = max((name for name in seconds_by_class if name != WORK), key=lambda name: seconds_by_class[name])
    shares = {"work": seconds_by_class[WORK] / total, "rest_share": seconds_by_class[rest] / total}
    return {"strategy": best, "rest": rest, **shares}
