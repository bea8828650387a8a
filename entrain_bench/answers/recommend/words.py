"""A recommendation as lines of text (``templates/recommendation.jinja``), the race so far, and tables that fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.comparison import Comparison, Times, Verdict
from entrain_bench.answers.console_table import Column, fitting, table_lines
from entrain_bench.answers.recommend.recommendation import Recommendation
from entrain_bench.answers.recommend.strategy_race import standings
from entrain_bench.answers.text import (
    NOTHING,
    TIME_WORDS,
    count,
    decimals,
    ends,
    listing,
    load_template,
    percent,
    seconds,
    spell_seeds,
)
from entrain_bench.base.arrays import IntArray
from entrain_bench.program.layout import ModuleLayout

INDENT = "  "
# Strategies that a line on the race so far names.
NUM_NAMED = 3
# Spans of ranks in a line at most.
MAX_SPANS = 6
# The first class: work that every strategy must do.
WORK = next(iter(TIME_WORDS))
# Seconds of an iteration by strategy and class, the fastest strategy first.
type Spent = Mapping[str, Mapping[str, float]]


def answer_lines(answer: Recommendation, omitted: Mapping[str, Any], width: int, judged_dir: str) -> list[str]:
    """Return the lines of the answer, wrapped at ``width``; names and numbers are never cut.

    ``omitted`` are ``strategies`` that were not considered, and ``given`` values of keys that the tuner chooses.
    """
    values = {
        **answer.values,
        "omitted": omitted,
        "layout": [*map(module_values, answer.plan.layout.modules)],
        "reason": reason(answer.spent),
        "commands": commands_of(answer.fresh, judged_dir),
        "ranking": ranking_lines(answer.comparison, width),
        "spent": spent_lines(answer.spent, width - len(INDENT)),
        "as_good": ties(answer.comparison),
    }
    return _lines("answer", values, width)


def summary_lines(answer: Recommendation, width: int) -> list[str]:
    """Return the answer in few lines: strategy to run, P(fastest), the first rows of the ranking, and the bounds."""
    # Below two lines of heading.
    ranking = ranking_lines(answer.comparison, width)
    shown = [*ranking[: 2 + NUM_NAMED], *(["..."] if len(ranking) > 2 + NUM_NAMED else [])]
    return _lines("summary", {**answer.values, "ranking": shown, "as_good": ties(answer.comparison)}, width)


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


def so_far(times: Mapping[str, Times], total: int) -> str:
    """Return the state of the race in one line: the fastest strategies, and how many have run."""
    comparison = standings(times)
    seeds = spell_seeds([seed for by_seed in times.values() for seed in by_seed])
    firsts = comparison.with_verdict(Verdict.FASTEST)
    best = comparison.standings[firsts[0]].time if firsts else None
    number = f"{len(times)} of {count(total, 'strategy', 'strategies')}"
    if not best:
        return f"no result yet ({number}, {seeds})"
    lost = comparison.with_verdict(Verdict.FAILED)
    behind = {name: comparison.standings[name].behind for name in comparison.ranked if name not in lost}
    named = [f"{name} {percent(ratio.mean)}" for name, ratio in behind.items() if ratio]
    then = f", then {', '.join(named[:NUM_NAMED])}" if named else ""
    without = f", {len(lost)} without a result" if lost else ""
    return f"{firsts[0]} {seconds(best.mean, decimals([best.mean]))} s{then} ({number}{without}; {seeds})"


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


def module_values(placed: ModuleLayout) -> dict[str, Any]:
    """Return a module's degrees, layers of each stage and ranks as plain values."""
    is_grouped = len(placed.widths) > 1
    return {
        "name": placed.module,
        # Virtual stages count as the one that their ranks make up.
        "pp": int(np.unique(placed.ranks[0]).size) // placed.ranks_per_block,
        **{name: getattr(placed, name) for name in ("tp", "cp", "dp", "sharded", "recompute", "offload")},
        "groups": [f"{tp}x{cp}" for tp, cp in placed.widths] if is_grouped else [],
        "stages_per_rank": placed.stages_per_rank,
        "layers": [*placed.layers_per_stage],
        "ranks": spans(placed.ranks),
    }


def spans(ranks: IntArray) -> str:
    """Return ranks in words: ``0-15``, ``0-3, 8-11``; a long list is shortened."""
    distinct = np.unique(ranks)
    cuts = np.flatnonzero(np.diff(distinct) != 1) + 1
    parts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in np.split(distinct, cuts)]
    return ", ".join(parts if len(parts) <= MAX_SPANS else [*parts[: MAX_SPANS - 1], "...", parts[-1]])
