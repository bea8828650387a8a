"""What stands behind the answer: claims, fidelity, the environment, commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pandas as pd

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.commands import UNKNOWN, command_line, commands_of, num_unknown, results_word
from entrain_bench.answers.cost_source import cost_source
from entrain_bench.answers.documents.claims import decides
from entrain_bench.answers.fidelity import pair_rows, summary
from entrain_bench.answers.notices import notices
from entrain_bench.answers.report.firm import Anchor
from entrain_bench.answers.report.page import Block, Bullets, Commands, Section, Table, Text, plain, row
from entrain_bench.answers.report.read import Material
from entrain_bench.answers.text import count, listing, spell_seeds
from entrain_bench.records.records import Record


def claims_section(claims: pd.DataFrame, results_dir: str) -> Section:
    """Published claims and their verdicts here (``claims.csv``), and how they are measured again."""
    counted = "; ".join(
        f"{title}: {_counted(claims[f'{name}_verdict'])}"
        for title, name in (("as published", "published"), ("fair", "fair"))
    )
    heading = ["claim", "where", "paper", "as published", "verdict", "fair", "verdict, fair", "what decides"]
    rows = [
        row(
            Text(each["claim"], link="claims-command"),
            f"arXiv:{each['paper']}, {each['where']}",
            each["paper_value"],
            each["published_value"] or "-",
            Text(each["published_verdict"], strong=True),
            each["fair_value"] or "-",
            Text(each["fair_verdict"], strong=True),
            decides(each),
        )
        for each in claims.to_dict("records")
    ]
    again = command_line(["figures", "claims", *results_word(results_dir)])
    commands = Commands("claims-command", "Measure all claims again", [again])
    return Section("claims", "Claims of the papers", [plain(f"{counted}."), Table(heading, rows), commands])


def _counted(verdicts: pd.Series[str]) -> str:
    """How many claims have each verdict, other choices and reasons left out."""
    counts = Counter(verdicts.str.split("[:;]", regex=True).str[0])
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))


def fidelity_section(rows: pd.DataFrame) -> Section:
    """Predicted and measured times on real ranks (``fidelity.csv``)."""
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
        "speedup error",
        "memory error",
        "orders missed",
        "rank correlation",
        "command",
    ]
    words = "Medians of absolute errors over programs trained on ranks of one machine, and over pairs of strategies."
    again = Commands("fidelity-command", "Measure again", ["make fidelity"])
    return Section("fidelity", "Fidelity", [Table(heading, found, heading[1:-1]), plain(words), again])


def environment(material: Material) -> Section:
    """What made the runs, and what is left out."""
    records = material.answer.records
    sources = sorted({f"{r.labels['cluster']} {cost_source(r.config['cluster'])}" for r in records})
    made = sorted(record.made_at for record in records if record.made_at)
    items = [
        f"Runs: {len(records)}, {sum(record.status == 'ok' for record in records)} with a result; harness "
        f"{_values(records, lambda record: str(record.labels['harness']))}"
        + (f"; made {made[0]} to {made[-1]}." if made else "."),
        f"Hosts that planned and assigned: {_values(records, lambda record: record.host)}.",
        f"Costs: {listing(sources)}. Derived: from datasheets and published measurements; fitted: some constants are "
        "fitted to published times; profiled: layers timed on a device.",
        f"entrain-bench {material.version}; commits of the runs: {_values(records, lambda record: record.commit)}; "
        f"code versions (one for every set of parts): {_values(records, lambda record: record.code_version)}.",
        f"Libraries: {_values(records, _versions)}.",
        *(f"Samples, {line}." for line in notices(records)),
    ]
    return Section("environment", "Environment", [Bullets([(Text(item),) for item in items])])


def _versions(record: Record) -> str:
    return " ".join(f"{name} {version}" for name, version in sorted(record.versions.items()))


def _values(records: Sequence[Record], value: Callable[[Record], str]) -> str:
    values = sorted({text for record in records if (text := value(record))})
    return listing(values) if values else "not recorded"


def rerun(answer: Answer, anchor: Anchor, results_dir: str) -> Section:
    """The commands of all cases; finished runs are read, not run again."""
    blocks: list[Block] = [
        plain(
            "The commands belong to the folder in which the runs were started. Finished runs are read, not run again. "
            "The record of a run is runs/<xx>/<key>.json."
        ),
    ]
    for case in answer.cases:
        lines, unknown = commands_of(case.records, results_dir), num_unknown(case.records)
        lines += [f"# {count(unknown, 'run')}: {UNKNOWN}"] if unknown else []
        title = answer.case_name(case) or "All runs"
        blocks.append(Commands(anchor(case), f"{title}, {spell_seeds(case.comparison.seeds)}", lines))
    return Section("rerun", "How to run it again", blocks)
