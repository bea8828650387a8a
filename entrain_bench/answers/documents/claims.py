"""Claims measured, judged by one rule and written: those of ``experiments/claim``, and those of a user's folder."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.documents.agreement import cluster_facts, mismatches
from entrain_bench.answers.documents.claim import (
    ENCODER_GPUS,
    ENCODER_STAGES,
    GPU_DAYS,
    KEYS,
    Claim,
    parse_claim,
)
from entrain_bench.answers.documents.claim_pages import (
    INDEX,
    PAGES,
    claims_markdown,
    claims_pages,
    counts_markdown,
)
from entrain_bench.answers.documents.definition import Source, load_definitions, override_key
from entrain_bench.answers.documents.published import cell_fields, find_cells
from entrain_bench.answers.documents.sides import ClaimSide
from entrain_bench.answers.documents.verdict import ELSEWHERE, central, combined, measured, verdict
from entrain_bench.answers.tables import MISSING, encoder_stages_and_gpus, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.config.tree import config_tree
from entrain_bench.run.study import Output, Study

TABLE = "claims.csv"
# How many claims have each verdict, for pages that show no claim.
COUNTS = "tables/claims_counts.md"
NOT_MEASURED = "not measured"
# What runs decide of a row; the rest is in the YAML. ``runs`` is a hash of the sweeps that a row is of.
MEASURED = (
    *("published_value", "published_verdict", "fair_value", "fair_verdict"),
    *("otherwise_value", "otherwise_verdict", "other_choices"),
)
MEMORY = "peak_memory_bytes"
OTHER_MEMORY = "cluster.device.memory_bytes"
SECONDS_PER_DAY = 86400
# Overrides of the seeds over which a number is averaged.
SEEDS = ("seed=", "planning_seed=")
# How a run says that its program needs more memory than the device has.
NEEDS = re.compile(r"needs [\d.]+ GiB")
COLUMNS = (
    *("name", "group", "claim", "paper", "where", "paper_value", *MEASURED[:4], "assumption", *MEASURED[4:]),
    "runs",
)


def load_claims(config_dir: str | None = None) -> list[Claim]:
    """Return every claim: by file, then by name, ours before those in a folder of the user's.

    Raises:
        UserError: naming the file and the claim, for one that says otherwise than its published cells.
    """
    folders = {config_tree(): None, **({Path(config_dir): config_dir} if config_dir else {})}
    return [
        replace(claim, file=path.stem, system=claim.system or path.stem)
        for folder, own in folders.items()
        for path in sorted((folder / "claim").glob("*.yaml"))
        for claim in sorted(
            load_definitions(path, "claims", KEYS, partial(_checked, own), source=_source(own)),
            key=lambda each: each.name,
        )
    ]


def _source(config_dir: str | None) -> Source:
    """Fields of the cells that a definition names; cases of a matrix by the pattern of their cells."""
    return Source(
        "cells",
        lambda cells: cell_fields(find_cells(cells, config_dir)[0], config_dir) if cells else {},
        "cell",
        lambda pattern: [cell.id for cell in find_cells([pattern], config_dir)],
    )


def _checked(config_dir: str | None, name: str, values: Mapping[str, Any]) -> Claim:
    claim = parse_claim(name, values, config_dir)
    if wrong := mismatches(claim):
        raise UserError("; ".join(wrong))
    return claim


def claims_output(config_dir: str | None = None, theirs: bool = False) -> Output:
    """The document of all claims, or if ``theirs`` of those in a folder of the user's, if it has any."""
    claims = load_claims(config_dir)
    if theirs:
        claims = [claim for claim in claims if claim.config_dir] or claims
    sweeps = [sweep for claim in claims for setting in claim.settings for sweep in setting.sweeps]
    files = [TABLE, INDEX, *dict.fromkeys(f"{PAGES}/{claim.file}.md" for claim in claims)]
    numbers = [cell.printed for claim in claims for cell in (*claim.cells, *claim.per)]
    own = [*dict.fromkeys(sweeps)]
    return Output("claims", own, lambda study: write_claims(claims, study), files, files=[COUNTS], details=numbers)


def write_claims(claims: Sequence[Claim], study: Study) -> str:
    """Write ``claims.csv``, ``claims.md``, counts and a page per paper; returns what was not measured, if anything."""
    rows = [claim_row(claim, study) for claim in claims]
    csv = claims_table(rows).to_csv(index=False, lineterminator="\n")
    pages = {INDEX: claims_markdown(claims, rows), COUNTS: counts_markdown(claims, rows), **claims_pages(claims, rows)}
    for name, text in {TABLE: csv, **pages}.items():
        write_atomically(study.results.root / name, text.encode())
    found = [(row["name"], name, row[f"{name}_verdict"]) for row in rows for name in ("published", "fair", "otherwise")]
    return "; ".join(f"{claim} ({name}): {text}" for claim, name, text in found if text.startswith(NOT_MEASURED))


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """Result of a setting: the number, its text and the verdict, or why there is no result."""

    text: str
    verdict: str
    number: float | None = None


def read_rows(claims: Sequence[Claim], path: Path) -> list[dict[str, str]]:
    """The row of each claim, measured as ``claims.csv`` says; one that is not in it, or was of other runs, says so."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame(columns=["name"])
    known = {row["name"]: row for row in table.to_dict("records")}
    rows = []
    for claim in claims:
        words = _words(claim)
        row = known.get(claim.name)
        has = {"published": True, "fair": claim.fair is not None, "otherwise": claim.toggled is not None}
        unknown = dict.fromkeys(MEASURED, "")
        unknown |= {f"{name}_verdict": f"{NOT_MEASURED}: run make claims" for name, there in has.items() if there}
        current = row is not None and row.get("runs") == words["runs"]
        rows.append(words | ({name: str(row[name]) for name in MEASURED} if row and current else unknown))
    return rows


def claim_row(claim: Claim, study: Study) -> dict[str, str]:
    """Measure and judge a claim; without results the verdict is the reason."""
    published = _result(claim, claim.published, study)
    fair = _result(claim, claim.fair, study) if claim.fair else ClaimResult("", "")
    choices = {label: _result(claim, setting, study) for label, setting in claim.choices.items()}
    others = [f"{label}: {one.text or 'nothing'} ({one.verdict})" for label, one in choices.items()]
    dissent = {choice.verdict: None for choice in choices.values() if choice.number is not None}
    dissent.pop(published.verdict, None)
    otherwise = _result(claim, claim.toggled, study) if claim.toggled else ClaimResult("", "")
    return _words(claim) | {
        "published_value": published.text + _range(claim, [*choices.values()]),
        "published_verdict": published.verdict + (f"; under other choices {' or '.join(dissent)}" if dissent else ""),
        "fair_value": fair.text,
        "fair_verdict": fair.verdict,
        "otherwise_value": otherwise.text,
        "otherwise_verdict": otherwise.verdict,
        "other_choices": "; ".join(others),
    }


def _words(claim: Claim) -> dict[str, str]:
    """Return the texts of a claim's row that need no run."""
    sweeps = dict.fromkeys(sweep for setting in claim.settings for sweep in setting.sweeps)
    assumed = ""
    if claim.assumption:
        assumed = f"{claim.assumption.text}; otherwise, {claim.assumption.otherwise}"
    return {
        **{name: str(getattr(claim, name)) for name in COLUMNS if hasattr(claim, name)},
        "paper_setting": claim.paper_setting + "".join(f" Here otherwise: {text}." for text in claim.differs.values()),
        "paper_value": claim.format(claim.value),
        "assumption": assumed,
        "published_setting": claim.published.words,
        "fair_setting": claim.fair.words if claim.fair else "",
        "why": claim.why,
        "runs": hashlib.sha256("\n".join(map(shlex.join, sweeps)).encode()).hexdigest()[:16],
    }


def _result(claim: Claim, setting: ClaimSide, study: Study) -> ClaimResult:
    claim = claim.under(setting)
    try:
        tables = [[_side_table(claim, side, study) for side in pair] for pair in setting.pairs]
        complete, lacking = _complete(tables)
        cases = measured(claim, complete)
    except UserError as error:
        unfit = NEEDS.search(str(error))
        return ClaimResult("", f"{ELSEWHERE}: {error}" if unfit else f"{NOT_MEASURED}: {error}")
    text = combined(claim, cases) + lacking
    number = central(claim, cases)
    need, has = _memory(setting, complete, study)
    if need > has and claim.measure.metric != MEMORY:
        return ClaimResult(text, f"{ELSEWHERE}: needs {need / 2**30:.0f} of {has / 2**30:.0f} GiB", number)
    return ClaimResult(text, verdict(claim, cases), number)


def _memory(setting: ClaimSide, pairs: Sequence[Sequence[pd.DataFrame]], study: Study) -> tuple[float, float]:
    """The most memory that runs need, and that of the published device, in bytes."""
    tables = [table for pair in pairs for table in pair if MEMORY in table]
    need = max((float(table[MEMORY].max()) for table in tables), default=0.0)
    changed = [sweep for sweep in setting.sweeps if OTHER_MEMORY in map(override_key, sweep)]
    devices = [study.cells(*sweep)[0].config.cluster["device"] for sweep in setting.sweeps if sweep not in changed]
    published = [cluster_facts(sweep).memory_bytes for sweep in changed]
    return need, min([*published, *(float(device["memory_bytes"]) for device in devices)])


def _range(claim: Claim, choices: Sequence[ClaimResult]) -> str:
    """The range of the numbers under other choices, and how many of these have none."""
    if not choices:
        return ""
    numbers = sorted(choice.number for choice in choices if choice.number is not None)
    ends = claim.format([numbers[0], numbers[-1]][: len(numbers)]) if numbers else "nothing"
    lacking = len(choices) - len(numbers)
    return f"; {ends} under other choices" + (f" ({lacking} of {len(choices)} without result)" if lacking else "")


def _side_table(claim: Claim, side: Sequence[str], study: Study) -> pd.DataFrame:
    """The runs of one side; ``configuration`` tells those apart that differ by more than the seed.

    A plan is the same at every seed of a job. Where a claim sweeps the planning seed, that seed counts instead.

    Raises:
        UserError: if any run has not been run.
    """
    cells = study.cells(*side)
    table = run_table(cells, study.results)
    if (table["status"] == MISSING).any():
        raise UserError(study.problem(*side))
    plain = {cell.key: [text for text in cell.overrides if not text.startswith(SEEDS)] for cell in cells}
    draws = {cell.key: cell.config.planning_seed for cell in cells}
    found = {cell.key: encoder_stages_and_gpus(cell, study.results.read(cell.key)) for cell in cells}
    table = table.assign(configuration=table["key"].map(lambda key: " ".join(plain[key])))
    if len({*draws.values()}) > 1:
        table["seed"] = table["key"].map(draws)
    table[ENCODER_STAGES] = table["key"].map({key: stages for key, (stages, _) in found.items()})
    table[ENCODER_GPUS] = table["key"].map({key: stages * ranks for key, (stages, ranks) in found.items()})
    if claim.measure.metric == GPU_DAYS:
        cluster = cells[0].config.cluster
        (samples,) = find_cells([claim.measure.samples], claim.config_dir)
        gpus = cluster["num_nodes"] * cluster["gpus_per_node"]
        table[GPU_DAYS] = (samples.value or np.nan) * gpus / table["samples_per_s"].astype(float) / SECONDS_PER_DAY
    return table


def _complete(pairs: Sequence[Sequence[pd.DataFrame]]) -> tuple[list[list[pd.DataFrame]], str]:
    """The tables without the seeds at which any run of the claim has no result, and a note on what is left out.

    Raises:
        UserError: if that leaves no seed.
    """
    runs = pd.concat([table for pair in pairs for table in pair])
    without = runs[runs["status"] != "ok"]
    left = {*runs["seed"]} - {*without["seed"]}
    reason = f"{len(without)} of {len(runs)} runs have no result" if len(without) else ""
    if not left:
        raise UserError(f"{reason}: {without['reason'].iloc[0]}")
    complete = [[table[table["seed"].isin(left)] for table in pair] for pair in pairs]
    seeds = ", ".join(map(str, sorted({*without["seed"]})))
    return complete, f"; {reason} (seeds left out: {seeds})" if reason else ""


def claims_table(rows: Sequence[dict[str, str]]) -> pd.DataFrame:
    """The rows of ``claims.csv``."""
    return pd.DataFrame(rows, columns=[*COLUMNS])
