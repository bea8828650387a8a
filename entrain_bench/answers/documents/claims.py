"""Claims measured, judged and written: those of ``experiments/claim``, and those of a user's folder.

``claims.json`` holds the findings; the other files are written from them and read by people only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.documents.agreement import device_memory_bytes
from entrain_bench.answers.documents.claim import ENCODER_GPUS, ENCODER_STAGES, GPU_DAYS, Claim, load_claims
from entrain_bench.answers.documents.claim_pages import COLUMNS, claim_row, claims_pages
from entrain_bench.answers.documents.definition import override_key
from entrain_bench.answers.documents.published import find_cells
from entrain_bench.answers.documents.sides import ClaimSetting
from entrain_bench.answers.documents.verdict import Finding, JudgedClaim, Verdict, judge, measured
from entrain_bench.answers.tables import MISSING, encoder_stages_and_gpus, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.run.study import Output, Study

FINDINGS = "claims.json"
TABLE = "claims.csv"
INDEX = "claims.md"
# How many claims have each verdict, for pages that show no claim.
COUNTS = "tables/claims_counts.md"
TEMPLATES = Path(__file__).parent / "templates"
MEMORY = "peak_memory_bytes"
OTHER_MEMORY = "cluster.device.memory_bytes"
SECONDS_PER_DAY = 86400
# Overrides of the seeds over which a number is averaged.
SEEDS = ("seed=", "planning_seed=")


def claims_output(config_dir: str | None = None, theirs: bool = False) -> Output:
    """The document of all claims, or if ``theirs`` of those in a folder of the user's, if it has any."""
    claims = load_claims(config_dir)
    if theirs:
        claims = [claim for claim in claims if claim.config_dir] or claims
    pages = dict.fromkeys(f"claims/{claim.file}.md" for claim in claims)
    numbers = [cell.printed for claim in claims for cell in (*claim.cells, *claim.per)]
    return Output(
        "claims",
        [*dict.fromkeys(sweep for claim in claims for sweep in claim.sweeps)],
        lambda study: write_claims(claims, study),
        [FINDINGS, TABLE, INDEX, *pages],
        files=[COUNTS],
        details=[*numbers, *(path.read_text() for path in sorted(TEMPLATES.glob("claims*")))],
    )


def write_claims(claims: Sequence[Claim], study: Study) -> str:
    """Write findings, table, pages and counts; returns what was not measured, if anything."""
    judged = [judge_claim(claim, study) for claim in claims]
    findings = ",\n".join(json.dumps(_content(one)) for one in judged)
    csv = pd.DataFrame(map(claim_row, judged), columns=[*COLUMNS]).to_csv(index=False, lineterminator="\n")
    files = {FINDINGS: f"[\n{findings}\n]\n", TABLE: csv, **claims_pages(judged)}
    for name, text in files.items():
        write_atomically(study.results.root / name, text.encode())
    return "; ".join(
        f"{one.claim.name} ({name}): {finding.verdict}: {finding.reason}"
        for one in judged
        for name, finding in (("published", one.published), ("fair", one.fair), ("otherwise", one.otherwise))
        if finding and finding.verdict == Verdict.NOT_MEASURED
    )


def read_claims(claims: Sequence[Claim], path: Path) -> list[JudgedClaim]:
    """Each claim with its findings in ``claims.json``; a claim that it lacks, or has of other runs, is not measured."""
    entries: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    known = {entry["name"]: entry for entry in entries}
    unknown = Finding(verdict=Verdict.NOT_MEASURED, reason="run make claims").to_dict()
    judged = []
    for claim in claims:
        entry: dict[str, Any] = known.get(claim.name, {"runs": ""})
        if entry["runs"] != claim.hash_of_runs:
            has = {"published": True, "fair": claim.fair, "otherwise": claim.toggled}
            entry = {name: unknown if there else None for name, there in has.items()} | {"choices": {}}
        findings = {name: Finding.from_dict(entry[name]) if entry[name] else None for name in ("fair", "otherwise")}
        choices = {label: Finding.from_dict(values) for label, values in entry["choices"].items()}
        judged.append(JudgedClaim(claim, Finding.from_dict(entry["published"]), **findings, choices=choices))
    return judged


def _content(judged: JudgedClaim) -> dict[str, object]:
    settings = {"published": judged.published, "fair": judged.fair, "otherwise": judged.otherwise}
    return {
        "name": judged.claim.name,
        "runs": judged.claim.hash_of_runs,
        **{name: finding.to_dict() if finding else None for name, finding in settings.items()},
        "choices": {label: finding.to_dict() for label, finding in judged.choices.items()},
    }


def judge_claim(claim: Claim, study: Study) -> JudgedClaim:
    """Measure and judge a claim in all its settings."""
    return JudgedClaim(
        claim,
        _finding(claim, claim.published, study),
        _finding(claim, claim.fair, study) if claim.fair else None,
        _finding(claim, claim.toggled, study) if claim.toggled else None,
        {label: _finding(claim, setting, study) for label, setting in claim.choices.items()},
    )


def _finding(claim: Claim, setting: ClaimSetting, study: Study) -> Finding:
    """Return the finding of a setting's runs; seeds at which any run has no result are left out."""
    pairs = [[_side_table(claim, setting, side, study) for side in pair] for pair in setting.pairs]
    tables = [table for pair in pairs for table in pair]
    for table, sweep in zip(tables, setting.sweeps, strict=True):
        if (table["status"] == MISSING).any():
            return Finding(verdict=Verdict.NOT_MEASURED, reason=study.problem(*sweep))
    runs = pd.concat(tables)
    lost = runs[runs["status"] != "ok"]
    left = {*runs["seed"]} - {*lost["seed"]}
    if not left:
        first = lost.iloc[0]
        verdict = Verdict.OTHER_SETTING if first["settled"] else Verdict.NOT_MEASURED
        return Finding(verdict=verdict, reason=f"{len(lost)} of {len(runs)} runs have no result: {first['reason']}")
    complete = [[table[table["seed"].isin(left)] for table in pair] for pair in pairs]
    try:
        finding = judge(claim, setting.measure, measured(claim, setting.measure, complete))
    except UserError as error:
        return Finding(verdict=Verdict.NOT_MEASURED, reason=str(error))
    seeds = tuple(sorted({*lost["seed"].tolist()}))
    finding = replace(finding, num_runs=len(runs), num_lost=len(lost), lost_seeds=seeds)
    need = max((float(table[MEMORY].max()) for pair in complete for table in pair if MEMORY in table), default=0.0)
    has = min(_memory(sweep, study) for sweep in setting.sweeps)
    if need > has and setting.measure.metric != MEMORY:
        return replace(finding, verdict=Verdict.OTHER_SETTING, need_bytes=need, has_bytes=has)
    return finding


def _memory(sweep: Sequence[str], study: Study) -> float:
    """Memory of the published device in bytes, also if the sweep changes it."""
    if OTHER_MEMORY in map(override_key, sweep):
        return device_memory_bytes(sweep)
    return float(study.cells(*sweep)[0].config.cluster["device"]["memory_bytes"])


def _side_table(claim: Claim, setting: ClaimSetting, side: Sequence[str], study: Study) -> pd.DataFrame:
    """The runs of one side; ``configuration`` distinguishes those that differ by more than the seed.

    A plan is the same at every seed of a job. Where a claim sweeps the planning seed, that seed counts instead.
    """
    cells = study.cells(*side)
    table = run_table(cells, study.results)
    by_key = {cell.key: cell for cell in cells}
    cell_of_row = [by_key[key] for key in table["key"]]
    records = [study.results.read(cell.key) for cell in cell_of_row]
    stages = [encoder_stages_and_gpus(cell, record) for cell, record in zip(cell_of_row, records, strict=True)]
    if len({cell.config.planning_seed for cell in cells}) > 1:
        table["seed"] = [cell.config.planning_seed for cell in cell_of_row]
    table = table.assign(
        configuration=[" ".join(text for text in cell.overrides if not text.startswith(SEEDS)) for cell in cell_of_row],
        settled=[record is not None and record.settled for record in records],
        **{
            ENCODER_STAGES: [number for number, _ in stages],
            ENCODER_GPUS: [number * ranks for number, ranks in stages],
        },
    )
    if setting.measure.metric == GPU_DAYS:
        cluster = cells[0].config.cluster
        (samples,) = find_cells([setting.measure.samples], claim.config_dir)
        gpus = cluster["num_nodes"] * cluster["gpus_per_node"]
        table[GPU_DAYS] = (samples.value or np.nan) * gpus / table["samples_per_s"].astype(float) / SECONDS_PER_DAY
    return table
