"""A recommendation as lines of text, by ``templates/recommendation.jinja``."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from entrain_bench.answers.comparison import Comparison, Verdict
from entrain_bench.answers.console_table import Column, fitting, table_lines
from entrain_bench.answers.labels import MODEL_ERROR
from entrain_bench.answers.recommend.recommendation import Recommendation, Reply, Spent
from entrain_bench.answers.text import NOTHING, TIME_WORDS, decimals, ends, listing, load_template, percent, seconds

INDENT = "  "


def answer_lines(
    answer: Recommendation, replies: Mapping[str, Reply], omitted: Mapping[str, Any], width: int
) -> list[str]:
    """Return the answer, wrapped at ``width``; ``replies`` have settings, ``omitted`` is not considered."""
    more = {
        "replies": replies,
        "omitted": omitted,
        "error": MODEL_ERROR,
        "ranking": ranking_lines(answer.comparison, width),
        "spent": spent_lines(answer.spent, width - len(INDENT)),
    }
    return _lines("answer", {**answer.values, **more}, width)


def summary_lines(answer: Recommendation, width: int) -> list[str]:
    """Return the three answers without settings and files, and the bound."""
    return _lines("summary", {**answer.values, "replies": answer.replies}, width)


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


def ranking_lines(comparison: Comparison[str], width: int) -> list[str]:
    """Return a table of variants with a result; columns that do not fit the width are dropped."""
    ranked = [(name, comparison.standings[name]) for name in comparison.ranked]
    shown = [(name, one.time, one) for name, one in ranked if one.verdict != Verdict.FAILED and one.time]
    digits = decimals([time.mean for _, time, _ in shown])
    columns = [
        Column("way to run it", [name for name, *_ in shown]),
        Column("s/iter", [seconds(time.mean, digits) for _, time, _ in shown]),
        Column("behind", [percent(one.behind.mean) if one.behind else NOTHING for *_, one in shown]),
        Column("95% CI", [ends(one.behind, percent) for *_, one in shown]),
        Column("seeds", [f"{time.num_values}" for _, time, _ in shown]),
        Column("", [one.verdict if one.verdict != Verdict.FASTEST else "" for *_, one in shown]),
    ]
    return table_lines(fitting(columns, width, ["way to run it", "s/iter", "behind"]), 1)


def spent_lines(spent: Spent, width: int) -> list[str]:
    """Return a table: a row for each class with time, a column for each answer that fits the width."""
    totals = [math.fsum(spent_s.values()) for spent_s in spent.values()]
    digits = decimals(totals)
    shown = [name for name in TIME_WORDS if any(round(spent_s.get(name, 0), digits) for spent_s in spent.values())]
    columns = [Column("", [*(TIME_WORDS[name] for name in shown), "iteration"])]
    for (name, spent_s), total in zip(spent.items(), totals, strict=True):
        columns.append(
            Column(name, [f"{value:.{digits}f}" for value in (*(spent_s.get(one, 0) for one in shown), total)])
        )
    return table_lines(fitting(columns, width, ["", next(iter(spent))]), 1)
