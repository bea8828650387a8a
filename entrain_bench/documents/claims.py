"""The claims table: every YAML of ``experiments/claim``, and of a user's folder, measured and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from entrain_bench.config.tree import config_tree
from entrain_bench.documents.claim import Claim, combined, measured, parse_claim, verdict
from entrain_bench.documents.definition import load_definition
from entrain_bench.documents.markdown import markdown_table
from entrain_bench.errors import UserError
from entrain_bench.files import write_atomically
from entrain_bench.records.tables import MISSING, run_table
from entrain_bench.study import Output, Study

NOT_MEASURED = "not measured"
# Between the overrides of a claim's sides.
SIDE_SEPARATOR = " / "
COLUMNS = (
    "name",
    "claim",
    "paper",
    "where",
    "paper_value",
    "measured_value",
    "verdict",
    "paper_setting",
    "our_setting",
    "runs",
    "why",
)
INTRODUCTION = """# Claims

What the papers claim and what comes out here, generated from runs. A claim is a YAML in `experiments/claim/`;
its runs are in the table of runs like all others. In brackets stands the 95% interval over seeds, whose runs are
compared seed by seed ([metrics.md](../docs/metrics.md)); where all samples are alike, one seed says it all.

The verdict follows one rule, applied to the gain (a ratio's distance from 1, a change, or a share itself):
*reproduced*: at least 80% of the paper's gain, or beyond; *partly*: at least a third of it; *not reproduced*: less, or
the other direction; *undecided*: not the same at both ends of the interval. Of a range the end nearer to no gain is
taken. Where a paper gives an order and no number ("> 1"), *reproduced* means that it holds by more than 2%, with the
whole interval, for every workload and model measured, *partly* for at least a third of them; *undecided* that it
depends on those whose interval lies on both sides. Seeds at which a run has no result are left out and counted.
Hardware, data and cost model differ from the papers' ([costs.md](../docs/costs.md)), so agreement is not expected to
the digit.
"""


def load_claims(config_dir: str | None = None) -> list[Claim]:
    """Every claim by name, ours before those in a folder of the user's."""
    folders = [config_tree(), *([Path(config_dir)] if config_dir else [])]
    return [
        load_definition(path, parse_claim) for folder in folders for path in sorted((folder / "claim").glob("*.yaml"))
    ]


def claims_output(config_dir: str | None = None) -> Output:
    """The document; its claims are read once."""
    claims = load_claims(config_dir)
    sweeps = [tuple(side) for claim in claims for pair in claim.pairs for side in pair]
    return Output("claims", sweeps, lambda study: write_claims(claims, study), ["claims.md"])


def write_claims(claims: Sequence[Claim], study: Study) -> str:
    """Write ``claims.csv`` and ``claims.md``; returns what could not be measured, if anything."""
    rows = [claim_row(claim, study) for claim in claims]
    csv = claims_table(rows).to_csv(index=False, lineterminator="\n")
    write_atomically(study.results.root / "claims.csv", csv.encode())
    write_atomically(study.results.root / "claims.md", claims_markdown(rows).encode())
    return "; ".join(f"{row['name']}: {row['verdict']}" for row in rows if row["verdict"].startswith(NOT_MEASURED))


def claim_row(claim: Claim, study: Study) -> dict[str, str]:
    """Measure and judge a claim; without results the verdict is the reason."""
    row = {name: str(getattr(claim, name)) for name in COLUMNS if hasattr(claim, name)}
    row |= {
        "paper_value": claim.format(claim.value),
        "runs": SIDE_SEPARATOR.join(" ".join(side) for pair in claim.pairs for side in pair),
    }
    try:
        tables = [[_side_table(side, study) for side in pair] for pair in claim.pairs]
        complete, lacking = _complete(tables)
        cases = measured(claim, complete)
    except UserError as error:
        return row | {"measured_value": "", "verdict": f"{NOT_MEASURED}: {error}"}
    return row | {"measured_value": combined(claim, cases) + lacking, "verdict": verdict(claim, cases)}


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
    return table.assign(configuration=table["key"].map(lambda key: " ".join(plain[key])))


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
    heading = ["claim", "paper", "paper value", "here", "verdict"]
    shown = [[f"[{row['claim']}](#{row['name']})", _source(row), *(row[name] for name in COLUMNS[4:7])] for row in rows]
    return "\n".join([INTRODUCTION, markdown_table(heading, shown), *map(_details, rows)])


def _source(row: Mapping[str, str]) -> str:
    return f"arXiv:{row['paper']}, {row['where']}"


def _details(row: Mapping[str, str]) -> str:
    runs = "".join(f"    {side}\n" for side in row["runs"].split(SIDE_SEPARATOR))
    return (
        f"## {row['name']}\n\n{row['claim']}: {row['paper_value']} in the paper, "
        f"{row['measured_value'] or 'nothing'} here ({row['verdict']}).\n\n"
        f"*Paper* ({_source(row)}). {row['paper_setting']}\n\n"
        f"*Here.* {row['our_setting']}\n\n{runs}" + (f"\n*Why.* {row['why']}\n" if row["why"] else "")
    )
