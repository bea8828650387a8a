"""A published claim, and the two settings in which it is measured here: as published, and fair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from entrain_bench.answers.documents.definition import OVERRIDES, merge_overrides, override_key
from entrain_bench.answers.statistics import Interval
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.records.records import METRICS

TEXTS = ("claim", "paper", "where", "paper_setting")
PUBLISHED, FAIR = SETTINGS = ("published", "fair")
REQUIRED = {*TEXTS, "value", "unit", "measure", *SETTINGS}
# Overrides stated at a claim hold for both settings.
KEYS = REQUIRED | {"system", "choices", "assumption", "judged_by", "no_source", "why", *OVERRIDES}
SIDES = ("common", "of", "to")
# Overrides that take the place of a setting's, of all runs or of those of one side.
type Change = Mapping[str, tuple[str, ...]]
SETTING_KEYS = {"setting", "measure", *OVERRIDES}
# Of the metric in the unit: of a ratio, of a change or share, of bytes, of a count.
SCALES = {"x": 1.0, "%": 100.0, "GB": 1e-9, "stages": 1.0}
# Units of the metric itself, which is never compared.
BARE = ("GB", "stages")
# What is read off a run's layout: pipeline stages of the encoders.
ENCODER_STAGES = "encoder_stages"
GAIN, LEVEL, LIMIT = JUDGED_BY = ("gain", "level", "limit")
PICKS = ("mean", "max", "min")
# Numbers that papers state and that are products of two columns: seconds a GPU idles in an iteration.
PRODUCTS = {"idle_time_s": ("bubble_ratio", "iteration_time_s")}


@dataclass(frozen=True, slots=True)
class Measure:
    """How a number comes out of runs.

    For every workload and model, among several configurations of a side their mean counts, or the one that is greatest
    or least on average; the two sides are compared seed by seed; cases are then combined.

    Attributes:
        metric: a column of the table of runs, or one of ``PRODUCTS``.
        pick_of, pick_to: which configuration of a side counts (mean, max, min).
        over: how workloads and models are combined (mean, max, min).
    """

    metric: str
    pick_of: str = "mean"
    pick_to: str = "mean"
    over: str = "mean"


@dataclass(frozen=True, slots=True)
class ClaimSide:
    """The runs of which a number is made, by their overrides.

    Attributes:
        words: what the setting is, and what of it was chosen here.
        common: of all runs.
        of: of the runs in the numerator.
        to: of the runs they are compared with; empty to take the metric itself.
        at, against: of two situations; the result is the ratio under ``at`` over the ratio under ``against``,
            or the metric itself under both where ``to`` is empty.
        measure: what it measures otherwise than the claim, such as the whole iteration.
    """

    words: str
    common: tuple[str, ...]
    of: tuple[str, ...]
    to: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    measure: Mapping[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> list[list[tuple[str, ...]]]:
        """The sweeps to run: for every situation the numerator, and the denominator if there is one."""
        situations = [self.at, self.against] if self.against else [()]
        return [[(*self.common, *at, *side) for side in (self.of, self.to) if side] for at in situations]

    @property
    def sweeps(self) -> list[tuple[str, ...]]:
        """The same, one after another."""
        return [side for pair in self.pairs for side in pair]

    def changed(self, change: Change) -> ClaimSide:
        """The setting with overrides of the same keys replaced, and others added.

        What one side alone changes of ``common``, the other side keeps.

        Raises:
            UserError: for a key that tells the two situations apart.
        """
        everywhere, of, to = ({override_key(text) for text in change.get(side, ())} for side in SIDES)
        for text in (*self.at, *self.against):
            changed = override_key(text) in everywhere | of | to
            require(not changed, "change", override_key(text), "a key other than those of at and against")
        shared = _without(self.common, everywhere)
        split = tuple(text for text in shared if override_key(text) in of | to)
        return replace(
            self,
            common=(*_without(shared, of | to), *change.get("common", ())),
            of=(*_without((*split, *self.of), everywhere | of), *change.get("of", ())),
            to=(*_without((*split, *self.to), everywhere | to), *change.get("to", ())) if self.to else (),
        )


@dataclass(frozen=True, slots=True)
class Assumption:
    """What one of the settings assumes and a claim hangs on, and what runs with changed overrides assume instead."""

    text: str
    otherwise: str
    of_setting: str
    change: Change


@dataclass(frozen=True, slots=True)
class Claim:
    """A published number and how it is measured here.

    Attributes:
        paper, where: arXiv number, and the place in the paper.
        value: the published number, or the ends of a range, in ``unit``; empty if the paper states an order without a
            number: that the measured ratio is above 1.
        unit: ``x`` for a ratio, ``%`` for a change (with ``to``) or a share (without), ``GB`` or
            ``stages`` for the metric itself.
        published: the paper's setting as far as it is stated.
        fair: every baseline tuned by the same rules.
        choices: of what the paper does not state, other choices than those of ``published``, by their names.
        assumption: what decides; None if nothing was toggled.
        judged_by: what of the number is claimed: ``gain`` (so much, or more), ``level`` (that it is about so much: the
            paper's point is no gain, or no comparison), ``limit`` (that it is at most so much).
        no_source: whether the number could not be found in the paper, so that nothing can be judged.
        why: what explains agreement or difference, as runs have shown; empty if none has.
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
    fair: ClaimSide
    choices: Mapping[str, ClaimSide] = field(default_factory=dict)
    assumption: Assumption | None = None
    judged_by: str = GAIN
    no_source: bool = False
    why: str = ""
    system: str = ""
    file: str = ""
    config_dir: str | None = None

    @property
    def toggled(self) -> ClaimSide | None:
        """The setting in which the assumption is otherwise; None without an assumption."""
        if not self.assumption:
            return None
        setting = self.fair if self.assumption.of_setting == FAIR else self.published
        return setting.changed(self.assumption.change)

    def under(self, setting: ClaimSide) -> Claim:
        """The claim with what a setting measures otherwise."""
        return replace(self, measure=_measure({**asdict(self.measure), **setting.measure}))

    @property
    def settings(self) -> list[ClaimSide]:
        """All that have to run."""
        return [each for each in (self.published, *self.choices.values(), self.fair, self.toggled) if each]

    @property
    def is_relative(self) -> bool:
        """Whether two sides or two situations are compared; otherwise the metric itself is the number."""
        return bool(self.published.to or self.published.against)

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
        sign = "+" if self.unit == "%" and self.is_relative else ""
        text = " to ".join(f"{v:.2f}" if self.unit == "x" else f"{v:{sign}.1f}" for v in values)
        return f"{text} {self.unit}" if self.unit in BARE else text + self.unit


def parse_claim(name: str, values: Mapping[str, Any]) -> Claim:
    """A claim from plain values; checks keys, texts, metric and ranges."""
    _check_keys("", values, KEYS, REQUIRED)
    settings = {each: _setting(each, values[each], values) for each in SETTINGS}
    value = values["value"]
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    unit, relative = values["unit"], bool(settings[PUBLISHED].to)
    require(unit in SCALES, "unit", unit, f"one of {', '.join(SCALES)}")
    require(unit not in BARE or not relative, "published.to", [*settings[PUBLISHED].to], f"empty for {unit}")
    judged_by = values.get("judged_by", GAIN)
    require(judged_by in JUDGED_BY, "judged_by", judged_by, f"one of {', '.join(JUDGED_BY)}")
    listed = values.get("choices", {})
    choices = {k: v for each in listed for k, v in each.items()} if isinstance(listed, list) else listed
    level = judged_by == GAIN or (value is not None and (unit != "%" or not relative))
    require(level, "judged_by", judged_by, "gain for an order and for a change")
    compared = relative or bool(settings[PUBLISHED].against)
    require(unit != "x" or compared, "published.to", [], "given for a ratio, or at and against")
    ratio = value is None or any(setting.against for setting in settings.values())
    require(unit == "x" or not ratio, "unit", unit, "x for an order and for two situations")
    for key in SETTINGS:
        require(bool(settings[key].to) == relative, f"{key}.to", [*settings[key].to], "given in both settings or none")
    claim = Claim(
        name=name,
        value=tuple(float(number) for number in numbers),
        unit=unit,
        measure=_measure(values["measure"]),
        published=settings[PUBLISHED],
        fair=settings[FAIR],
        choices={label: settings[PUBLISHED].changed(_change(label, change)) for label, change in choices.items()},
        assumption=_assumption(values["assumption"]) if "assumption" in values else None,
        judged_by=judged_by,
        no_source=bool(values.get("no_source", False)),
        **{key: _words(values.get(key, "")) for key in (*TEXTS, "why", "system")},
    )
    for setting in settings.values():
        claim.under(setting)
    judged = judged_by != GAIN or all(claim.gain(v) != 0 for v in claim.value)
    require(judged, "value", value, "a gain or a loss, or null for an order")
    return claim


def _measure(values: Mapping[str, Any] | str) -> Measure:
    values = {"metric": values} if isinstance(values, str) else values
    _check_keys("measure: ", values, {each.name for each in fields(Measure)}, {"metric"})
    measure = Measure(**values)
    known = (*METRICS, *PRODUCTS, ENCODER_STAGES)
    require(measure.metric in known, "measure.metric", measure.metric, f"one of {', '.join(known)}")
    for key, pick in (("pick_of", measure.pick_of), ("pick_to", measure.pick_to), ("over", measure.over)):
        require(pick in PICKS, f"measure.{key}", pick, f"one of {', '.join(PICKS)}")
    return measure


def _setting(name: str, values: Mapping[str, Any], claim: Mapping[str, Any]) -> ClaimSide:
    _check_keys(f"{name}: ", values, SETTING_KEYS, {"setting"})
    sides = {key: tuple(merge_overrides(claim.get(key, []), values.get(key, []))) for key in OVERRIDES}
    require(bool(sides["of"]), f"{name}.of", "[]", "the overrides of the runs in the numerator")
    setting = ClaimSide(_words(values["setting"]), **sides, measure=values.get("measure", {}))
    require(bool(setting.at) == bool(setting.against), f"{name}.against", [*setting.against], f"given with {name}.at")
    return setting


def _change(name: str, values: Mapping[str, Any]) -> Change:
    _check_keys(f"{name}: ", values, {*SIDES}, set())
    require(any(values.values()), name, "{}", "overrides that make a difference")
    return {side: tuple(texts) for side, texts in values.items()}


def _assumption(values: Mapping[str, Any]) -> Assumption:
    _check_keys("assumption: ", values, {"text", "otherwise", "of_setting", *SIDES}, {"text", "otherwise"})
    of_setting = values.get("of_setting", PUBLISHED)
    if of_setting not in SETTINGS:
        raise unknown_choice("assumption.of_setting", of_setting, SETTINGS)
    change = _change("assumption", {key: values[key] for key in SIDES if key in values})
    return Assumption(_words(values["text"]), _words(values["otherwise"]), of_setting, change)


def _check_keys(where: str, values: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    for key in sorted(values):
        require(key in known, f"{where}key", key, f"one of {', '.join(sorted(known))}")
    for key in sorted(needed - {*values}):
        raise UserError(f"{where}{key}: missing")


def _words(text: object) -> str:
    return " ".join(str(text).split())


def _without(overrides: Sequence[str], keys: set[str]) -> tuple[str, ...]:
    return tuple(text for text in overrides if override_key(text) not in keys)
