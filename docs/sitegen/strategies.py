"""A page per strategy: facts, a diagram of its own schedule, its committed results, then what docs/strategies says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from urllib.parse import quote

from entrain_bench.answers.strategy_facts import StrategyFacts
from sitegen.diagram import BASELINE, WORDS, Schedule, alternative, command_of, svg
from sitegen.tables import Row, facts, markdown, raw

NONE_PUBLIC = "we found none that is public"
NOWHERE = "in no other framework that we know"
HERE = "this suite: `simulate`; `train` where the strategy allows it (tested on CPU ranks)"
# By rule of ``simulate.rendezvous``: how ranks must post receives where a send waits for its receiver.
TRANSFERS = {
    "separate": "any blocking send and receive",
    "batched": "a pass's sends batched with the next pass's receives, as in megatron-core's 1F1B",
    "ahead": "receives posted before earlier passes; batched transfers would deadlock",
}
# Of a row of results: workload, model, cluster, degrees; seconds, speedup, idle; rows of most seeds are shown.
CASE = (0, 1, 2, 3)
SHOWN = (6, 7, 8)
SEEDS = 10
MAX_ROWS = 12
# How far the common time scale of the diagrams goes beyond the baseline.
ROOM = 1.15


def strategy_page(
    strategy: StrategyFacts, schedules: Mapping[str, Schedule], results: Iterable[Row], text: str, papers: Sequence[str]
) -> str:
    """Return a strategy's page; links are those of a page in ``docs/strategies``.

    Args:
        strategy: the facts.
        schedules: of all strategies.
        results: its rows of the table of results.
        text: the committed page, if the strategy has one of its own; empty if it shares one.
        papers: its values in the column of papers of the claims, if it has claims.
    """
    papers_text = ", ".join(f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in strategy.paper)
    table = {
        "choose it": f"`strategy={strategy.name}`",
        "family": strategy.family,
        "balances": "; ".join(strategy.balances),
        "needs": "; ".join(strategy.needs),
        "paper": papers_text,
        "authors' code": strategy.code or NONE_PUBLIC,
        "runs today": "; ".join([HERE, *strategy.runs_in] if strategy.runs_in else [HERE, NOWHERE]),
        "transfers": f"{TRANSFERS[strategy.transfers]} ([rules](../training/communication.md))",
        "claims": ", ".join(f'<a href="../claims.html?paper={quote(paper)}">{paper}</a>' for paper in papers),
    }
    parts = [f"# {strategy.label}", strategy.summary, facts(table)]
    parts += ["## Its schedule", *_diagram(strategy, schedules)]
    if rows := _results(results):
        parts += ["## Committed results", rows]
    if text:
        parts += ["## How it works", _without_title(text)]
    else:
        parts.append(
            f"## How it works\n\nPlanning, options, deviations and measured tables: [{strategy.page}]({strategy.page})."
        )
    return "\n\n".join(parts) + "\n"


def overview(strategies: Iterable[StrategyFacts]) -> str:
    """Return a table of all strategies; links are those of the page of their section."""
    rows = [
        [
            f"[{each.label}](../docs/strategies/{each.name}.md)",
            each.family,
            "; ".join(each.balances),
            "; ".join(each.runs_in) or "here only",
        ]
        for each in strategies
    ]
    return markdown(["strategy", "family", "what it balances", "where it runs today"], rows)


def _diagram(strategy: StrategyFacts, schedules: Mapping[str, Schedule]) -> list[str]:
    schedule = schedules[strategy.name]
    baseline = schedules[BASELINE]
    common = baseline.seconds * ROOM
    scale = "Time scale as on every page" if schedule.seconds <= common else "Slower: time scale of its own"
    caption = (
        f"{alternative(schedule, baseline.seconds)} Dashed: where Megatron ends. Numbers are microbatches. {scale}. "
        f"The same job as on every page: {WORDS}. Planned by the strategy's own trials."
    )
    picture = svg(schedule, max(common, schedule.seconds), baseline.seconds)
    return [
        raw(f'<figure class="schedule">\n{picture}\n<figcaption>{escape(caption)}</figcaption>\n</figure>'),
        f"```sh\n{command_of(strategy.name)}\n```",
    ]


def _results(rows: Iterable[Row]) -> str:
    """The rows of most seeds as a table; empty if there are none."""
    firm = sorted(rows, key=lambda row: -int(row.cells[SEEDS].text))[:MAX_ROWS]
    lines = []
    for row in sorted(firm, key=lambda row: [row.cells[place].text for place in CASE]):
        workload, model, cluster, degrees = (row.cells[place].text for place in CASE)
        lines.append([workload, model, f"{cluster}, {degrees}", *(row.cells[place].text for place in SHOWN)])
    heading = ["workload", "model", "cluster, degrees", "seconds per iteration", "speedup over Megatron", "idle"]
    more = "Commands and other strategies: [all results](../../results_table.md)."
    return f"{markdown(heading, lines)}\n{more}" if lines else ""


def _without_title(text: str) -> str:
    first, _, rest = text.partition("\n")
    return (rest if first.startswith("# ") else text).strip()
