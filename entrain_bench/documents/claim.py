"""A published claim, how it is measured here, and the rule that judges it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from entrain_bench.errors import UserError, require
from entrain_bench.records.records import METRICS

TEXTS = ("claim", "paper", "where", "paper_setting", "our_setting", "why")
KEYS = {*TEXTS, "value", "unit", "common", "measure"}
UNITS = ("x", "%")
PICKS = ("mean", "max", "min")
CASE = ["workload", "model"]
# Shares of the paper's gain: at least this for "reproduced", for "partly".
REPRODUCED, PARTLY = 0.8, 1 / 3
# A ratio must exceed this for an order to hold; what is closer counts as equal.
ORDER = 1.02


@dataclass(frozen=True, slots=True)
class Measure:
    """How a number comes out of runs.

    For every workload and model, a metric is averaged over seeds for each configuration of ``of`` and of ``to``; among
    several configurations the mean, greatest or least counts; the two sides are compared; cases are then combined.

    Attributes:
        metric: a column of the table of runs.
        of: overrides of the runs in the numerator.
        to: overrides of the runs they are compared with; empty to take the metric itself.
        at, against: overrides of two settings; the result is the ratio under ``at`` over the ratio under ``against``.
        pick_of, pick_to: which configuration of a side counts (mean, max, min).
        over: how workloads and models are combined (mean, max, min).
    """

    metric: str
    of: tuple[str, ...]
    to: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    pick_of: str = "mean"
    pick_to: str = "mean"
    over: str = "mean"


@dataclass(frozen=True, slots=True)
class Claim:
    """A published number and how it is measured here.

    Attributes:
        name: the YAML's name.
        claim: what is claimed, in words.
        paper, where: arXiv number, and the place in the paper.
        value: the published number, or the ends of a range, in ``unit``; empty if the paper states an order without a
            number: that the measured ratio is above 1.
        unit: ``x`` for a ratio, ``%`` for a change (with ``measure.to``) or a share (without).
        paper_setting, our_setting: the two settings, in words.
        common: overrides of all runs.
        measure: how the number is measured.
        why: the author's explanation of agreement or difference.
    """

    name: str
    claim: str
    paper: str
    where: str
    value: tuple[float, ...]
    unit: str
    paper_setting: str
    our_setting: str
    common: tuple[str, ...]
    measure: Measure
    why: str

    @property
    def pairs(self) -> list[list[tuple[str, ...]]]:
        """The sweeps to run: for every setting the numerator, and the denominator if there is one."""
        measure = self.measure
        settings = [measure.at, measure.against] if measure.against else [()]
        return [[(*self.common, *setting, *side) for side in (measure.of, measure.to) if side] for setting in settings]

    def gain(self, value: float) -> float:
        """What of a value is the gain: a ratio's distance from 1, anything else itself."""
        return value - 1 if self.unit == "x" else value

    def format(self, value: float | Sequence[float]) -> str:
        """A value, or the ends of a range, with the unit; an order without a number as a bound."""
        values = [value] if isinstance(value, float) else value
        if not values:
            return "> 1"
        sign = "+" if self.unit == "%" and self.measure.to else ""
        text = " to ".join(f"{v:.2f}" if self.unit == "x" else f"{v:{sign}.1f}" for v in values)
        return text + ("x" if self.unit == "x" else "%")


def parse_claim(name: str, values: Mapping[str, Any]) -> Claim:
    """A claim from plain values; checks keys, texts, metric and ranges."""
    for key in sorted(KEYS ^ {*values}):
        require(key in KEYS, "key", key, f"one of {', '.join(sorted(KEYS))}")
        raise UserError(f"{key}: missing")
    texts = {key: " ".join(str(values[key]).split()) for key in TEXTS}
    measure = _parse_measure(values["measure"])
    value = values["value"]
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    unit = values["unit"]
    require(unit in UNITS, "unit", unit, f"one of {', '.join(UNITS)}")
    require(unit != "x" or bool(measure.to), "measure.to", [], "given for a ratio")
    require(unit == "x" or not (value is None or measure.against), "unit", unit, "x for an order and for two settings")
    claim = Claim(
        name=name,
        value=tuple(float(number) for number in numbers),
        unit=unit,
        common=tuple(values["common"]),
        measure=measure,
        **texts,
    )
    require(all(claim.gain(v) != 0 for v in claim.value), "value", value, "a gain or a loss, or null for an order")
    return claim


def _parse_measure(values: Mapping[str, Any]) -> Measure:
    known = Measure.__dataclass_fields__
    for key in values:
        require(key in known, "measure: key", key, f"one of {', '.join(known)}")
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    measure = Measure(**fields)
    require(bool(measure.at) == bool(measure.against), "measure.against", [*measure.against], "given with measure.at")
    require(measure.metric in METRICS, "measure.metric", measure.metric, f"one of {', '.join(METRICS)}")
    for key in ("pick_of", "pick_to", "over"):
        require(getattr(measure, key) in PICKS, f"measure.{key}", getattr(measure, key), f"one of {', '.join(PICKS)}")
    return measure


def measured(claim: Claim, pairs: Sequence[Sequence[pd.DataFrame]]) -> pd.Series[float]:
    """The claim's numbers from the runs of its pairs, in its unit.

    Args:
        claim: the claim.
        pairs: for every setting the run tables of its sides (``workload``, ``model``, ``configuration``, the metric),
            numerator first.

    Returns:
        A number for every workload and model; a single one where two settings are compared.

    Raises:
        UserError: if the sides of a pair have no workload and model in common.
    """
    measure = claim.measure
    settings = [_compared(claim, tables) for tables in pairs]
    if measure.against:
        at, against = (cases.agg(measure.over) for cases in settings)
        return pd.Series([at / against])
    (cases,) = settings
    if claim.unit == "x":
        return cases
    return 100 * (cases - 1) if measure.to else 100 * cases


def combined(claim: Claim, cases: pd.Series[float]) -> str:
    """The claim's number over all cases as text; of an order the least and the greatest, and in how many it holds."""
    if claim.value:
        return claim.format(float(cases.agg(claim.measure.over)))
    if len(cases) == 1:
        return claim.format(float(cases.iloc[0]))
    ends = claim.format((float(cases.min()), float(cases.max())))
    return f"{ends} ({int((cases > ORDER).sum())} of {len(cases)})"


def verdict(claim: Claim, cases: pd.Series[float]) -> str:
    """Reproduced, partly or not, by the share of the paper's gain that is measured.

    ``reproduced``: at least 80% of it, or beyond; ``partly``: at least a third; ``not``: less, or the other direction.
    Of a range the end nearer to no gain counts. An order without a number is reproduced if it holds (``ORDER``) in
    every case, partly if in a third of them.
    """
    if not claim.value:
        share = float((cases > ORDER).mean())
        return "reproduced" if share == 1 else "partly" if share >= PARTLY else "not"
    gain = min((claim.gain(number) for number in claim.value), key=abs)
    share = claim.gain(float(cases.agg(claim.measure.over))) / gain
    if share >= REPRODUCED:
        return "reproduced"
    return "partly" if share >= PARTLY else "not"


def _compared(claim: Claim, tables: Sequence[pd.DataFrame]) -> pd.Series[float]:
    """Numerator over denominator, or the numerator, for every workload and model."""
    measure = claim.measure
    sides = [
        _case_values(table, measure.metric, pick)
        for table, pick in zip(tables, (measure.pick_of, measure.pick_to), strict=False)
    ]
    cases = (sides[0] / sides[1] if len(sides) > 1 else sides[0]).dropna()
    if cases.empty:
        raise UserError(f"measure: the two sides of {claim.name} have no workload and model in common")
    return cases


def _case_values(table: pd.DataFrame, metric: str, pick: str) -> pd.Series[float]:
    means = table.groupby([*CASE, "configuration"])[metric].mean()
    values: pd.Series[float] = means.groupby(level=CASE).agg(pick)
    return values
