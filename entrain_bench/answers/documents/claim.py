"""A published claim: the cells that it names, and the settings in which it is measured here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from entrain_bench.answers.documents.agreement import mismatches
from entrain_bench.answers.documents.definition import check_keys, flat, insert, overrides, read_definitions, words
from entrain_bench.answers.documents.published import PublishedCell, cell_fields, find_cells
from entrain_bench.answers.documents.sides import SIDES, ClaimSetting, Measure, Situation, fair_setting
from entrain_bench.base.errors import UserError, require
from entrain_bench.config.tree import config_tree
from entrain_bench.records.records import METRICS

FOLDER = "claim"
TEXTS = ("claim", "paper", "why", "system", "title", "group", "where")
KEYS = (
    *(
        *TEXTS,
        "cells",
        "each",
        "ranges",
        "per",
        "kind",
        "measure",
        "setting",
        *SIDES,
        "at",
        "against",
        "fair",
        "choices",
    ),
    *("assumption", "differs", "paper_setting", "no_source", "value", "unit"),
)
NEEDED = ("claim", "paper", "measure", "setting", "of")
# Keys that a claim without cells states, and a claim with cells takes from them.
OF_CELLS = ("value", "unit", "where")
# Units of numbers that are metrics unchanged.
COUNTED = ("stages", "GPUs", "GPU days", "TFLOPS")
# Factor from the metric to the unit: of a ratio, of a change or share, of bytes, of seconds.
SCALES = {"x": 1.0, "%": 100.0, "GB": 1e-9, "s": 1.0, "ms": 1e3} | dict.fromkeys(COUNTED, 1.0)
# Units of the metric itself, which is never compared.
BARE = ("GB", "s", "ms", *COUNTED)
# Units of cells by that of a claim, if they differ.
UNITS = {"1": "%", "GPUs of 16": "GPUs"}
# Numbers that are derived: from a run's layout the encoders' pipeline stages and their ranks in a replica, GPU days of
# the samples that a cell states, and products of two columns.
ENCODER_STAGES = "encoder_stages"
ENCODER_GPUS = "encoder_gpus"
GPU_DAYS = "gpu_days"
PRODUCTS = {"idle_time_s": ("bubble_ratio", "iteration_time_s")}
KNOWN_METRICS = (*METRICS, *PRODUCTS, ENCODER_STAGES, ENCODER_GPUS, GPU_DAYS)
PICKS = ("mean", "max", "min")
# At most so many cells are in the text on the paper's setting.
SHOWN_CELLS = 4


class Kind(StrEnum):
    """Kind of a claim on a number.

    ``gain``: so much more or less. ``order``: more, without a number. ``level``: about so much (a time, memory, MFU, a
    cost). ``limit``: at most so much.
    """

    GAIN = "gain"
    ORDER = "order"
    LEVEL = "level"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Assumption:
    """An assumption of the published setting that decides a claim, its opposite, and the setting with the opposite."""

    text: str
    otherwise: str
    setting: ClaimSetting


@dataclass(frozen=True, slots=True)
class Claim:
    """A published number and how it is measured here.

    Attributes:
        paper, where: arXiv number or another source by its name (``cited``), and the place in it.
        value: the published number, or the ends of a range, in ``unit``; empty for an order.
        unit: ``x`` for a ratio, ``%`` for a change (with ``to``) or a share (without), one of ``BARE`` for the metric
            itself.
        paper_setting: the setting as the paper states it, in words.
        published: the paper's setting as far as it is stated.
        fair: the same job, tuned by one rule for both sides; None for a number without a baseline.
        choices: the published setting with other values of what the paper does not state, by label.
        assumption: the assumption that decides; None if nothing was toggled.
        no_source: whether the number was not found in the paper, so that nothing can be judged.
        why: explanation of agreement or difference; empty without one.
        cells, per: the published cells that the claim is about, and those that their number is divided by.
        differs: what of the cells the published setting cannot have (``gpus``, ``model``, ``data``, a key of their
            setting), with the reason.
        group, title: claims that are shown as one, and what all of them are; empty for none.
        file: name of the YAML, without its suffix.
        config_dir: the user's folder that it is in; None for a claim of this repository.
    """

    name: str
    claim: str
    paper: str
    where: str
    kind: Kind
    value: tuple[float, ...]
    unit: str
    paper_setting: str
    published: ClaimSetting
    fair: ClaimSetting | None
    choices: Mapping[str, ClaimSetting] = field(default_factory=dict)
    assumption: Assumption | None = None
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

    def __post_init__(self) -> None:
        """Check kind, unit and number against the setting."""
        compared = self.published.is_comparison
        require(self.unit in SCALES, "unit", self.unit, f"one of {', '.join(SCALES)}")
        require(self.unit not in BARE or not self.published.situations[0].to, "to", "given", f"empty for {self.unit}")
        is_order = self.kind == Kind.ORDER
        require(bool(self.value) != is_order, "kind", str(self.kind), "order without a number, and only then")
        require(self.unit != "x" or compared, "to", [], "given for a ratio, or at and against")
        bare = bool(self.value) and len(self.published.situations) == 1
        require(self.unit == "x" or bare, "unit", self.unit, "x for an order and two situations")
        nothing = 1.0 if self.unit == "x" else 0.0
        is_gain = self.kind != Kind.GAIN or nothing not in self.value
        require(is_gain, "value", list(self.value), "a gain or a loss, or null for an order")

    @property
    def toggled(self) -> ClaimSetting | None:
        """The setting with the opposite of the assumption; None without an assumption."""
        return self.assumption.setting if self.assumption else None

    @property
    def settings(self) -> list[ClaimSetting]:
        """All settings that have to run."""
        return [one for one in (self.published, *self.choices.values(), self.fair, self.toggled) if one]

    @property
    def sweeps(self) -> list[tuple[str, ...]]:
        """All sweeps that have to run, each once."""
        return [*dict.fromkeys(sweep for setting in self.settings for sweep in setting.sweeps)]

    @property
    def hash_of_runs(self) -> str:
        """Hash of all sweeps: findings of other runs do not count."""
        return sha256("\n".join(map(shlex.join, self.sweeps)).encode()).hexdigest()[:16]

    def gain(self, value: float) -> float:
        """Return the gain of a value: a ratio's distance from 1, other values themselves."""
        return value - 1 if self.unit == "x" else value

    def format(self, values: Sequence[float]) -> str:
        """A value, or the ends of a range, with the unit; of an order without a value its bound."""
        if not values:
            return "> 1"
        sign = "+" if self.unit == "%" and self.published.is_comparison else ""
        text = " to ".join(f"{value:.2f}" if self.unit == "x" else f"{value:{sign}.1f}" for value in values)
        return f"{text} {self.unit}" if self.unit in BARE else text + self.unit


def cited(paper: str) -> str:
    """Return a claim's source in words: ``arXiv:2605.27918``; another source is unchanged."""
    return f"arXiv:{paper}" if re.fullmatch(r"\d{4}\.\d{5}", paper) else paper


def load_claims(config_dir: str | None = None) -> list[Claim]:
    """Return every claim: by file, then by name, ours before those in a folder of the user's.

    Raises:
        UserError: naming the file and the claim, for one that contradicts its published cells.
    """
    claims = []
    for folder, theirs in ((config_tree(), None), *([(Path(config_dir), config_dir)] if config_dir else [])):
        for path in sorted((folder / FOLDER).glob("*.yaml")):
            parsed = read_definitions(path, "claims", partial(parse_claims, config_dir=theirs))
            named = (replace(claim, file=path.stem, system=claim.system or path.stem) for claim in parsed)
            claims += sorted(named, key=lambda claim: claim.name)
    return claims


def parse_claims(name: str, values: Mapping[str, Any], config_dir: str | None = None) -> Iterator[Claim]:
    """The claim of an entry, with ``each`` one a cell, with ``ranges`` one for cells that agree up to a last ``*``.

    Raises:
        UserError: for a wrong key or value, and for a claim that contradicts its cells.
    """
    entry = {"group": name, **values}
    cases: dict[str, Mapping[str, Any]] = {}
    for cell in _cells(entry.pop("each", []), config_dir):
        cases[re.sub(r"[^a-z0-9]+", "_", cell.id.lower())] = {**entry, "cells": cell.id}
    if pattern := entry.pop("ranges", ""):
        for cell in _cells(pattern, config_dir):
            parts = cell.id.split("-")[: pattern.count("-")]
            cases["_".join([name, *parts[1:]])] = {**entry, "cells": f"{'-'.join(parts)}-*"}
    cases = cases or {name: values}
    for case, stated in cases.items():
        claim = parse_claim(case, stated, config_dir)
        if wrong := mismatches(claim.cells, claim.per, claim.published, claim.differs, config_dir):
            raise UserError("; ".join(wrong))
        yield claim


def parse_claim(name: str, values: Mapping[str, Any], config_dir: str | None = None) -> Claim:
    """A claim from plain values; checks keys, metric, kind and unit.

    Args:
        name: of the claim.
        values: as in its YAML.
        config_dir: the user's folder that it is in, whose published cells it may name; None for one of ours.
    """
    cells = _cells(values.get("cells", []), config_dir)
    per = _cells(values.get("per", []), config_dir)
    check_keys(values, KEYS, NEEDED if cells else (*NEEDED, "where", "value", "paper_setting"))
    values = insert(values, cell_fields(cells[0], config_dir) if cells else {})
    measure = _measure(values["measure"])
    published = _published(values, measure)
    # Numbers that are compared with nothing are levels, and so is memory; anything else is a gain.
    level = not published.is_comparison or measure.metric == "peak_memory_bytes"
    stated = values.get("kind", Kind.LEVEL if level else Kind.GAIN)
    require(stated in [*Kind], "kind", stated, f"one of {', '.join(Kind)}")
    kind = Kind(stated)
    if cells:
        for key in OF_CELLS:
            require(key not in values, key, values.get(key), "left out; the cells state it")
        value, unit = _value_of_cells(cells, per, kind, bool(published.situations[0].to))
    else:
        value = tuple(float(number) for number in flat(values["value"]) if number is not None)
        unit = values.get("unit", "x")
    if not value and kind == Kind.GAIN:
        kind = Kind.ORDER
    shown = "; ".join(cell.words for cell in (*cells, *per)[:SHOWN_CELLS])
    paper_setting = words(values.get("paper_setting", ""))
    texts = {key: words(values.get(key, "")) for key in TEXTS}
    texts["where"] = texts["where"] or "; ".join(dict.fromkeys(cell.place for cell in (*cells, *per)))
    choices = {label: change for listed in flat(values.get("choices", {})) for label, change in listed.items()}
    return Claim(
        name=name,
        kind=kind,
        value=value,
        unit=unit,
        published=published,
        fair=_fair(values.get("fair", {}), kind, published),
        choices={words(label): published.changed(_change(label, stated)) for label, stated in choices.items()},
        assumption=_assumption(values["assumption"], published) if "assumption" in values else None,
        no_source=bool(values.get("no_source", False)),
        cells=cells,
        per=per,
        differs={key: words(reason) for key, reason in values.get("differs", {}).items()},
        config_dir=config_dir,
        paper_setting=" ".join(filter(None, (shown and f"{shown}.", paper_setting))),
        **texts,
    )


def _cells(patterns: Any, config_dir: str | None) -> tuple[PublishedCell, ...]:
    return find_cells([*flat(patterns)], config_dir)


def _value_of_cells(
    cells: Sequence[PublishedCell], per: tuple[PublishedCell, ...], kind: Kind, relative: bool
) -> tuple[tuple[float, ...], str]:
    """The number of some cells, or the ends of their range, and its unit; no number if no cell has one."""
    unit = "x"
    numbers: list[float] = []
    if kind == Kind.ORDER:
        return (), unit
    if per:
        pairs = zip(cells, per * len(cells) if len(per) == 1 else per, strict=True)
        numbers = [cell.value / other.value for cell, other in pairs if cell.value and other.value]
    else:
        for cell in cells:
            ends = [cell.high] if kind == Kind.LIMIT and cell.high else [cell.value]
            if cell.value is None and kind == Kind.LEVEL:
                ends = [cell.low, cell.high]
            scale = 100.0 if cell.unit == "1" else 1.0
            sign = -1.0 if relative and cell.metric.endswith("_reduction") else 1.0
            numbers += [sign * scale * end for end in ends if end is not None]
        if numbers:
            units = {UNITS.get(cell.unit, cell.unit) for cell in cells}
            require(len(units) == 1, "cells", ", ".join(sorted(units)), "of one unit")
            unit = units.pop()
    return tuple(dict.fromkeys((min(numbers), max(numbers)))) if numbers else (), unit


def _published(values: Mapping[str, Any], measure: Measure) -> ClaimSetting:
    """The published setting; each system is tuned as it was published if strategies can be told to."""
    common, of, to, at = (overrides(values.get(key, [])) for key in (*SIDES, "at"))
    require(bool(of), "of", "[]", "the overrides of the runs in the numerator")
    situations = [Situation(of, to, at)]
    against = values.get("against")
    require(bool(against) or not at, "against", against, "given with at")
    if against:
        check_keys(against, ("at", "of", "to"), where="against: ")
        other = {"at": ()} | {key: overrides(texts) for key, texts in against.items()}
        situations.append(replace(situations[0], **other))
    return ClaimSetting(words(values["setting"]), measure, ("tuning=own", *common), tuple(situations))


def _fair(stated: Mapping[str, Any] | None, kind: Kind, published: ClaimSetting) -> ClaimSetting | None:
    """The fair setting of a gain or an order, or of another claim that states one; None without a baseline."""
    judged = kind in (Kind.GAIN, Kind.ORDER) or stated
    if stated is None or not judged or not (published.situations[0].to or stated.get("to")):
        return None
    check_keys(stated, ("setting", "measure", *SIDES), where="fair: ")
    usual = {"metric": "iteration_time_s"} if published.measure.metric == "core_time_s" else {}
    measure = _measure(stated.get("measure", usual), published.measure)
    change = {side: overrides(stated[side]) for side in SIDES if side in stated}
    return fair_setting(published, change, measure, words(stated.get("setting", "")))


def _measure(values: Mapping[str, Any] | str, usual: Measure | None = None) -> Measure:
    """A measure from its metric, or from a mapping; what it leaves out is that of ``usual``."""
    stated = {"metric": values} if isinstance(values, str) else values
    check_keys(stated, [one.name for one in fields(Measure)], () if usual else ("metric",), "measure: ")
    measure = replace(usual, **stated) if usual else Measure(**stated)
    require(measure.metric in KNOWN_METRICS, "measure.metric", measure.metric, f"one of {', '.join(KNOWN_METRICS)}")
    for key in ("pick_of", "pick_to", "over"):
        pick = getattr(measure, key)
        require(pick in PICKS, f"measure.{key}", pick, f"one of {', '.join(PICKS)}")
    return measure


def _change(label: str, values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    check_keys(values, SIDES, where=f"{label}: ")
    require(any(values.values()), label, "{}", "overrides that make a difference")
    return {side: overrides(texts) for side, texts in values.items()}


def _assumption(values: Mapping[str, Any], published: ClaimSetting) -> Assumption:
    check_keys(values, ("text", "otherwise", *SIDES), ("text", "otherwise"), "assumption: ")
    change = _change("assumption", {key: values[key] for key in SIDES if key in values})
    return Assumption(words(values["text"]), words(values["otherwise"]), published.changed(change))
