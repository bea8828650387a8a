"""A published claim, how it is measured here, and the rule that judges it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from entrain_bench.errors import UserError, require
from entrain_bench.records.records import METRICS
from entrain_bench.records.statistics import Interval, mean_interval, ratio_interval

TEXTS = ("claim", "paper", "where", "paper_setting", "our_setting")
REQUIRED = {*TEXTS, "value", "unit", "common", "measure"}
KEYS = REQUIRED | {"why"}
UNITS = ("x", "%")
PICKS = ("mean", "max", "min")
CASE = ["workload", "model"]
# Shares of the paper's gain: at least this for "reproduced", for "partly".
REPRODUCED, PARTLY = 0.8, 1 / 3
UNDECIDED = "undecided"
# A ratio must exceed this for an order to hold; what is closer counts as equal.
ORDER = 1.02


@dataclass(frozen=True, slots=True)
class Measure:
    """How a number comes out of runs.

    For every workload and model, among several configurations of ``of`` and of ``to`` their mean counts, or the one
    that is greatest or least on average; the two sides are compared seed by seed; cases are then combined.

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
        why: what explains agreement or difference, as a run that it names has shown; empty if none has.
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
    why: str = ""

    @property
    def pairs(self) -> list[list[tuple[str, ...]]]:
        """The sweeps to run: for every setting the numerator, and the denominator if there is one."""
        measure = self.measure
        settings = [measure.at, measure.against] if measure.against else [()]
        return [[(*self.common, *setting, *side) for side in (measure.of, measure.to) if side] for setting in settings]

    def gain(self, value: float) -> float:
        """What of a value is the gain: a ratio's distance from 1, anything else itself."""
        return value - 1 if self.unit == "x" else value

    def describe(self, interval: Interval) -> str:
        """A number and, if there is one, its interval."""
        text = self.format(interval.mean)
        return f"{text} ({self.format((interval.low, interval.high))})" if interval.num_values > 1 else text

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
    for key in sorted(values):
        require(key in KEYS, "key", key, f"one of {', '.join(sorted(KEYS))}")
    for key in sorted(REQUIRED - {*values}):
        raise UserError(f"{key}: missing")
    texts = {key: " ".join(str(values.get(key, "")).split()) for key in (*TEXTS, "why")}
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


def measured(claim: Claim, pairs: Sequence[Sequence[pd.DataFrame]]) -> pd.DataFrame:
    """The claim's numbers from the runs of its pairs: what is compared, or the metric itself.

    Args:
        claim: the claim.
        pairs: for every setting the run tables of its sides (``workload``, ``model``, ``configuration``, ``seed``, the
            metric), numerator first.

    Returns:
        A row for every workload and model, a single one where two settings are compared; a column for every seed.

    Raises:
        UserError: if the sides of a pair have no workload, model and seed in common, and for a ratio of numbers that
            are not positive.
    """
    settings = [_compared(claim, tables) for tables in pairs]
    if claim.measure.against:
        at, against = (_over(cases, claim.measure.over) for cases in settings)
        return pd.DataFrame([at / against])
    (cases,) = settings
    return cases


def combined(claim: Claim, cases: pd.DataFrame) -> str:
    """The claim's number over all cases, and its interval; of an order the ends, and in how many cases it holds."""
    if claim.value or len(cases) == 1:
        return claim.describe(_interval(claim, _over(cases, claim.measure.over)))
    intervals = [_interval(claim, row) for _, row in cases.iterrows()]
    means = [interval.mean for interval in intervals]
    holds, may = _held(intervals)
    unclear = f", {may - holds} unclear" if may > holds else ""
    return f"{claim.format((min(means), max(means)))} ({holds} of {len(means)}{unclear})"


def verdict(claim: Claim, cases: pd.DataFrame) -> str:
    """Whether the claim is reproduced, partly or not, by the share of the paper's gain that is measured.

    ``reproduced``: at least 80% of it, or beyond; ``partly``: at least a third; ``not reproduced``: less, or the other
    direction. Of a range the end nearer to no gain counts. An order without a number is reproduced if it holds
    (``ORDER``) in every case, partly if in a third of them. ``undecided``: within the intervals the verdict is not the
    same.
    """
    if claim.value:
        gain = min((claim.gain(number) for number in claim.value), key=abs)
        interval = _interval(claim, _over(cases, claim.measure.over))
        shares = [claim.gain(end) / gain for end in (interval.low, interval.high)]
        verdicts = {_by_share(share, REPRODUCED) for share in shares}
    else:
        counts = _held([_interval(claim, row) for _, row in cases.iterrows()])
        verdicts = {_by_share(count / len(cases), 1.0) for count in counts}
    return verdicts.pop() if len(verdicts) == 1 else UNDECIDED


def _by_share(share: float, enough: float) -> str:
    return "reproduced" if share >= enough else "partly" if share >= PARTLY else "not reproduced"


def _held(intervals: Sequence[Interval]) -> tuple[int, int]:
    """In how many cases an order holds, and in how many it may."""
    return sum(each.low > ORDER for each in intervals), sum(each.high > ORDER for each in intervals)


def _interval(claim: Claim, seeds: pd.Series[float]) -> Interval:
    """Mean and interval of a number of every seed, in the claim's unit."""
    values = seeds.tolist()
    found = ratio_interval(values, [1.0] * len(values)) if claim.measure.to else mean_interval(values)
    if claim.unit == "x":
        return found
    nothing = 1.0 if claim.measure.to else 0.0
    mean, low, high = (100 * (end - nothing) for end in (found.mean, found.low, found.high))
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
    if measure.to and not (cases > 0).all(axis=None):
        raise UserError(f"measure.metric={measure.metric}: must be positive in all runs, for it makes a ratio")
    return cases


def _case_values(table: pd.DataFrame, metric: str, pick: str) -> pd.DataFrame:
    """The metric of every workload and model at every seed, of the configuration that counts."""
    values = table.pivot_table(metric, [*CASE, "configuration"], "seed", sort=False)
    cases = {case: _over(group, pick) for case, group in values.groupby(level=CASE, sort=False)}
    return pd.DataFrame(cases.values(), pd.MultiIndex.from_tuples(cases, names=CASE))
