"""A recommendation as lines of text: the answer, its layout in plain words, where time goes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.comparison import AS_GOOD, BEHIND, FAILED, FASTEST, MARGIN, OPEN, Comparison, Times
from entrain_bench.answers.console_table import GAP, Column, table_lines
from entrain_bench.answers.labels import FAMILIES
from entrain_bench.answers.posterior import posterior_sentence
from entrain_bench.answers.recommend.layouts import layout_lines
from entrain_bench.answers.recommend.recommendation import FURTHER, NUM_CHANGED, Firm, KnobCost, Recommendation
from entrain_bench.answers.recommend.strategy_race import standings
from entrain_bench.answers.sentences import ONE_SEED
from entrain_bench.answers.text import (
    NOTHING,
    TIME_WORDS,
    count,
    decimals,
    ends,
    listing,
    percent,
    seconds,
    speedup,
    spell_seeds,
    times,
)
from entrain_bench.records.records import labels_of

GIB = 2**30
INDENT = "  "
# Narrower, columns and words go one below the other.
LEAST_WIDTH = 40
# Strategies that a line on the race so far names.
NUM_NAMED = 3


def answer_lines(answer: Recommendation, omitted: Omitted, width: int, judged_dir: str) -> Iterator[str]:
    """Yield the lines of the answer, wrapped at ``width``; names and numbers are never cut."""
    for cost in answer.costs:
        yield from _wrapped(_cost_words(answer.best, cost, answer.fresh_seeds[:NUM_CHANGED]), width)
    yield from _wrapped(_headline(answer), width)
    yield from _wrapped(_drawn_words(answer), width)
    yield from _wrapped(_judged_words(answer), width)
    labels = labels_of(answer.config)
    config = answer.config
    names = ", ".join(f"{name} {labels[name]}" for name in ("model", "workload", "cluster"))
    batch = f"global batch {config.global_batch}"
    yield from _wrapped(f"Job: {names} ({answer.job.cluster.num_ranks} GPUs), {batch}.", width)
    yield from _wrapped(omitted_words(omitted), width)
    yield ""
    yield from ranking_lines(answer.comparison, width)
    if len(answer.spent) > 1:
        yield from _wrapped(_seeds_word(answer), width)
    for name, reason in answer.reasons.items():
        yield from _wrapped(f"No result: {name}: {reason}", width, hang=INDENT)
    yield from ("", "Command")
    yield from (INDENT + line for line in commands_of(answer.fresh, judged_dir))
    yield ""
    yield from _section("Layout", _layout(answer), width)
    yield from _section("Memory", [_memory(answer)], width)
    seeds = spell_seeds(answer.spent_seeds)
    yield from _wrapped(f"Where the time goes, seconds of an iteration (a GPU's average, {seeds})", width)
    yield from (INDENT + line for line in spent_lines(answer.spent, width - len(INDENT)))
    yield from _hung(loss_words(answer.spent), width)
    yield ""
    bound_s, gain = _bound_words(answer, "lower_bound_s")
    own = f"{_cluster_bound(answer)} Lower bound for this layout: {bound_s} s ({gain})."
    yield from _section("Lower bounds", [own], width)
    if answer.firm:
        rivals = [*answer.firm[0].rivals]
        among = f", against {listing(rivals)}" if rivals else ""
        seeds = spell_seeds(answer.fresh_seeds[:NUM_CHANGED])
        heading = f"Robustness{among} (the same plans under changed assumptions, {seeds})"
        yield from _section(heading, (f"{row.label}: {_firm_words(answer.best, row)}" for row in answer.firm), width)


def summary_lines(answer: Recommendation, width: int) -> Iterator[str]:
    """Yield the answer in few lines: strategy to run, P(fastest), the first rows of the ranking, and the bounds."""
    yield from _wrapped(_headline(answer), width)
    yield from _wrapped(posterior_sentence([answer.drawn], answer.best, answer.best), width)
    yield ""
    # Below two lines of heading.
    ranking = ranking_lines(answer.comparison, width)
    yield from ranking[: 2 + NUM_NAMED]
    yield from ["..."] if len(ranking) > 2 + NUM_NAMED else []
    yield ""
    yield from _wrapped(_cluster_bound(answer), width)


def no_result_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield why no strategy has a result: the most frequent reason first; if there are several, a line for each."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    ranked = sorted(names, key=lambda reason: -len(names[reason]))
    share = "" if len(ranked) == 1 else f", of {len(names[ranked[0]])} of {len(reasons)}"
    yield f"no strategy has a result{share}: {ranked[0]}"
    if share:
        yield from (f"{listing(names[reason])}: {reason}" for reason in ranked)


def _cost_words(best: str, cost: KnobCost, seeds: Sequence[int]) -> str:
    """Return one line on how much slower the given keys make the winner."""
    digits = decimals([cost.free_s])
    freed = " ".join(f"{text.partition('=')[0]}=null" for text in cost.given)
    verb = "costs" if len(cost.given) == 1 else "together cost"
    return (
        f"{' '.join(cost.given)} {verb} {times(cost.cost.mean)}: {best} takes {seconds(cost.given_s, digits)} s an "
        f"iteration, and {seconds(cost.free_s, digits)} s with {freed} ({spell_seeds(seeds)})."
    )


def _headline(answer: Recommendation) -> str:
    """Return one line: the strategy to run, its time, its speedup, and which others are as good."""
    gain = answer.speedup
    time = answer.time
    digits = decimals([time.mean])
    over = f", {speedup(gain)} over {answer.baseline}" if answer.baseline and gain else ""
    run = " ".join(answer.variant.overrides)
    return (
        f"Run {run}: {seconds(time.mean, digits)} s (95% {ends(time, lambda value: seconds(value, digits))}) an "
        f"iteration{over}. {_as_good(answer.comparison)}"
    )


def _drawn_words(answer: Recommendation) -> str:
    """P(fastest) of the recommended strategy, and among whom; empty without posterior draws."""
    text = posterior_sentence([answer.drawn], answer.best, answer.best)
    among = listing([answer.best, *(name for name in answer.drawn if name != answer.best)])
    return f"{text} Compared: {among}, planned again for each draw." if text else ""


def _judged_words(answer: Recommendation) -> str:
    doubt = f" {answer.time.doubt}." if answer.time.doubt else ""
    return (
        f"The plan is made once (planning_seed={answer.config.planning_seed}), then judged on "
        f"{spell_seeds(answer.fresh_seeds)}, which took no part in the choice. The interval is for its mean over "
        f"{FURTHER} further seeds.{doubt}"
    )


@dataclass(frozen=True, slots=True)
class Omitted:
    """Strategies and keys that a recommendation did not consider.

    Attributes:
        strategies: strategies left out, with their family.
        families: families of the considered strategies.
        given: overrides of keys that the tuner would choose.
    """

    strategies: Mapping[str, str]
    families: Collection[str]
    given: Sequence[str]


def omitted_words(omitted: Omitted) -> str:
    """Return one sentence on what was not considered."""
    parts = []
    if omitted.strategies:
        missing = [
            FAMILIES[each] for each in dict.fromkeys(omitted.strategies.values()) if each not in omitted.families
        ]
        families = f" (whole families: {', '.join(missing)})" if missing else ""
        parts.append(f"{listing([*omitted.strategies])}{families}")
    parts += [f"other values than {' '.join(omitted.given)}"] if omitted.given else []
    parts += [
        "one strategy with another's planner, assigner or schedule",
        "other settings of the framework and the job",
    ]
    return f"Not considered: {'; '.join(parts)}."


def _as_good(comparison: Comparison[str]) -> str:
    undecided, good, behind = map(comparison.with_verdict, (OPEN, AS_GOOD, BEHIND))
    rivals = {name: each.behind.num_values for name, each in comparison.standings.items() if each.behind}
    if not rivals:
        return "There is nothing to compare it with."
    if max(rivals.values()) == 1:
        return ONE_SEED
    unsure = [name for name in behind if rivals[name] > 1]
    parts = [
        f"Not decided against {listing(undecided)}, which ran at fewer seeds." if undecided else "",
        f"As good: {listing(good)}." if good else "",
        f"Slower, though not significantly: {listing(unsure)}." if unsure else "",
    ]
    early = ", or far behind at the first seed" if len(behind) > len(unsure) else ""
    return " ".join(filter(None, parts)) or f"All others are significantly slower{early}."


def ranking_lines(comparison: Comparison[str], width: int) -> list[str]:
    """Return a table of strategies with a result; columns that do not fit the width are dropped."""
    ranked = [(name, comparison.standings[name]) for name in comparison.ranked]
    shown = [
        (name, each.time, each.behind, each.verdict) for name, each in ranked if each.verdict != FAILED and each.time
    ]
    digits = decimals([time.mean for _, time, *_ in shown])
    columns = [
        Column("strategy", [name for name, *_ in shown]),
        Column("s/iter", [seconds(time.mean, digits) for _, time, *_ in shown]),
        Column("behind", [percent(behind.mean) if behind else NOTHING for *_, behind, _ in shown]),
        Column("95%", [ends(behind, percent) for *_, behind, _ in shown]),
        Column("seeds", [f"{time.num_values}" for _, time, *_ in shown]),
        Column("", [verdict if verdict != FASTEST else "" for *_, verdict in shown]),
    ]
    # The first three columns are the answer.
    while len(columns) > 3 and sum(column.width + len(GAP) for column in columns) - len(GAP) > width:
        columns.pop(3)
    return table_lines(columns, 1)


def so_far(found: Mapping[str, Times], total: int) -> str:
    """Return the state of the race in one line: the fastest strategies, and how many have run."""
    comparison = standings(found)
    seeds = spell_seeds([seed for own in found.values() for seed in own])
    firsts = comparison.with_verdict(FASTEST)
    if not firsts:
        return f"no result yet ({len(found)} of {total} strategies, {seeds})"
    best = comparison.standings[firsts[0]].time
    assert best
    ranked = [
        (name, each.behind) for name in comparison.ranked if (each := comparison.standings[name]).verdict != FAILED
    ]
    named = [f"{name} {percent(behind.mean)}" for name, behind in ranked if behind]
    then = f", then {', '.join(named[:NUM_NAMED])}" if named else ""
    lost = len(found) - len(named) - 1
    without = f", {lost} without a result" if lost else ""
    number = f"{len(found)} of {count(total, 'strategy', 'strategies')}"
    return f"{firsts[0]} {seconds(best.mean, decimals([best.mean]))} s{then} ({number}{without}; {seeds})"


def _seeds_word(answer: Recommendation) -> str:
    ended = " Ended early by seconds=: more seeds may decide more." if answer.raced.out_of_time else ""
    return (
        f"The race, {spell_seeds(sorted(answer.raced.times[answer.best]))}. Behind: geometric mean of the times over "
        "the fastest's, seed by seed, with its 95% confidence interval. As good: not significantly slower, and at most "
        f"{100 * (MARGIN - 1):.0f}%. A strategy that is significantly slower after a round, or far behind at the first "
        f"seed, runs at no further seeds.{ended}"
    )


def _layout(answer: Recommendation) -> Iterator[str]:
    config = answer.config
    layout = answer.layout
    yield from layout_lines(layout)
    if any(len(placed.widths) > 1 for placed in layout.modules):
        yield "In each iteration the strategy gives every sample a group of ranks."
    else:
        size = f"{answer.microbatch_size:g} samples on average"
        yield f"{count(layout.num_microbatches, 'microbatch', 'microbatches')} a replica, of {size}."
    memory = config.strategy["scheduler"].get("memory", "module")
    if memory != "module":
        yield f"The scheduler recomputes activations where its schedule would exceed memory (memory={memory})."
    elif not any(placed.recompute for placed in layout.modules):
        yield "No activations are recomputed."


def _memory(answer: Recommendation) -> str:
    job = answer.job
    used = max(r.metrics["peak_memory_bytes"] for r in (*answer.records, *answer.fresh))
    peak, budget, capacity = (each / GIB for each in (used, job.memory_budget_bytes, job.cluster.device.memory_bytes))
    return (
        f"Peak {peak:.1f} GiB of a GPU's {capacity:.1f} ({100 * peak / capacity:.0f}%), {budget - peak:.1f} GiB below "
        f"the budget of {budget:.1f} (memory_fraction={answer.config.memory_fraction:g})."
    )


def _cluster_bound(answer: Recommendation) -> str:
    bound_s, gain = _bound_words(answer, "cluster_bound_s")
    return f"Lower bound for any layout and schedule on this cluster: {bound_s} s (maximum further speedup {gain})."


def _bound_words(answer: Recommendation, name: str) -> tuple[str, str]:
    """Seconds of a bound, the mean over the fresh seeds, and the winner's time over it."""
    bound_s = math.fsum(record.metrics[name] for record in answer.fresh) / len(answer.fresh)
    return seconds(bound_s, decimals([bound_s])), times(answer.time.mean / bound_s)


def _firm_words(best: str, row: Firm) -> str:
    if row.change is None:
        return f"{best} has no result" + (f"; {listing(row.overtaking)} has" if row.overtaking else "")
    took = f"{best} takes {times(row.change.mean)} its time"
    if row.overtaking:
        ahead = [f"{name} ({times(1 / ratio.mean)})" for name, ratio in row.rivals.items() if ratio and ratio.mean < 1]
        return f"{took}; faster is then {listing(ahead)}"
    return f"{took} and stays the fastest" if row.rivals else took


def _section(title: str, lines: Iterable[str], width: int) -> Iterator[str]:
    yield from _wrapped(title, width)
    yield from _hung(lines, width)
    yield ""


def _hung(lines: Iterable[str], width: int) -> Iterator[str]:
    for line in lines:
        yield from _wrapped(line, width, INDENT, 2 * INDENT)


def _wrapped(text: str, width: int, first: str = "", hang: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(max(width, LEAST_WIDTH), first, hang or first)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)


# Seconds of an iteration by strategy and class, the fastest strategy first.
type Spent = Mapping[str, Mapping[str, float]]

# The first class: work that every strategy must do.
WORK = next(iter(TIME_WORDS))
# Parts below this share of a difference are not named.
LEAST_PART = 0.1


def spent_lines(spent: Spent, width: int) -> list[str]:
    """Return a table: a row for each class with time, a column for each strategy that fits the width."""
    totals = [math.fsum(spent_s.values()) for spent_s in spent.values()]
    digits = decimals(totals)
    shown = [name for name in TIME_WORDS if any(round(spent_s[name], digits) for spent_s in spent.values())]
    columns = [Column("", [*(TIME_WORDS[name] for name in shown), "iteration"])]
    for (strategy, spent_s), total in zip(spent.items(), totals, strict=True):
        values = [*(spent_s[name] for name in shown), total]
        columns.append(Column(strategy, [f"{value:.{digits}f}" for value in values]))
    while len(columns) > 2 and sum(column.width + len(GAP) for column in columns) - len(GAP) > width:
        columns.pop()
    return table_lines(columns, 1)


def loss_words(spent: Spent) -> Iterator[str]:
    """Yield how much of its time the fastest computes, and why each of the others takes longer."""
    (best, own), *others = spent.items()
    total = math.fsum(own.values())
    digits = decimals([total])
    rest = max((name for name in own if name != WORK), key=lambda name: own[name])
    yield (
        f"{own[WORK] / total:.0%} of {best}'s GPU time is {_plain(WORK)}; the largest part of the rest is "
        f"{_plain(rest)} ({own[rest] / total:.0%})."
    )
    for strategy, spent_s in others:
        behind = math.fsum(spent_s.values()) - total
        change = {name: spent_s[name] - own[name] for name in TIME_WORDS}
        ranked = sorted(change, key=lambda name: -abs(change[name]))
        named = [name for name in ranked if change[name] and abs(change[name]) >= LEAST_PART * abs(behind)]
        parts = ", ".join(f"{_plain(name)} {change[name]:+.{digits}f}" for name in named)
        if round(abs(behind), digits):
            yield f"{strategy} takes {abs(behind):.{digits}f} s {'more' if behind >= 0 else 'less'}: {parts}."
        else:
            yield f"{strategy} takes the same time."


def _plain(name: str) -> str:
    return TIME_WORDS[name].partition(":")[0].replace(",", " and")
