"""Data of pictures of any runs: a metric of every strategy and case, over the given base, and its means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.cases import Case, StrategyResult
from entrain_bench.answers.comparison import TIME, geometric_mean
from entrain_bench.answers.labels import FAMILY, ORDER, spell
from entrain_bench.answers.statistics import mean_interval
from entrain_bench.answers.text import count
from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.records.leaves import flatten
from entrain_bench.records.metrics import KNOWN
from entrain_bench.records.records import Record

KINDS = {
    "dots": "mean of every strategy, sorted, and every case",
    "heatmap": "every strategy and case",
    "lines": "every strategy over the key by=KEY",
}
LINES = "lines"
# Values over those of the fastest run of a case; plain values. Else the name of a strategy.
FASTEST = "fastest"
NONE = "none"
# By unit: factor, and unit as people say it.
UNITS = {"bytes": (1 / 2**30, "GiB"), "1": (1.0, "")}


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture of runs: a kind of ``KINDS``, a metric, the key along columns or x (empty: cases), and a base."""

    kind: str = "dots"
    metric: str = TIME
    by: str = ""
    normalize: str = ""

    @property
    def over(self) -> str:
        """The base that values are divided by; times are over the fastest's unless another is given."""
        return self.normalize or (FASTEST if self.metric == TIME else NONE)

    @property
    def label(self) -> str:
        """The label of values."""
        unit = UNITS.get(self._unit, (1.0, self._unit))[1]
        words = self.metric.removesuffix(f"_{self._unit}").replace("_", " ")
        if self.over == NONE:
            return f"{words} ({unit})" if unit else words
        return f"{words} / {self.over if self.over == FASTEST else spell(self.over)}"

    @property
    def scale(self) -> float:
        """The factor of values."""
        return UNITS.get(self._unit, (1.0, ""))[0] if self.over == NONE else 1.0

    def text(self, value: float) -> str:
        """A value as a text; empty for none."""
        return "" if pd.isna(value) else f"{value:.3g}" if self.over == NONE else f"{value:.2f}"

    @property
    def _unit(self) -> str:
        return KNOWN[self.metric].unit if self.metric in KNOWN else "1"

    def name_of(self, result: StrategyResult) -> str:
        """The name of a result; lines are of strategies, whose variants are along x."""
        return result.strategy if self.kind == LINES else result.name

    def mean(self, values: pd.Series) -> float:
        """The mean over cases: of ratios the geometric one."""
        return (fmean if self.over == NONE else geometric_mean)(values.dropna().tolist())


@dataclass(frozen=True, slots=True)
class Plotted:
    """The data of a plot.

    Attributes:
        cells: ``value`` by ``name`` and ``column``, with its 95% CI over seeds; ``overall``: mean over columns.
        strategies: a row per name, with label and order of its strategy; empty if no run has a value.
    """

    cells: pd.DataFrame
    overall: pd.DataFrame
    strategies: pd.DataFrame
    caption: str


def plotted(answer: Answer, plot: Plot) -> Plotted:
    """Return the data that a plot shows; ``UserError`` for an unknown kind, metric, key or strategy."""
    _check(answer, plot)
    rows = pd.DataFrame([row for case in answer.cases for row in _rows(answer, case, plot)])
    runs = rows.dropna(subset="value") if len(rows) else rows
    if runs.empty:
        return Plotted(runs, runs, runs, f"No run has {plot.metric}.")
    by_seed = runs.groupby(["name", "column", "seed"], sort=False)["value"].agg(plot.mean)
    wide = by_seed.unstack("column", sort=False)
    # At a seed that lacks a column that a name has at others, its mean would be over fewer.
    most = wide.notna().groupby(level="name", sort=False).transform("any").sum(axis="columns")
    overall = _intervals(wide[wide.count(axis="columns") == most].agg(plot.mean, axis="columns"), ["name"])
    better = KNOWN[plot.metric].better if plot.metric in KNOWN else ""
    overall = overall.set_index("name").sort_values("value", ascending=better != "high", kind="stable")
    lacking = {plot.name_of(one) for case in answer.cases for one in case.results if None in one.times.values()}
    strategies = runs.drop_duplicates("name").set_index("name")
    strategies = strategies.assign(lacks=strategies.index.isin(lacking))
    caption = _caption(overall, strategies["label"], wide.shape[1], plot)
    return Plotted(_intervals(by_seed, ["name", "column"]), overall, strategies, caption)


def _check(answer: Answer, plot: Plot) -> None:
    if plot.kind not in KINDS:
        raise unknown_choice("plot", plot.kind, KINDS)
    metrics = sorted({name for record in answer.records for name in record.metrics})
    if metrics and plot.metric not in metrics:
        raise unknown_choice("metric", plot.metric, metrics)
    over = [FASTEST, NONE, *sorted({result.strategy for result in answer.results})]
    if plot.over not in over:
        raise unknown_choice("normalize", plot.over, over)
    if plot.kind == LINES and not plot.by:
        raise UserError("by: lines need the key along x, for example by=global_batch")
    if plot.by and not any(plot.by in _keys(record) for record in answer.records):
        raise unknown_choice("by", plot.by, sorted({key for record in answer.records for key in _keys(record)}))


def _keys(record: Record) -> Mapping[str, Any]:
    return {**flatten(record.config), **record.labels}


def _rows(answer: Answer, case: Case, plot: Plot) -> Iterator[dict[str, Any]]:
    """A row per run of a case: its name, label and order of its strategy, column, seed and value."""
    over = (one.values(plot.metric) for one in case.results if plot.over in (FASTEST, one.strategy))
    bases = next(over, {})
    for result in case.results:
        stated = result.first.config["strategy"]
        label = str(stated.get("label") or spell(result.strategy))
        name = plot.name_of(result)
        own = {"name": name, "label": name.replace(result.strategy, label, 1), ORDER: stated.get("display_order")}
        own |= {FAMILY: result.family}
        for seed, value in result.values(plot.metric).items():
            column = _keys(result.runs[seed]).get(plot.by) if plot.by else answer.case_name(case)
            # A layout's degree may be left to the planner.
            column = column if isinstance(column, int | float | str) else str(column)
            base = 1 / plot.scale if plot.over == NONE else bases.get(seed)
            yield {**own, "column": column, "seed": seed, "value": value / base if base else None}


def _intervals(values: pd.Series, keys: list[str]) -> pd.DataFrame:
    """The mean over seeds with its 95% CI."""
    rows = []
    for key, mine in values.groupby(level=keys, sort=False):
        each = mean_interval(mine.tolist())
        rows.append((*(key if isinstance(key, tuple) else (key,)), each.mean, each.low, each.high, each.num_values))
    return pd.DataFrame(rows, columns=[*keys, "value", "value_low", "value_high", "num_seeds"])


def _caption(overall: pd.DataFrame, labels: pd.Series, columns: int, plot: Plot) -> str:
    first, last = (f"{labels[str(row.name)]} {plot.text(row['value'])}" for _, row in overall.iloc[[0, -1]].iterrows())
    kind = "mean" if plot.over == NONE else "geometric mean"
    over = f", {kind} over {count(columns, 'case' if not plot.by else 'value')}" if columns > 1 else ""
    seeds = count(int(overall["num_seeds"].max()), "seed")
    return f"{plot.label[:1].upper()}{plot.label[1:]}{over} and {seeds}: {first} to {last}. A star marks failed runs."
