"""A published claim: the cells that it names, and the settings in which it is measured here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from entrain_bench.answers.documents.definition import GROUP, OVERRIDES, merge_overrides
from entrain_bench.answers.documents.published import PublishedCell, find_cells
from entrain_bench.answers.documents.sides import SIDES, Change, ClaimSide, fair_side, published_side
from entrain_bench.answers.statistics import Interval
from entrain_bench.base.errors import UserError, require
from entrain_bench.records.records import METRICS

TEXTS = ("claim", "paper", "where", "paper_setting")
PUBLISHED = "published"
FAIR = "fair"
REQUIRED = {"claim", "paper", "measure", PUBLISHED}
# What a claim without cells must state itself.
OF_CELLS = {"where", "value", "unit", "paper_setting"}
# Overrides stated at a claim hold for both settings.
KEYS = {
    *(REQUIRED | OF_CELLS | {*OVERRIDES}),
    *(
        FAIR,
        GROUP,
        "title",
        "cells",
        "per",
        "differs",
        "system",
        "choices",
        "assumption",
        "judged_by",
        "no_source",
        "why",
    ),
}
SETTING_KEYS = {"setting", "measure", *OVERRIDES}
# Units of numbers that are metrics as they are.
COUNTED = ("stages", "GPUs", "GPU days", "TFLOPS")
# Of the metric in the unit: of a ratio, of a change or share, of bytes, of seconds.
SCALES = {"x": 1.0, "%": 100.0, "GB": 1e-9, "s": 1.0, "ms": 1e3} | dict.fromkeys(COUNTED, 1.0)
# Units of the metric itself, which is never compared.
BARE = ("GB", "s", "ms", *COUNTED)
# Units of cells by that of a claim, if they differ.
UNITS = {"1": "%", "GPUs of 16": "GPUs"}
# What is read off a run's layout: pipeline stages of the encoders, and their ranks in a replica.
ENCODER_STAGES = "encoder_stages"
ENCODER_GPUS = "encoder_gpus"
# GPU days of the samples that a cell states.
GPU_DAYS = "gpu_days"
GAIN, LEVEL, LIMIT = JUDGED_BY = ("gain", "level", "limit")
PICKS = ("mean", "max", "min")
# Numbers that papers state and that are products of two columns: seconds a GPU idles in an iteration.
PRODUCTS = {"idle_time_s": ("bubble_ratio", "iteration_time_s")}
# A claim is named with so many cells at most in what it says of the paper.
SHOWN_CELLS = 4


def cited(paper: str) -> str:
    """Return a claim's source in words: ``arXiv:2605.27918``; another source is unchanged."""
    return f"arXiv:{paper}" if re.fullmatch(r"\d{4}\.\d{5}", paper) else paper


@dataclass(frozen=True, slots=True)
class Measure:
    """How a number comes out of runs.

    For every workload and model, among several configurations of a side their mean counts, or the one that is greatest
    or least on average; the two sides are compared seed by seed; cases are then combined.

    Attributes:
        metric: a column of the table of runs, or one of ``PRODUCTS``.
        pick_of, pick_to: which configuration of a side counts (mean, max, min).
        over: how workloads and models are combined (mean, max, min).
        samples: for GPU days the cell that states how many samples they are of.
    """

    metric: str
    pick_of: str = "mean"
    pick_to: str = "mean"
    over: str = "mean"
    samples: str = ""


@dataclass(frozen=True, slots=True)
class Assumption:
    """An assumption of the published setting that decides a claim, and overrides that change it."""

    text: str
    otherwise: str
    change: Change


@dataclass(frozen=True, slots=True)
class Claim:
    """A published number and how it is measured here.

    Attributes:
        paper, where: arXiv number or another source by its name (``cited``), and the place in it.
        value: the published number, or the ends of a range, in ``unit``; empty if the paper states an order without a
            number: that the measured ratio is above 1.
        unit: ``x`` for a ratio, ``%`` for a change (with ``to``) or a share (without), one of ``BARE`` for the metric
            itself.
        published: the paper's setting as far as it is stated.
        fair: the same job, tuned by one rule for both sides; None for a number without a baseline.
        choices: of what the paper does not state, other choices than those of ``published``, by their names.
        assumption: what decides; None if nothing was toggled.
        judged_by: what of the number is claimed: ``gain`` (so much more), ``level`` (that it is about so much: a cost,
            a time, memory, MFU), ``limit`` (that it is at most so much).
        no_source: whether the number could not be found in the paper, so that nothing can be judged.
        why: what explains agreement or difference, as runs have shown; empty if none has.
        cells, per: the published cells that the claim is about, and those that their number is divided by.
        differs: what of the cells the published setting cannot have (``gpus``, ``model``, ``data``, a key of their
            setting), with the reason.
        group, title: the matrix of which the claim is a case, and what all its cases are; empty for none.
        file: name of the YAML, without its suffix.
        config_dir: the user's folder that it is in; None for a claim of this repository.
    """

    name: str
    claim: str
    paper: str
    where: str
    value: tuple[float, ...]
    unit: str
    measure: Measure
    paper_setting: str
    published: ClaimSide
    fair: ClaimSide | None
    choices: Mapping[str, ClaimSide] = field(default_factory=dict)
    assumption: Assumption | None = None
    judged_by: str = GAIN
    no_source: bool = False
    why: str = ""
    cells: tuple[PublishedCell, ...] = ()
    per: tuple[PublishedCell, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    title: str = ""
    system: str = ""
    file: str = ""
    config_dir: str | None = None

    @property
    def toggled(self) -> ClaimSide | None:
        """The setting in which the assumption is otherwise; None without an assumption."""
        return self.published.changed(self.assumption.change) if self.assumption else None

    def under(self, setting: ClaimSide) -> Claim:
        """The claim with what a setting measures otherwise."""
        if not setting.measure:
            return self
        return replace(self, measure=_measure({**asdict(self.measure), **setting.measure}))

    @property
    def settings(self) -> list[ClaimSide]:
        """All that have to run."""
        return [each for each in (self.published, *self.choices.values(), self.fair, self.toggled) if each]

    @property
    def is_relative(self) -> bool:
        """Whether two sides or two situations are compared; otherwise the metric itself is the number."""
        return bool(self.published.to or self.published.is_of_two)

    def gain(self, value: float) -> float:
        """Return the gain of a value: a ratio's distance from 1, other values themselves."""
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
        sign = "+" if self.unit == "%" and self.is_relative else ""
        text = " to ".join(f"{v:.2f}" if self.unit == "x" else f"{v:{sign}.1f}" for v in values)
        return f"{text} {self.unit}" if self.unit in BARE else text + self.unit


def parse_claim(name: str, values: Mapping[str, Any], config_dir: str | None = None) -> Claim:
    """A claim from plain values; checks keys, texts, metric and ranges.

    Args:
        name: of the claim.
        values: as in its YAML.
        config_dir: the user's folder that it is in, whose published cells it may name; None for one of ours.
    """
    cells, per = (find_cells(values.get(key, []), config_dir) for key in ("cells", "per"))
    _check_keys("", values, KEYS, REQUIRED if cells else REQUIRED | OF_CELLS)
    measure = _measure(values["measure"])
    published = published_side(_setting(PUBLISHED, values[PUBLISHED], values))
    relative = bool(published.to)
    compared = relative or published.is_of_two
    # Numbers that are compared with nothing are levels, and so is memory; anything else is a gain.
    usual = LEVEL if not compared or measure.metric == "peak_memory_bytes" else GAIN
    judged_by = values.get("judged_by", usual)
    require(judged_by in JUDGED_BY, "judged_by", judged_by, f"one of {', '.join(JUDGED_BY)}")
    given = "value" in values
    stated, stated_unit = ((), "") if given or not cells else value_of(cells, per, judged_by, relative)
    listed = values["value"] if given and isinstance(values["value"], list) else [values.get("value")]
    numbers = tuple(float(number) for number in listed if number is not None) if given else stated
    unit = "x" if cells and not numbers else values.get("unit", stated_unit)
    require(unit in SCALES, "unit", unit, f"one of {', '.join(SCALES)}")
    require(unit not in BARE or not relative, "published.to", [*published.to], f"empty for {unit}")
    require(judged_by == GAIN or bool(numbers), "judged_by", judged_by, "gain for an order")
    require(unit != "x" or compared, "published.to", [], "given for a ratio, or at and against")
    require(
        unit == "x" or (bool(numbers) and not published.is_of_two), "unit", unit, "x for an order and two situations"
    )
    places = dict.fromkeys(cell.place for cell in (*cells, *per))
    listed = values.get("choices", {})
    choices = {k: v for each in listed for k, v in each.items()} if isinstance(listed, list) else listed
    texts = {key: _words(values.get(key, "")) for key in (*TEXTS, "why", "system", "title", GROUP)}
    texts["where"] = texts["where"] or "; ".join(places)
    shown = "; ".join(cell.words for cell in (*cells, *per)[:SHOWN_CELLS])
    texts["paper_setting"] = " ".join(filter(None, (shown and f"{shown}.", texts["paper_setting"])))
    claim = Claim(
        name=name,
        value=numbers,
        unit=unit,
        measure=measure,
        published=published,
        fair=_fair(published, values, measure) if judged_by == GAIN or values.get(FAIR) else None,
        choices={label: published.changed(_change(label, change)) for label, change in choices.items()},
        assumption=_assumption(values["assumption"]) if "assumption" in values else None,
        judged_by=judged_by,
        no_source=bool(values.get("no_source", False)),
        cells=cells,
        per=per,
        config_dir=config_dir,
        differs={key: _words(text) for key, text in values.get("differs", {}).items()},
        **texts,
    )
    claim.under(published)
    judged = judged_by != GAIN or all(claim.gain(v) != 0 for v in claim.value)
    require(judged, "value", list(numbers), "a gain or a loss, or null for an order")
    return claim


def value_of(
    cells: Sequence[PublishedCell], per: tuple[PublishedCell, ...], judged_by: str, relative: bool
) -> tuple[tuple[float, ...], str]:
    """The number of some cells, or the ends of their range, and its unit; no number if no cell has one."""
    units = {UNITS.get(cell.unit, cell.unit) for cell in cells}
    if per:
        pairs = zip(cells, per * len(cells) if len(per) == 1 else per, strict=True)
        ratios = [cell.value / each.value for cell, each in pairs if cell.value and each.value]
        return tuple(dict.fromkeys((min(ratios), max(ratios)))), "x"
    numbers: list[float] = []
    for cell in cells:
        ends = [cell.high] if judged_by == LIMIT and cell.high else [cell.value]
        ends = [cell.low, cell.high] if cell.value is None and judged_by == LEVEL else ends
        scale = 100.0 if cell.unit == "1" else 1.0
        sign = -1.0 if relative and cell.metric.endswith("_reduction") else 1.0
        numbers += [sign * scale * end for end in ends if end is not None]
    if not numbers:
        return (), "x"
    require(len(units) == 1, "cells", ", ".join(sorted(units)), "of one unit")
    return tuple(dict.fromkeys((min(numbers), max(numbers)))), units.pop()


def _fair(published: ClaimSide, values: Mapping[str, Any], measure: Measure) -> ClaimSide | None:
    stated = values.get(FAIR, {})
    if stated is None or not (published.to or stated.get("to")):
        return None
    _check_keys(f"{FAIR}: ", stated, SETTING_KEYS, set())
    metric = stated.get("measure", {"metric": "iteration_time_s"} if measure.metric == "core_time_s" else {})
    _measure({**asdict(measure), **metric})
    overrides = {key: stated[key] for key in OVERRIDES if key in stated}
    return replace(fair_side(published, overrides, _words(stated.get("setting", ""))), measure=metric)


def _measure(values: Mapping[str, Any] | str) -> Measure:
    values = {"metric": values} if isinstance(values, str) else values
    _check_keys("measure: ", values, {each.name for each in fields(Measure)}, {"metric"})
    measure = Measure(**values)
    known = (*METRICS, *PRODUCTS, ENCODER_STAGES, ENCODER_GPUS, GPU_DAYS)
    require(measure.metric in known, "measure.metric", measure.metric, f"one of {', '.join(known)}")
    for key, pick in (("pick_of", measure.pick_of), ("pick_to", measure.pick_to), ("over", measure.over)):
        require(pick in PICKS, f"measure.{key}", pick, f"one of {', '.join(PICKS)}")
    return measure


def _setting(name: str, values: Mapping[str, Any], claim: Mapping[str, Any]) -> ClaimSide:
    _check_keys(f"{name}: ", values, SETTING_KEYS, {"setting"})
    sides = {key: tuple(merge_overrides(claim.get(key, []), values.get(key, []))) for key in OVERRIDES}
    require(bool(sides["of"]), f"{name}.of", "[]", "the overrides of the runs in the numerator")
    setting = ClaimSide(_words(values["setting"]), **sides, measure=values.get("measure", {}))
    two = setting.is_of_two or not setting.at
    require(
        two and (bool(setting.at) or not setting.against),
        f"{name}.against",
        [*setting.against],
        f"given with {name}.at",
    )
    return setting


def _change(name: str, values: Mapping[str, Any]) -> Change:
    _check_keys(f"{name}: ", values, {*SIDES}, set())
    require(any(values.values()), name, "{}", "overrides that make a difference")
    return {side: tuple(texts) for side, texts in values.items()}


def _assumption(values: Mapping[str, Any]) -> Assumption:
    _check_keys("assumption: ", values, {"text", "otherwise", *SIDES}, {"text", "otherwise"})
    change = _change("assumption", {key: values[key] for key in SIDES if key in values})
    return Assumption(_words(values["text"]), _words(values["otherwise"]), change)


def _check_keys(where: str, values: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    for key in sorted(values):
        require(key in known, f"{where}key", key, f"one of {', '.join(sorted(known))}")
    for key in sorted(needed - {*values}):
        raise UserError(f"{where}{key}: missing")


def _words(text: object) -> str:
    return " ".join(str(text).split())
