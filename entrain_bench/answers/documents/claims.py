"""The claims table: every YAML of ``experiments/claim``, and of a user's folder, measured and judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.documents.claim import ENCODER_STAGES, FAIR, KEYS, Claim, ClaimSide, parse_claim
from entrain_bench.answers.documents.definition import load_definitions
from entrain_bench.answers.documents.markdown import markdown_table
from entrain_bench.answers.documents.verdict import central, combined, measured, verdict
from entrain_bench.answers.tables import MISSING, encoder_stages, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.run.study import Output, Study
from entrain_bench.specs.module_layers import Role

NOT_MEASURED = "not measured"
# Between the overrides of a claim's sides.
SIDE_SEPARATOR = " / "
COLUMNS = (
    "name",
    "claim",
    "paper",
    "where",
    "paper_value",
    "published_value",
    "published_verdict",
    "fair_value",
    "fair_verdict",
    "assumption",
    "otherwise_value",
    "otherwise_verdict",
    "other_choices",
    "paper_setting",
    "published_setting",
    "fair_setting",
    "runs",
    "why",
)
INTRODUCTION = """# Claims

What the papers claim and what comes out here, generated from runs, twice: *as published*, in the paper's model, data
shape, batch, GPUs, baseline and measure as far as it states them, and *fair*, with every baseline tuned by the same
rules. What a paper does not state is a choice; where other choices were run, their range stands behind the number,
with how many of them have no result, and a verdict that depends on them says so. The last column names what decides:
an assumption, and what comes out where it is otherwise. A claim is a YAML in `experiments/claim/`; its runs are in the
table of runs like all others. In brackets stands the 95% interval over seeds, whose runs are compared seed by seed
([metrics.md](../docs/metrics.md)); where all samples are alike, one seed says it all.

The verdict follows one rule, applied to the gain (a ratio's distance from 1, a change, or a share itself):
*reproduced*: at least 80% of the paper's gain, or beyond; *partly*: at least a third of it; *not reproduced*: less, or
the other direction; *undecided*: not the same at both ends of the interval; *no source*: the number was not found in
the paper. Of a range the end nearer to no gain is taken. Where a paper gives an order and no number ("> 1"),
*reproduced* means that it holds by more than 2%, with the whole interval, for every workload and model measured,
*partly* for at least a third of them; *undecided* that it depends on those whose interval lies on both sides. Where the
number itself is the point (memory in GB, or a ratio near 1, which says that nothing was gained), *reproduced* means
within a factor of 1.25 of it, *partly* within 2; of a number of pipeline stages that it is the same, *partly* that it
is one off; of a limit, that it is kept, *partly* that it is exceeded by up to a quarter. Seeds at which a run has no
result are left out and counted. Hardware, data and cost model differ from the papers' ([costs.md](../docs/costs.md)),
so agreement is not expected to the digit.
"""


def load_claims(config_dir: str | None = None) -> list[Claim]:
    """Return every claim: by file, then by name, ours before those in a folder of the user's."""
    folders = [config_tree(), *([Path(config_dir)] if config_dir else [])]
    files = [path for folder in folders for path in sorted((folder / "claim").glob("*.yaml"))]
    by_file = [load_definitions(path, "claims", KEYS, parse_claim) for path in files]
    return [claim for claims in by_file for claim in sorted(claims, key=lambda each: each.name)]


def claims_output(config_dir: str | None = None) -> Output:
    """The document; its claims are read once."""
    claims = load_claims(config_dir)
    sweeps = [sweep for claim in claims for setting in claim.settings for sweep in setting.sweeps]
    return Output("claims", [*dict.fromkeys(sweeps)], lambda study: write_claims(claims, study), ["claims.md"])


def write_claims(claims: Sequence[Claim], study: Study) -> str:
    """Write ``claims.csv`` and ``claims.md``; returns what could not be measured, if anything."""
    rows = [claim_row(claim, study) for claim in claims]
    csv = claims_table(rows).to_csv(index=False, lineterminator="\n")
    write_atomically(study.results.root / "claims.csv", csv.encode())
    write_atomically(study.results.root / "claims.md", claims_markdown(rows).encode())
    found = [(row["name"], name, row[f"{name}_verdict"]) for row in rows for name in ("published", "fair", "otherwise")]
    return "; ".join(f"{claim} ({name}): {text}" for claim, name, text in found if text.startswith(NOT_MEASURED))


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """What came out of a setting: the number in words and bare, and the verdict; without results why there is none."""

    text: str
    verdict: str
    number: float | None = None


def claim_row(claim: Claim, study: Study) -> dict[str, str]:
    """Measure and judge a claim; without results the verdict is the reason."""
    published, fair = (_result(claim, setting, study) for setting in (claim.published, claim.fair))
    choices = {label: _result(claim, setting, study) for label, setting in claim.choices.items()}
    others = [f"{label}: {one.text or 'nothing'} ({one.verdict})" for label, one in choices.items()]
    toggled = claim.toggled
    otherwise = _result(claim, toggled, study) if toggled else ClaimResult("", "")
    sweeps = dict.fromkeys(sweep for setting in claim.settings for sweep in setting.sweeps)
    return {
        **{name: str(getattr(claim, name)) for name in COLUMNS if hasattr(claim, name)},
        "paper_value": claim.format(claim.value),
        "published_value": published.text + _range(claim, [*choices.values()]),
        "published_verdict": published.verdict + _dissent(published, choices.values()),
        "fair_value": fair.text,
        "fair_verdict": fair.verdict,
        "assumption": _assumed(claim),
        "otherwise_value": otherwise.text,
        "otherwise_verdict": otherwise.verdict,
        "other_choices": "; ".join(others),
        "published_setting": claim.published.words,
        "fair_setting": claim.fair.words,
        "runs": SIDE_SEPARATOR.join(" ".join(sweep) for sweep in sweeps),
    }


def _result(claim: Claim, setting: ClaimSide, study: Study) -> ClaimResult:
    claim = claim.under(setting)
    try:
        tables = [[_side_table(side, study) for side in pair] for pair in setting.pairs]
        complete, lacking = _complete(tables)
        cases = measured(claim, complete)
    except UserError as error:
        return ClaimResult("", f"{NOT_MEASURED}: {error}")
    return ClaimResult(combined(claim, cases) + lacking, verdict(claim, cases), central(claim, cases))


def _range(claim: Claim, choices: Sequence[ClaimResult]) -> str:
    """The range of the numbers under other choices, and how many of these have none."""
    if not choices:
        return ""
    numbers = [choice.number for choice in choices if choice.number is not None]
    if not numbers:
        return f"; nothing under other choices ({len(choices)} of {len(choices)} without result)"
    ends = claim.format((min(numbers), max(numbers))) if len(numbers) > 1 else claim.format(numbers[0])
    lacking = len(choices) - len(numbers)
    return f"; {ends} under other choices" + (f" ({lacking} of {len(choices)} without result)" if lacking else "")


def _dissent(published: ClaimResult, choices: Iterable[ClaimResult]) -> str:
    """The verdicts under other choices, if they are not the same."""
    others = dict.fromkeys(choice.verdict for choice in choices if choice.number is not None)
    others.pop(published.verdict, None)
    return f"; under other choices {' or '.join(others)}" if others else ""


def _assumed(claim: Claim) -> str:
    if not claim.assumption:
        return ""
    where = " (fair)" if claim.assumption.of_setting == FAIR else ""
    return f"{claim.assumption.text}{where}; otherwise, {claim.assumption.otherwise}"


def _side_table(side: Sequence[str], study: Study) -> pd.DataFrame:
    """The runs of one side; ``configuration`` tells those apart that differ by more than the seed.

    Raises:
        UserError: if any run has not been run.
    """
    cells = study.cells(*side)
    table = run_table(cells, study.results)
    if (table["status"] == MISSING).any():
        raise UserError(study.problem(*side))
    plain = {cell.key: [text for text in cell.overrides if not text.startswith("seed=")] for cell in cells}
    layouts = dict(zip(table["key"], table.reindex(columns=["layout"])["layout"].astype(str), strict=True))
    stages = {cell.key: _encoder_stages(cell, layouts[cell.key]) for cell in cells}
    return table.assign(
        configuration=table["key"].map(lambda key: " ".join(plain[key])),
        **{ENCODER_STAGES: table["key"].map(stages)},
    )


def _encoder_stages(cell: Cell, layout: str) -> float:
    """Stages of the model's encoders, which share theirs; not a number without a layout."""
    roles = {name: module["role"] for name, module in cell.config.model["modules"].items()}
    found = [encoder_stages(layout, name) for name, role in roles.items() if role == Role.ENCODER]
    return float(max((count for count in found if count), default=np.nan))


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


def claims_markdown(rows: Sequence[dict[str, str]]) -> str:
    """``claims.md``: one table, then a paragraph a claim with settings, command and explanation."""
    heading = ["claim", "paper", "paper value", "as published", "verdict", "fair", "verdict", "what decides"]
    shown = [
        [
            f"[{row['claim']}](#{row['name']})",
            _source(row),
            *(row[name] for name in COLUMNS[4:9]),
            decides(row),
        ]
        for row in rows
    ]
    return "\n".join([INTRODUCTION, markdown_table(heading, shown), *map(_details, rows)])


def _source(row: Mapping[str, str]) -> str:
    return f"arXiv:{row['paper']}, {row['where']}"


def decides(row: Mapping[Any, Any]) -> str:
    """The assumption that decides a claim, and what comes out where it is otherwise."""
    if not row["assumption"]:
        return "not toggled"
    return f"{row['assumption']}: {_found(row, 'otherwise')}"


def _found(row: Mapping[str, str], name: str) -> str:
    return f"{row[f'{name}_value'] or 'nothing'} ({row[f'{name}_verdict']})"


def _details(row: Mapping[str, str]) -> str:
    runs = "".join(f"    {side}\n" for side in row["runs"].split(SIDE_SEPARATOR))
    parts = [
        f"## {row['name']}",
        f"{row['claim']}: {row['paper_value']} in the paper.",
        f"*Paper* ({_source(row)}). {row['paper_setting']}",
        f"*As published*: {_found(row, 'published')}. {row['published_setting']}",
        f"*Other choices*: {row['other_choices']}." if row["other_choices"] else "",
        f"*Fair*: {_found(row, 'fair')}. {row['fair_setting']}",
        f"*What decides*: {decides(row)}." if row["assumption"] else "",
        f"*Why*: {row['why']}" if row["why"] else "",
        runs,
    ]
    return "\n\n".join(filter(None, parts))
