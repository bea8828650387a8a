"""Claims measured, judged by one rule and written: those of ``experiments/claim``, and those of a user's folder."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from entrain_bench.answers.documents.claim import (
    ENCODER_STAGES,
    FAIR,
    GAIN,
    KEYS,
    LIMIT,
    PRODUCTS,
    SCALES,
    Claim,
    ClaimSide,
    parse_claim,
)
from entrain_bench.answers.documents.claim_pages import INDEX, PAGES, claims_markdown, claims_pages
from entrain_bench.answers.documents.definition import load_definitions
from entrain_bench.answers.statistics import Interval, mean_interval, ratio_interval
from entrain_bench.answers.tables import MISSING, encoder_stages, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.run.study import Output, Study
from entrain_bench.specs.module_layers import Role

CASE = ["workload", "model"]
# Shares of the paper's gain: at least this for "reproduced", for "partly".
REPRODUCED, PARTLY = 0.8, 1 / 3
# How far from the paper's number, as a factor: at most this for "reproduced", for "partly".
SAME, SIMILAR = 1.25, 2.0
UNDECIDED, NO_SOURCE = "undecided", "no source"
# A ratio must exceed this for an order to hold; what is closer counts as equal.
ORDER = 1.02


def measured(claim: Claim, pairs: Sequence[Sequence[pd.DataFrame]]) -> pd.DataFrame:
    """The claim's numbers from the runs of one setting: what is compared, or the metric itself.

    Args:
        claim: the claim.
        pairs: for every situation the run tables of its sides (``workload``, ``model``, ``configuration``, ``seed``,
            the metric), numerator first.

    Returns:
        A row for every workload and model, a single one where two situations are compared; a column for every seed.

    Raises:
        UserError: if the sides of a pair have no workload, model and seed in common, and for a ratio of numbers that
            are not positive.
    """
    situations = [_compared(claim, tables) for tables in pairs]
    if len(situations) == 1:
        return situations[0]
    at, against = (_over(cases, claim.measure.over) for cases in situations)
    return pd.DataFrame([at / against])


def combined(claim: Claim, cases: pd.DataFrame) -> str:
    """The claim's number over all cases, and its interval; of an order the ends, and in how many cases it holds."""
    if claim.value or len(cases) == 1:
        return claim.describe(_interval(claim, _over(cases, claim.measure.over)))
    intervals = [_interval(claim, row) for _, row in cases.iterrows()]
    means = [interval.mean for interval in intervals]
    holds, may = _held(intervals)
    unclear = f", {may - holds} unclear" if may > holds else ""
    return f"{claim.format((min(means), max(means)))} ({holds} of {len(means)}{unclear})"


def central(claim: Claim, cases: pd.DataFrame) -> float:
    """The claim's number over all cases without its interval, in the claim's unit."""
    return _interval(claim, _over(cases, claim.measure.over)).mean


def verdict(claim: Claim, cases: pd.DataFrame) -> str:
    """Whether the claim is reproduced, partly or not, by the share of the paper's gain that is measured.

    ``reproduced``: at least 80% of it, or beyond; ``partly``: at least a third; ``not reproduced``: less, or the other
    direction. Of a range the end nearer to no gain counts. An order without a number is reproduced if it holds
    (``ORDER``) in every case, partly if in a third of them. ``undecided``: within the intervals the verdict is not the
    same. A level is reproduced within a factor of 1.25 of the paper's, partly within 2; stages where they are the same,
    partly one off; a limit if it is kept, partly if it is exceeded by a factor of up to 1.25. ``no source``: the number
    is not the paper's, as far as is known.
    """
    if claim.no_source:
        return NO_SOURCE
    interval = _interval(claim, _over(cases, claim.measure.over))
    if claim.judged_by != GAIN:
        verdicts = {_by_distance(claim, end) for end in (interval.low, interval.high)}
    elif claim.value:
        gain = min((claim.gain(number) for number in claim.value), key=abs)
        verdicts = {_by_share(claim.gain(end) / gain, REPRODUCED) for end in (interval.low, interval.high)}
    else:
        counts = _held([_interval(claim, row) for _, row in cases.iterrows()])
        verdicts = {_by_share(count / len(cases), 1.0) for count in counts}
    return verdicts.pop() if len(verdicts) == 1 else UNDECIDED


def _by_share(share: float, enough: float) -> str:
    return "reproduced" if share >= enough else "partly" if share >= PARTLY else "not reproduced"


def _by_distance(claim: Claim, number: float) -> str:
    """The verdict on one number, by how many times (of stages: how far) it is above or below the paper's."""
    low, high = min(claim.value), max(claim.value)
    if claim.judged_by == LIMIT:
        factor, enough, some = number / low, 1.0, SAME
    elif claim.unit == "stages":
        factor, enough, some = max(number - high, low - number), 0.5, 1.5
    else:
        factor, enough, some = max(number / high, low / number, 1.0), SAME, SIMILAR
    return "reproduced" if factor <= enough else "partly" if factor <= some else "not reproduced"


def _held(intervals: Sequence[Interval]) -> tuple[int, int]:
    """In how many cases an order holds, and in how many it may."""
    return sum(each.low > ORDER for each in intervals), sum(each.high > ORDER for each in intervals)


def _interval(claim: Claim, seeds: pd.Series[float]) -> Interval:
    """Mean and interval of a number of every seed, in the claim's unit."""
    values = seeds.tolist()
    found = ratio_interval(values, [1.0] * len(values)) if claim.is_relative else mean_interval(values)
    if claim.unit == "x":
        return found
    nothing = 1.0 if claim.is_relative else 0.0
    mean, low, high = (SCALES[claim.unit] * (end - nothing) for end in (found.mean, found.low, found.high))
    return replace(found, mean=mean, low=low, high=high)


def _over(cases: pd.DataFrame, over: str) -> pd.Series[float]:
    """The mean of all cases at every seed, or the case that is greatest or least on average."""
    if over == "mean":
        return cases.mean()
    means = cases.mean(axis="columns").to_numpy()
    return cases.iloc[int(means.argmax() if over == "max" else means.argmin())]


def _compared(claim: Claim, tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Numerator over denominator, or the numerator, for every workload and model and at every seed."""
    measure = claim.measure
    sides = [
        _case_values(table, measure.metric, pick)
        for table, pick in zip(tables, (measure.pick_of, measure.pick_to), strict=False)
    ]
    cases = (sides[0] / sides[1] if len(sides) > 1 else sides[0]).dropna(how="all").dropna(axis="columns")
    if cases.empty:
        raise UserError(f"measure: the two sides of {claim.name} have no workload, model and seed in common")
    if claim.is_relative and not (cases > 0).all(axis=None):
        raise UserError(f"measure.metric={measure.metric}: must be positive in all runs, for it makes a ratio")
    return cases


def _case_values(table: pd.DataFrame, metric: str, pick: str) -> pd.DataFrame:
    """The metric of every workload and model at every seed, of the configuration that counts."""
    if metric in PRODUCTS:
        one, other = PRODUCTS[metric]
        table = table.assign(**{metric: table[one] * table[other]})
    values = table.pivot_table(metric, [*CASE, "configuration"], "seed", sort=False)
    cases = {case: _over(group, pick) for case, group in values.groupby(level=CASE, sort=False)}
    return pd.DataFrame(cases.values(), pd.MultiIndex.from_tuples(cases, names=CASE))


TABLE = "claims.csv"
NOT_MEASURED = "not measured"
# Between the overrides of a claim's sides.
SIDE_SEPARATOR = " / "
# What runs decide of a row; the rest is in the YAML.
MEASURED = (
    *("published_value", "published_verdict", "fair_value", "fair_verdict"),
    *("otherwise_value", "otherwise_verdict", "other_choices"),
)
COLUMNS = (
    *("name", "claim", "paper", "where", "paper_value", *MEASURED[:4], "assumption", *MEASURED[4:]),
    *("paper_setting", "published_setting", "fair_setting", "runs", "why"),
)


def load_claims(config_dir: str | None = None) -> list[Claim]:
    """Return every claim: by file, then by name, ours before those in a folder of the user's."""
    folders = {config_tree(): None, **({Path(config_dir): config_dir} if config_dir else {})}
    return [
        replace(claim, file=path.stem, system=claim.system or path.stem, config_dir=own)
        for folder, own in folders.items()
        for path in sorted((folder / "claim").glob("*.yaml"))
        for claim in sorted(load_definitions(path, "claims", KEYS, parse_claim), key=lambda each: each.name)
    ]


def claims_output(config_dir: str | None = None, theirs: bool = False) -> Output:
    """The document of all claims, or if ``theirs`` of those in a folder of the user's, if it has any."""
    claims = load_claims(config_dir)
    if theirs:
        claims = [claim for claim in claims if claim.config_dir] or claims
    sweeps = [sweep for claim in claims for setting in claim.settings for sweep in setting.sweeps]
    files = [TABLE, INDEX, *dict.fromkeys(f"{PAGES}/{claim.file}.md" for claim in claims)]
    return Output("claims", [*dict.fromkeys(sweeps)], lambda study: write_claims(claims, study), files)


def write_claims(claims: Sequence[Claim], study: Study) -> str:
    """Write ``claims.csv``, ``claims.md`` and a page per paper; returns what could not be measured, if anything."""
    rows = [claim_row(claim, study) for claim in claims]
    csv = claims_table(rows).to_csv(index=False, lineterminator="\n")
    for name, text in {TABLE: csv, INDEX: claims_markdown(claims, rows), **claims_pages(claims, rows)}.items():
        write_atomically(study.results.root / name, text.encode())
    found = [(row["name"], name, row[f"{name}_verdict"]) for row in rows for name in ("published", "fair", "otherwise")]
    return "; ".join(f"{claim} ({name}): {text}" for claim, name, text in found if text.startswith(NOT_MEASURED))


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """What came out of a setting: the number in words and bare, and the verdict; without results why there is none."""

    text: str
    verdict: str
    number: float | None = None


def read_rows(claims: Sequence[Claim], path: Path) -> list[dict[str, str]]:
    """The row of each claim, measured as ``claims.csv`` says; a claim that is not in it says so."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else pd.DataFrame(columns=["name"])
    known = {row["name"]: {name: row[name] for name in MEASURED} for row in table.to_dict("records")}
    unknown = {name: f"{NOT_MEASURED}: run make claims" if "verdict" in name else "" for name in MEASURED}
    return [_words(claim) | known.get(claim.name, unknown) for claim in claims]


def claim_row(claim: Claim, study: Study) -> dict[str, str]:
    """Measure and judge a claim; without results the verdict is the reason."""
    published, fair = (_result(claim, setting, study) for setting in (claim.published, claim.fair))
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
    """What a claim's row states before anything is measured."""
    sweeps, assumed = dict.fromkeys(sweep for setting in claim.settings for sweep in setting.sweeps), ""
    if claim.assumption:
        where = " (fair)" if claim.assumption.of_setting == FAIR else ""
        assumed = f"{claim.assumption.text}{where}; otherwise, {claim.assumption.otherwise}"
    return {
        **{name: str(getattr(claim, name)) for name in COLUMNS if hasattr(claim, name)},
        "paper_value": claim.format(claim.value),
        "assumption": assumed,
        "published_setting": claim.published.words,
        "fair_setting": claim.fair.words,
        "runs": SIDE_SEPARATOR.join(map(shlex.join, sweeps)),
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
    numbers = sorted(choice.number for choice in choices if choice.number is not None)
    ends = claim.format([numbers[0], numbers[-1]][: len(numbers)]) if numbers else "nothing"
    lacking = len(choices) - len(numbers)
    return f"; {ends} under other choices" + (f" ({lacking} of {len(choices)} without result)" if lacking else "")


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
    stages = table["key"].map({cell.key: _encoder_stages(cell, layouts[cell.key]) for cell in cells})
    return table.assign(configuration=table["key"].map(lambda key: " ".join(plain[key])), **{ENCODER_STAGES: stages})


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
