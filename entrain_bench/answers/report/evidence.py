"""What stands behind the answer: claims, fidelity, runs without result, the environment, commands."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from entrain_bench.answers.cost_source import UNKNOWN
from entrain_bench.answers.documents.claim_pages import decides
from entrain_bench.answers.documents.claims import SIDE_SEPARATOR
from entrain_bench.answers.fidelity import pair_rows, summary
from entrain_bench.answers.labels import consecutive
from entrain_bench.answers.report.cases import Case
from entrain_bench.answers.report.commands import COMMAND, commands_of
from entrain_bench.answers.report.page import Block, Bullets, Commands, Section, Table, Text, plain, row
from entrain_bench.answers.report.words import count, of_case

# How many values a line names before it says how many more there are.
NAMED = 12


def claims_section(claims: pd.DataFrame) -> Section:
    """Published claims and their verdicts here (``claims.csv``), and how each is measured again."""
    counted = "; ".join(
        f"{title}: {_counted(claims[f'{name}_verdict'])}"
        for title, name in (("as published", "published"), ("fair", "fair"))
    )
    heading = ["claim", "where", "paper", "as published", "verdict", "fair", "verdict, fair", "what decides"]
    found = {f"claim-{place}": each for place, each in enumerate(claims.to_dict("records"), start=1)}
    rows = [
        row(
            Text(each["claim"], link=anchor),
            f"arXiv:{each['paper']}, {each['where']}",
            each["paper_value"],
            each["published_value"] or "-",
            Text(each["published_verdict"], strong=True),
            each["fair_value"] or "-",
            Text(each["fair_verdict"], strong=True),
            decides(each),
        )
        for anchor, each in found.items()
    ]
    commands = [Commands(anchor, each["name"], _claim_commands(each["runs"])) for anchor, each in found.items()]
    return Section("claims", "Claims of the papers", [plain(f"{counted}."), Table(heading, rows), *commands])


def _counted(verdicts: pd.Series[str]) -> str:
    """How many claims have each verdict, other choices and reasons left out."""
    counts = Counter(verdicts.str.split("[:;]", regex=True).str[0])
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))


def _claim_commands(runs: str) -> list[str]:
    """A sweep for each side."""
    return [f"{COMMAND} --multirun {side}" for side in runs.split(SIDE_SEPARATOR)]


def fidelity_section(rows: pd.DataFrame) -> Section:
    """Predicted beside measured on real ranks (``fidelity.csv``)."""
    found = []
    for prediction, own in rows.groupby("prediction", sort=False):
        values = summary(own, pair_rows(own))
        percent = (f"{100 * values[name]:.1f}%" for name in ("iteration_error", "speedup_error", "memory_error"))
        wrong = f"{values['sign_errors']:.0f} of {values['num_pairs']:.0f}"
        cells = (str(prediction), f"{values['num_programs']:.0f}", *percent, wrong, f"{values['kendall_tau']:.2f}")
        found.append(row(*cells, Text("again", link="fidelity-command")))
    heading = [
        "predicted by",
        "programs",
        "iteration error",
        "speed-up error",
        "memory error",
        "orders missed",
        "rank correlation",
        "command",
    ]
    words = "Medians of absolute errors over programs trained on ranks of one machine, and over pairs of strategies."
    again = Commands("fidelity-command", "Measure again", ["make fidelity"])
    return Section("fidelity", "Fidelity", [Table(heading, found, heading[1:-1]), plain(words), again])


def failures(cases: Sequence[Case]) -> Section | None:
    """A sentence on every strategy that lacks a result somewhere, with its reason; None if none does."""
    items = [
        (Text(f"{sentence}{f' ({case.setting})' if case.setting else ''}"), Text("runs", link=case.anchor))
        for case in cases
        for sentence in case.problems
    ]
    return Section("failed", "What has no result", [Bullets(items)]) if items else None


def environment(
    table: pd.DataFrame, version: str, num_older: int, num_variants: int, samples: Sequence[str] = ()
) -> Section:
    """What the runs were made by and of.

    Args:
        table: one row a run that is compared.
        version: of the suite that wrote the page.
        num_older: runs of older code that were left out.
        num_variants: runs that were left out for their strategy's parameters.
        samples: lines on workloads that were not taken as they are.
    """
    hosts, codes = _values(table["host"]), _values(table["code_version"])
    costs = (f"{source}: {_values(runs['cluster'])}" for source, runs in table.groupby("cost_source"))
    harnesses = ", ".join(sorted(table["harness"].unique()))
    items = [
        f"Runs: {len(table)}, {int((table['status'] == 'ok').sum())} with a result; harness {harnesses}.",
        f"Host that planned and assigned: {hosts}.",
        f"Cost source. {'; '.join(costs)}. Derived: from datasheets and published measurements; fitted: some constants "
        "are fitted to published times; profiled: layers timed on a device.",
        f"entrain-bench {version}; code versions of the runs (one for every set of parts): {codes}.",
    ]
    items += [f"Samples, {line}." for line in samples]
    if UNKNOWN in {*table["cost_source"]}:
        items.append("Made from table.csv alone: commands lack what was changed inside of a model or cluster.")
    if num_older:
        items.append(f"Left out: {count(num_older, 'run')} of older code.")
    if num_variants:
        items.append(
            f"Left out: {count(num_variants, 'run')} with other parameters of a strategy than most in their setting."
        )
    return Section("environment", "Environment", [Bullets([(Text(item),) for item in items])])


def _values(column: pd.Series[str]) -> str:
    values = sorted({value for value in column if value})
    more = f" and {len(values) - NAMED} more" if len(values) > NAMED else ""
    return ", ".join(values[:NAMED]) + more if values else "not recorded"


def rerun(cases: Sequence[Case]) -> Section:
    """The commands of all cases; finished runs are read, not run again."""
    blocks: list[Block] = [
        plain("Runs whose records are there are read, not run again. A run's record is runs/<xx>/<key>.json."),
        Commands("figures-command", "Everything that the repository draws, and this page", ["make figures report"]),
    ]
    for case in cases:
        setting = f" ({case.setting})" if case.setting else ""
        title = f"{of_case(case)}{setting}, {count(len(case.seeds), 'seed')}: {consecutive(case.seeds)}"
        blocks.append(Commands(case.anchor, title, _case_commands(case)))
    return Section("rerun", "How to run it again", blocks)


def _case_commands(case: Case) -> list[str]:
    ran = case.runs.drop_duplicates("strategy")
    overrides = {str(one): shlex.split(own) for one, own in zip(ran["strategy"], ran["own"], strict=True)}
    return commands_of(overrides, shlex.split(str(case.runs["shared"].iloc[0])), case.seeds)
