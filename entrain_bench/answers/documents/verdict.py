"""How numbers come out of runs, and the rule that judges them: a finding for each setting of a claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.documents.claim import (
    ENCODER_GPUS,
    ENCODER_STAGES,
    GPU_DAYS,
    MEMORY,
    PRODUCTS,
    SCALES,
    Claim,
    ClaimSetting,
    Kind,
    Measure,
)
from entrain_bench.answers.documents.definition import overrides
from entrain_bench.answers.documents.published import find_cells
from entrain_bench.answers.statistics import Interval, mean_interval, ratio_interval
from entrain_bench.answers.tables import MISSING, encoder_stages_and_gpus, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import compose
from entrain_bench.run.study import Study

CASE = ["workload", "model"]
# Shares of the paper's gain: from the first to the second "reproduced", beyond "exceeds"; from the third "partly".
REPRODUCED = 0.8
EXCEEDED = 1.25
PARTLY = 1 / 3
# How far from the paper's number, as a factor: at most this for "reproduced", for "partly".
SAME = 1.25
SIMILAR = 2.0
# How many more or fewer, of things that are counted.
COUNTS = {"stages": (0.5, 1.5), "GPUs": (1.0, 3.0)}
# A ratio must exceed the first for an order to hold; closer values count as equal. A paper's ratio that is closer
# to 1 is no gain: "reproduced" up to the first from it, "partly" up to the second.
ORDER = 1.02
NEARLY = 1.05
SECONDS_PER_DAY = 86400
# Overrides of the seeds over which a number is averaged.
SEEDS = ("seed=", "planning_seed=")
# Significant digits of a finding's numbers, so that machines agree.
DIGITS = 12


class Verdict(StrEnum):
    """Verdict of runs on a claim; in the order of tables."""

    REPRODUCED = "reproduced"
    EXCEEDS = "exceeds"
    PARTLY = "partly"
    NOT_REPRODUCED = "not reproduced"
    # A program of the setting needs more memory than the published device has.
    OTHER_SETTING = "setting differs"
    # The verdicts of the interval's ends differ.
    UNDECIDED = "undecided"
    # The number is not in the paper, as far as is known.
    NO_SOURCE = "no source"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of the runs of one setting for a claim; numbers are in the claim's unit.

    Attributes:
        number: the mean over cases and seeds; None without a result.
        low, high: its 95% CI, or the ends of the cases' numbers if an order has several; None for one seed.
        num_cases, num_held, num_unclear: of an order with several cases; in how many it holds, and may hold.
        num_runs, num_lost, lost_seeds: runs, those without a result, and the seeds that are left out for them.
        need_bytes, has_bytes: memory that a run needs, and that of the published device, if that is too little.
        reason: why there is no result.
    """

    verdict: Verdict
    number: float | None = None
    low: float | None = None
    high: float | None = None
    num_cases: int = 1
    num_held: int = 0
    num_unclear: int = 0
    num_runs: int = 0
    num_lost: int = 0
    lost_seeds: tuple[int, ...] = ()
    need_bytes: float | None = None
    has_bytes: float | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """The finding that ``to_dict`` gave, also after JSON."""
        seeds = tuple(values.get("lost_seeds", ()))
        return cls(**{**values, "verdict": Verdict(values["verdict"]), "lost_seeds": seeds})


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """A claim with the finding of each of its settings, by label."""

    claim: Claim
    findings: Mapping[str, Finding]

    def to_dict(self) -> dict[str, Any]:
        """The findings as JSON holds them."""
        findings = {label: finding.to_dict() for label, finding in self.findings.items()}
        return {"name": self.claim.name, "runs": self.claim.hash_of_runs, "findings": findings}

    @classmethod
    def from_dict(cls, claim: Claim, values: Mapping[str, Any]) -> JudgedClaim:
        """The findings that ``to_dict`` gave, also after JSON."""
        return cls(claim, {label: Finding.from_dict(finding) for label, finding in values["findings"].items()})


def judge_claim(claim: Claim, study: Study) -> JudgedClaim:
    """Measure and judge a claim in all its settings."""
    return JudgedClaim(claim, {label: _finding(claim, setting, study) for label, setting in claim.settings.items()})


def _finding(claim: Claim, setting: ClaimSetting, study: Study) -> Finding:
    """Return the finding of a setting's runs; seeds at which any run has no result are left out."""
    pairs = [[_side_table(setting, side, study) for side in pair] for pair in setting.pairs]
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
    texts = overrides(sweep)
    if "cluster.device.memory_bytes" in texts:
        cluster = compose(*(text for key, text in texts.items() if key == "cluster")).cluster
    else:
        cluster = study.cells(*sweep)[0].config.cluster
    return float(cluster["device"]["memory_bytes"])


def _side_table(setting: ClaimSetting, side: Sequence[str], study: Study) -> pd.DataFrame:
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
        (samples,) = find_cells([setting.measure.samples])
        gpus = cluster["num_nodes"] * cluster["gpus_per_node"]
        table[GPU_DAYS] = (samples.value or np.nan) * gpus / table["samples_per_s"].astype(float) / SECONDS_PER_DAY
    return table


def measured(claim: Claim, measure: Measure, pairs: Sequence[Sequence[pd.DataFrame]]) -> pd.DataFrame:
    """The claim's numbers from the run tables of every situation's sides: ratios, or the metric itself.

    A row for every workload and model, a single one where two situations are compared; a column for every seed.
    Raises ``UserError`` for sides without a workload, model and seed in common, and ratios that are not positive.
    """
    situations = [_compared(claim, measure, tables) for tables in pairs]
    if len(situations) == 1:
        return situations[0]
    at, against = (_over(cases, measure.over) for cases in situations)
    return pd.DataFrame([at / against])


def judge(claim: Claim, measure: Measure, cases: pd.DataFrame) -> Finding:
    """Judge a claim by how much of the paper's number is measured; docs/claims.md states the rule of every kind."""
    interval = _interval(claim, measure, _over(cases, measure.over))
    ends = {"number": interval.mean}
    if interval.num_values > 1:
        ends |= {"low": interval.low, "high": interval.high}
    counts: dict[str, Any] = {}
    if claim.kind == Kind.ORDER:
        intervals = [_interval(claim, measure, row) for _, row in cases.iterrows()]
        held = sum(one.low > ORDER for one in intervals)
        may = sum(one.high > ORDER for one in intervals)
        verdicts = {_by_part(count / len(cases), 1.0) for count in (held, may)}
        if len(cases) > 1:
            means = [one.mean for one in intervals]
            ends |= {"low": min(means), "high": max(means)}
            counts = {"num_cases": len(cases), "num_held": held, "num_unclear": may - held}
    else:
        by = _by_share if claim.kind == Kind.GAIN else _by_distance
        verdicts = {by(claim, end) for end in (interval.low, interval.high)}
    verdict = verdicts.pop() if len(verdicts) == 1 else Verdict.UNDECIDED
    numbers: dict[str, Any] = {name: float(f"{end:.{DIGITS}g}") for name, end in ends.items()}
    return Finding(verdict=Verdict.NO_SOURCE if claim.no_source else verdict, **numbers, **counts)


def _by_part(part: float, enough: float) -> Verdict:
    """The verdict on a part of a gain, or of the cases of an order."""
    return _within(-part, -enough, -PARTLY)


def _by_share(claim: Claim, number: float) -> Verdict:
    """The verdict on a gain."""
    ratios = [_ratio(claim, value) for value in claim.value]
    if all(1 / ORDER < ratio < ORDER for ratio in ratios):
        ratio = _ratio(claim, number)
        return _within(max(ratio / max(ratios), min(ratios) / ratio, 1.0), ORDER, NEARLY)
    gains = sorted((claim.gain(value) for value in claim.value), key=abs)
    if claim.gain(number) / gains[-1] > EXCEEDED:
        return Verdict.EXCEEDS
    return _by_part(claim.gain(number) / gains[0], REPRODUCED)


def _by_distance(claim: Claim, number: float) -> Verdict:
    """The verdict on a level or limit, by how many times (of things counted: how far) it is above or below."""
    low = min(claim.value, key=abs)
    high = max(claim.value, key=abs)
    if claim.kind == Kind.LIMIT:
        return _within(number / low, 1.0, SAME)
    if claim.unit in COUNTS:
        return _within(max(number - high, low - number), *COUNTS[claim.unit])
    if number / low <= 0:
        return Verdict.NOT_REPRODUCED
    return _within(max(number / high, low / number, 1.0), SAME, SIMILAR)


def _within(distance: float, enough: float, some: float) -> Verdict:
    if distance <= enough:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if distance <= some else Verdict.NOT_REPRODUCED


def _ratio(claim: Claim, number: float) -> float:
    """A ratio, or the ratio of a change."""
    return number if claim.unit == "x" else 1 + number / 100


def _interval(claim: Claim, measure: Measure, seeds: pd.Series[float]) -> Interval:
    """Mean and interval of a number of every seed, in the claim's unit."""
    values = seeds.tolist()
    relative = claim.published.is_comparison
    interval = ratio_interval(values, [1.0] * len(values)) if relative else mean_interval(values)
    if claim.unit == "x":
        return interval
    nothing = 1.0 if relative else 0.0
    scale = 1.0 if claim.unit == "ms" and measure.metric.endswith("_ms") else SCALES[claim.unit]
    ends = {name: scale * (getattr(interval, name) - nothing) for name in ("mean", "low", "high")}
    return Interval(**asdict(interval) | ends)


def _over(cases: pd.DataFrame, over: str) -> pd.Series[float]:
    """The mean of all cases at every seed, or the case that is greatest or least on average."""
    if over == "mean":
        return cases.mean()
    means = cases.mean(axis="columns").to_numpy()
    return cases.iloc[int(means.argmax() if over == "max" else means.argmin())]


def _compared(claim: Claim, measure: Measure, tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Numerator over denominator, or the numerator, for every workload and model and at every seed."""
    picks = (measure.pick_of, measure.pick_to)
    sides = [_case_values(table, measure.metric, pick) for table, pick in zip(tables, picks, strict=False)]
    cases = (sides[0] / sides[1] if len(sides) > 1 else sides[0]).dropna(how="all").dropna(axis="columns")
    if cases.empty:
        raise UserError(f"measure: the two sides of {claim.name} have no workload, model and seed in common")
    if claim.published.is_comparison and not (cases > 0).all(axis=None):
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
