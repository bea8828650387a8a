"""A recommendation as lines of text (``templates/recommendation.jinja``), the race so far, and tables that fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.comparison import Comparison, Times, Verdict
from entrain_bench.answers.console_table import Column, fit_lines
from entrain_bench.answers.labels import FAMILIES
from entrain_bench.answers.recommend.recommendation import Recommendation
from entrain_bench.answers.recommend.strategy_race import standings
from entrain_bench.answers.text import (
    NOTHING,
    TIME_WORDS,
    count,
    decimals,
    ends,
    load_template,
    percent,
    seconds,
    spell_seeds,
)
from entrain_bench.base.arrays import IntArray
from entrain_bench.program.layout import Layout, ModuleLayout

INDENT = "  "
# Strategies that a line on the race so far names.
NUM_NAMED = 3
# Spans of ranks in a line at most.
MAX_SPANS = 6
# The first class: work that every strategy must do.
WORK = next(iter(TIME_WORDS))
# Parts below this share of a difference are not named.
LEAST_PART = 0.1
# Seconds of an iteration by strategy and class, the fastest strategy first.
type Spent = Mapping[str, Mapping[str, float]]


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

    def to_dict(self) -> dict[str, Any]:
        """Return the strategies, the names of families that are left out as a whole, and the keys."""
        whole = [FAMILIES[name] for name in dict.fromkeys(self.strategies.values()) if name not in self.families]
        return {"strategies": [*self.strategies], "families": whole, "given": [*self.given]}


def answer_lines(answer: Recommendation, omitted: Omitted, width: int, judged_dir: str) -> list[str]:
    """Return the lines of the answer, wrapped at ``width``; names and numbers are never cut."""
    values = {
        **answer.to_dict(),
        "omitted": omitted.to_dict(),
        "layout": layout_values(answer.layout),
        "losses": [*losses(answer.spent)],
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
    return _lines("summary", answer.to_dict() | {"ranking": shown, "as_good": ties(answer.comparison)}, width)


def no_result_lines(reasons: Mapping[str, str]) -> list[str]:
    """Return why no strategy has a result: the most frequent reason first; if there are several, a line for each."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    ranked = {reason: names[reason] for reason in sorted(names, key=lambda reason: -len(names[reason]))}
    return _lines("no_result", {"reasons": ranked, "num_strategies": len(reasons)}, 0)


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
    # The first three columns are the answer.
    return fit_lines(columns, 1, width, least=3, dropped=3)


def so_far(times: Mapping[str, Times], total: int) -> str:
    """Return the state of the race in one line: the fastest strategies, and how many have run."""
    comparison = standings(times)
    seeds = spell_seeds([seed for by_seed in times.values() for seed in by_seed])
    firsts = comparison.with_verdict(Verdict.FASTEST)
    best = comparison.standings[firsts[0]].time if firsts else None
    if not best:
        return f"no result yet ({len(times)} of {total} strategies, {seeds})"
    ranked = [(name, comparison.standings[name]) for name in comparison.ranked]
    named = [
        f"{name} {percent(one.behind.mean)}" for name, one in ranked if one.behind and one.verdict != Verdict.FAILED
    ]
    then = f", then {', '.join(named[:NUM_NAMED])}" if named else ""
    lost = len(times) - len(named) - 1
    without = f", {lost} without a result" if lost else ""
    number = f"{len(times)} of {count(total, 'strategy', 'strategies')}"
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
    return fit_lines(columns, 1, width, least=2, dropped=-1)


def losses(spent: Spent) -> Iterator[dict[str, Any]]:
    """Yield how much of its time the fastest computes, and by what each of the others takes longer."""
    (best, first), *others = spent.items()
    total = math.fsum(first.values())
    digits = decimals([total])
    rest = max((name for name in first if name != WORK), key=lambda name: first[name])
    yield {"strategy": best, "work": first[WORK] / total, "rest": rest, "rest_share": first[rest] / total}
    for strategy, spent_s in others:
        behind = math.fsum(spent_s.values()) - total
        changes = {name: spent_s[name] - first[name] for name in TIME_WORDS}
        ranked = sorted(changes, key=lambda name: -abs(changes[name]))
        named = [name for name in ranked if changes[name] and abs(changes[name]) >= LEAST_PART * abs(behind)]
        parts = {name: f"{changes[name]:+.{digits}f}" for name in named}
        is_equal = not round(abs(behind), digits)
        seconds_text = "" if is_equal else seconds(abs(behind), digits)
        yield {"strategy": strategy, "seconds": seconds_text, "is_longer": behind >= 0, "parts": parts}


def layout_values(layout: Layout) -> dict[str, Any]:
    """Return a layout as plain values: degrees, layers of each stage and ranks of each module, and shared ranks."""
    ranks = {placed.module: {*placed.ranks.ravel().tolist()} for placed in layout.modules}
    names = [*ranks]
    pairs = [(one, other) for place, one in enumerate(names) for other in names[place + 1 :]]
    return {
        "modules": [_module_values(placed) for placed in layout.modules],
        "is_shared": all(ranks[name] == ranks[names[0]] for name in names),
        "pairs": [(one, other, len(shared)) for one, other in pairs if (shared := ranks[one] & ranks[other])],
    }


def _module_values(placed: ModuleLayout) -> dict[str, Any]:
    is_grouped = len(placed.widths) > 1
    steps = np.unique(np.diff(placed.ranks, axis=0))
    return {
        "name": placed.module,
        # Virtual stages count as the one that their ranks make up.
        "pp": int(np.unique(placed.ranks[0]).size) // placed.ranks_per_block,
        **{name: getattr(placed, name) for name in ("tp", "cp", "dp", "sharded", "recompute", "offload")},
        "groups": [f"{tp}x{cp}" for tp, cp in placed.widths] if is_grouped else [],
        "stages_per_rank": placed.stages_per_rank,
        "layers": [*placed.layers_per_stage],
        "ranks": spans(placed.ranks if is_grouped else placed.ranks[0]),
        "has_replicas": placed.dp > 1 and not is_grouped,
        "step": int(steps[0]) if len(steps) == 1 else 0,
        "last_rank": int(placed.ranks.max()),
    }


def spans(ranks: IntArray) -> str:
    """Return ranks in words: ``0-15``, ``0-3, 8-11``; a long list is shortened."""
    distinct = np.unique(ranks)
    cuts = np.flatnonzero(np.diff(distinct) != 1) + 1
    parts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in np.split(distinct, cuts)]
    return ", ".join(parts if len(parts) <= MAX_SPANS else [*parts[: MAX_SPANS - 1], "...", parts[-1]])
