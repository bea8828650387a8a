"""How numbers come out of runs, and the rule that judges them: each verdict has two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from entrain_bench.answers.documents.claim import GAIN, LIMIT, PRODUCTS, SCALES, Claim
from entrain_bench.answers.statistics import Interval, mean_interval, ratio_interval
from entrain_bench.base.errors import UserError

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
UNDECIDED = "undecided"
NO_SOURCE = "no source"
EXCEEDS = "exceeds"
ELSEWHERE = "setting not reproduced"
# A ratio must exceed the first for an order to hold; what is closer counts as equal. A paper's ratio that is closer
# to 1 is no gain: "reproduced" up to the first from it, "partly" up to the second.
ORDER = 1.02
NEARLY = 1.05


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
    """Judge a claim by how much of the paper's number is measured.

    Gain: ``reproduced`` from 0.8 to 1.25 of the paper's gain, ``exceeds`` beyond, ``partly`` from a third, else ``not
    reproduced``; for a range its ends bound these shares. A paper's ratio within 2% of 1 is reproduced within 2%,
    partly within 5%. An order without a number is reproduced if it holds (``ORDER``) in every case, partly if in a
    third. Level (a time, memory, MFU, a cost): within a factor of 1.25 of the paper's number, partly within 2; stages
    where they are equal, partly one off; GPUs within one, partly three. Limit: reproduced if kept, partly if exceeded
    by up to 25%. ``undecided``: the verdicts of the interval's ends differ. ``no source``: not the paper's number, as
    far as is known.
    """
    if claim.no_source:
        return NO_SOURCE
    if not claim.value:
        counts = _held([_interval(claim, row) for _, row in cases.iterrows()])
        shares = [count / len(cases) for count in counts]
        verdicts = {"reproduced" if each >= 1 else "partly" if each >= PARTLY else "not reproduced" for each in shares}
    else:
        interval = _interval(claim, _over(cases, claim.measure.over))
        judge = _by_share if claim.judged_by == GAIN else _by_distance
        verdicts = {judge(claim, end) for end in (interval.low, interval.high)}
    return verdicts.pop() if len(verdicts) == 1 else UNDECIDED


def _by_share(claim: Claim, number: float) -> str:
    """The verdict on a gain."""
    ratios = [_ratio(claim, value) for value in claim.value]
    if all(1 / ORDER < ratio < ORDER for ratio in ratios):
        found = _ratio(claim, number)
        factor = max(found / max(ratios), min(ratios) / found, 1.0)
        return "reproduced" if factor <= ORDER else "partly" if factor <= NEARLY else "not reproduced"
    gains = sorted((claim.gain(value) for value in claim.value), key=abs)
    if claim.gain(number) / gains[-1] > EXCEEDED:
        return EXCEEDS
    share = claim.gain(number) / gains[0]
    return "reproduced" if share >= REPRODUCED else "partly" if share >= PARTLY else "not reproduced"


def _ratio(claim: Claim, number: float) -> float:
    """A ratio, or the ratio of a change."""
    return number if claim.unit == "x" else 1 + number / 100


def _by_distance(claim: Claim, number: float) -> str:
    """The verdict on a level or limit, by how many times (of things counted: how far) it is above or below."""
    low = sorted(claim.value, key=abs)[0]
    high = sorted(claim.value, key=abs)[-1]
    if claim.judged_by == LIMIT:
        factor = number / low
        enough = 1.0
        some = SAME
    elif claim.unit in COUNTS:
        factor = max(number - high, low - number)
        (enough, some) = COUNTS[claim.unit]
    elif number / low <= 0:
        return "not reproduced"
    else:
        factor = max(number / high, low / number, 1.0)
        enough = SAME
        some = SIMILAR
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
    scale = 1.0 if claim.unit == "ms" and claim.measure.metric.endswith("_ms") else SCALES[claim.unit]
    mean, low, high = (scale * (end - nothing) for end in (found.mean, found.low, found.high))
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
