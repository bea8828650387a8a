"""Evidence for the answer: other settings, claims, fidelity, environment, commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from entrain_bench.answers.answer import Answer, Pictures
from entrain_bench.answers.case import Case
from entrain_bench.answers.commands import command_line, commands_of, results_word
from entrain_bench.answers.comparison import with_result
from entrain_bench.answers.documents.claim import cited
from entrain_bench.answers.documents.claim_pages import decides
from entrain_bench.answers.fidelity import pair_rows, summary
from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.report.page import Block, Commands, Image, Section, Table, Text, row
from entrain_bench.answers.report.read import NAMED, Material, setting_of
from entrain_bench.answers.sentences import notices
from entrain_bench.answers.statistics import kendall_tau, mean_interval
from entrain_bench.answers.text import NOTHING, count, ends, listing, spell_seeds
from entrain_bench.records.records import Record

# Fewer strategies have no order to keep.
LEAST = 2
WORDS = (
    "Every row changes the setting as it says; strategies plan again under it. Held: in how many cases the strategy "
    "that is fastest in the main setting is still the fastest or as good. Rank correlation is Kendall's tau-b of the "
    "strategies' times with the main setting at the same seed, mean over cases and seeds with its 95% confidence "
    "interval over seeds: 1 is the same order. Only strategies, seeds and cases that ran in both are compared."
)
# Where a case's commands are on the page.
type Anchor = Callable[[Case], str]


def firmness(main: Answer, others: Answer, anchor: Anchor) -> Section | None:
    """A row a setting that has cases and strategies of the main one; None if there is none."""
    usual = {tuple(case.job[name] for name in NAMED): case for case in main.cases}
    settings: dict[str, list[tuple[Case, Case]]] = {}
    for case in others.cases:
        other = usual.get(tuple(case.job[name] for name in NAMED))
        if other and [*_taus(other, case)] and len(_shared(other, case)) >= LEAST:
            ours = setting_of(other)
            changed = (f"{key}={text}" for key, text in setting_of(case).items() if ours[key] != text)
            settings.setdefault(" ".join(changed), []).append((other, case))
    rows = []
    for setting, pairs in settings.items():
        decided = [other.best[0] in case.best for other, case in pairs if other.best]
        taus: dict[int, list[float]] = {}
        for seed, tau in (found for pair in pairs for found in _taus(*pair)):
            taus.setdefault(seed, []).append(tau)
        mean = mean_interval([sum(each) / len(each) for _, each in sorted(taus.items())])
        interval = ends(mean, "{:.2f}".format)
        sizes = sorted(len(_shared(*pair)) for pair in pairs)
        cells = (
            count(len(pairs), "case"),
            " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))),
            f"{sum(decided)} of {len(decided)}",
            f"{mean.mean:.2f}" + (f" ({interval})" if interval != NOTHING else ""),
        )
        rows.append(row(Text(setting, link=anchor(pairs[0][1])), *cells))
    heading = ["changed", "cases", "strategies", "held", "rank correlation"]
    if not rows:
        return None
    return Section("robustness", "How firm that is", [Table(heading, rows, heading[1:]), WORDS])


def _shared(usual: Case, case: Case) -> list[tuple[str, ...]]:
    """The groups that two cases have."""
    return [own for own in usual.groups if own in case.groups]


def _taus(usual: Case, case: Case) -> Iterator[tuple[int, float]]:
    """Rank correlation of two cases' times at every seed that all shared groups ran in both; a lost run comes last."""
    names = _shared(usual, case)
    runs = [{*each.groups[own].runs} for each in (usual, case) for own in names]
    for seed in sorted(set.intersection(*runs)) if runs else ():
        orders = (
            [with_result(each.groups[own].times).get(seed, float("inf")) for own in names] for each in (usual, case)
        )
        yield seed, kendall_tau(*orders)


def claims_section(claims: pd.DataFrame, results_dir: str) -> Section:
    """All verdicts counted, claims without the cases of matrices, and how to measure them again (``claims.csv``)."""
    parts = []
    for title, name in (("as published", "published"), ("fair", "fair")):
        counts = Counter(claims.loc[claims[name] != "", name])
        parts.append(f"{title}: " + ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))
    heading = ["claim", "where", "paper", "as published", "verdict", "fair", "verdict, fair", "what decides"]
    rows = []
    for each in claims[claims["group"] == ""].to_dict("records"):
        claim = Text(each["claim"], link="claims-command")
        where = f"{cited(each['paper'])}, {each['where']}"
        published, fair = (
            (each[f"{name}_value"] or "-", Text(each[f"{name}_verdict"], strong=True)) for name in ("published", "fair")
        )
        rows.append(row(claim, where, each["paper_value"], *published, *fair, decides(each)))
    again = command_line(["figures", "claims", *results_word(results_dir)])
    commands = Commands("claims-command", "Measure all claims again", [again])
    return Section("claims", "Claims of the papers", [f"{'; '.join(parts)}.", Table(heading, rows), commands])


def fidelity_section(rows: pd.DataFrame, pictures: Pictures | None) -> Section:
    """Predicted and measured times on real ranks (``fidelity.csv``)."""
    found = []
    for prediction, own in rows.groupby("prediction", sort=False):
        values = summary(own, pair_rows(own))
        percent = (f"{100 * values[name]:.1f}%" for name in ("iteration_error", "speedup_error", "memory_error"))
        wrong = f"{values['sign_errors']:.0f} of {values['num_pairs']:.0f}"
        cells = (str(prediction), f"{values['num_programs']:.0f}", *percent, wrong, f"{values['kendall_tau']:.2f}")
        found.append(row(*cells, Text("again", link="fidelity-command")))
    errors = ["iteration error", "speedup error", "memory error"]
    heading = ["predicted by", "programs", *errors, "orders missed", "rank correlation", "command"]
    words = "Medians of absolute errors over programs trained on ranks of one machine, and over pairs of strategies."
    again = Commands("fidelity-command", "Measure again", ["make fidelity"])
    blocks: list[Block] = [Table(heading, found, heading[1:-1]), words, again]
    if pictures:
        own = rows[rows["prediction"] == rows["prediction"].iloc[-1]]
        caption = "Predicted against measured iteration times, gains over each other, and errors by quantity."
        blocks.append(Image(pictures.fidelity(own), caption))
    return Section("fidelity", "Fidelity", blocks)


def environment(material: Material) -> Section:
    """Return the environment of the runs, and what is left out."""
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
        f"Libraries: {_values(records, lambda record: ' '.join(map(' '.join, sorted(record.versions.items()))))}.",
        *(f"Samples, {line}." for line in notices(records)),
    ]
    return Section("environment", "Environment", [items])


def _values(records: Sequence[Record], value: Callable[[Record], str]) -> str:
    values = sorted({text for record in records if (text := value(record))})
    return listing(values) if values else "not recorded"


def rerun(answer: Answer, anchor: Anchor, results_dir: str) -> Section:
    """The commands of all cases; finished runs are read, not run again."""
    blocks: list[Block] = [
        "The commands belong to the folder in which the runs were started. Finished runs are read, not run again. "
        "The record of a run is runs/<xx>/<key>.json.",
    ]
    for case in answer.cases:
        lines = commands_of(case.records, results_dir)
        title = answer.case_name(case) or "All runs"
        blocks.append(Commands(anchor(case), f"{title}, {spell_seeds(case.comparison.seeds)}", lines))
    return Section("rerun", "How to run it again", blocks)
