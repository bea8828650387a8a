"""A published claim: the cells that it names, and the settings in which it is measured here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any

from entrain_bench.answers.documents.definition import (
    Overrides,
    check_keys,
    flat,
    insert,
    overrides,
    read_definitions,
    words,
)
from entrain_bench.answers.documents.published import PublishedCell, cell_fields, find_cells
from entrain_bench.base.errors import require
from entrain_bench.config.tree import config_tree
from entrain_bench.records.records import METRICS
from entrain_bench.specs.parse import OneOf, parse

# Overrides of all runs, of the runs in the numerator, and of the runs that they are compared with.
SIDES = ("common", "of", "to")
# Numbers that are derived: from a run's layout the encoders' pipeline stages and their ranks in a replica, GPU days of
# the samples that a cell states, and products of two columns.
ENCODER_STAGES = "encoder_stages"
ENCODER_GPUS = "encoder_gpus"
GPU_DAYS = "gpu_days"
PRODUCTS = {"idle_time_s": ("bubble_ratio", "iteration_time_s")}
MEMORY = "peak_memory_bytes"
Pick = Annotated[str, OneOf(("mean", "max", "min"))]
STRATEGY = "strategy"
# Keys that a fair setting leaves to the tuner, for every strategy.
FREE = (
    *("tuning=equal", "layout.tp=null", "layout.cp=null", "layout.pp=null", "layout.dp=null"),
    *("layout.recompute=null", "microbatch_size=null"),
)
# Keys of a strategy's options and parts, and with those of its layout, its tuning and a device that is not published.
PARTS = (f"{STRATEGY}.", f"{STRATEGY}/")
TUNED = ("layout.", "microbatch_size", *PARTS, "tuning", "cluster.device.")
FAIR_WORDS = (
    "One rule for all claims: both sides do the same job. Degrees, microbatch size and recomputation are free and "
    "tuned in the same way. Where systems are compared, the tuned Megatron baseline is one of them."
)

# Overrides that replace those of a setting, by side.
type Change = Mapping[str, Overrides]

FOLDER = "claim"
# Settings of a claim that have a verdict of their own.
PUBLISHED = "published"
FAIR = "fair"
OTHERWISE = "otherwise"
JUDGED = (PUBLISHED, FAIR, OTHERWISE)
TEXTS = ("claim", "paper", "why", "system", "title", "group", "paper_setting", "headline")
NEEDED = ("claim", "paper", "measure", "setting", "of", "cells")
KEYS = (
    *(*TEXTS, *SIDES, "cells", "per", "kind", "measure", "setting", "at", "against", "fair", "choices", "assumption"),
    *("differs", "no_source"),
)
# Units of numbers that are metrics unchanged.
COUNTED = ("stages", "GPUs", "GPU days", "TFLOPS")
# Factor from the metric to the unit: of a ratio, of a change or share, of bytes, of seconds.
SCALES = {"x": 1.0, "%": 100.0, "GB": 1e-9, "s": 1.0, "ms": 1e3} | dict.fromkeys(COUNTED, 1.0)
# Units of the metric itself, which is never compared.
BARE = ("GB", "s", "ms", *COUNTED)
# Units of cells by that of a claim, if they differ.
UNITS = {"1": "%", "GPUs of 16": "GPUs"}
# Maximum number of cells in the text on the paper's setting.
SHOWN_CELLS = 4


@dataclass(frozen=True, slots=True)
class Measure:
    """How a number comes out of runs.

    For every workload and model, the mean of a side's configurations counts, or the configuration that is greatest or
    least on average (``pick_of``, ``pick_to``). The two sides are compared seed by seed. Then cases are combined
    (``over``). ``samples`` is for GPU days the cell that states the number of samples.
    """

    metric: Annotated[str, OneOf((*METRICS, *PRODUCTS, ENCODER_STAGES, ENCODER_GPUS, GPU_DAYS))]
    pick_of: Pick = "mean"
    pick_to: Pick = "mean"
    over: Pick = "mean"
    samples: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """Overrides of both sides, and of the situation that they are compared in (``at``); without ``to`` one side."""

    of: Overrides
    to: Overrides = field(default_factory=dict)
    at: Overrides = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClaimSetting:
    """The runs behind a number; of two situations the ratio is the number: the first over the second.

    ``words`` say the setting, and which parts of it were chosen here.
    """

    words: str
    measure: Measure
    common: Overrides
    situations: tuple[Situation, ...]

    @property
    def pairs(self) -> list[list[tuple[str, ...]]]:
        """The sweeps to run: for every situation the numerator, and the denominator if there is one."""
        return [
            [(*self.common.values(), *one.at.values(), *side.values()) for side in (one.of, one.to) if side]
            for one in self.situations
        ]

    @property
    def sweeps(self) -> list[tuple[str, ...]]:
        """The same, one after another."""
        return [side for pair in self.pairs for side in pair]

    @property
    def is_comparison(self) -> bool:
        """Whether two sides or two situations are compared; otherwise the metric itself is the number."""
        return len(self.sweeps) > 1

    def changed(self, change: Change) -> ClaimSetting:
        """The setting with overrides of the same keys replaced, and others added.

        The part that only one side changes of ``common``, the other side keeps.
        """
        everywhere, of, to = (change.get(side, {}) for side in SIDES)
        kept = _without(self.common, everywhere)
        split = {key: text for key, text in kept.items() if key in of or key in to}

        def side(texts: Overrides, own: Overrides) -> Overrides:
            return _without(split | texts, {*everywhere, *own}) | own if texts else {}

        situations = [replace(one, of=side(one.of, of), to=side(one.to, to)) for one in self.situations]
        return replace(self, common=_without(kept, split) | everywhere, situations=tuple(situations))


def fair_setting(published: ClaimSetting, stated: Change, measure: Measure, text: str = "") -> ClaimSetting:
    """The published job, tuned in the same way for both sides.

    The strategies stay, everything else of a strategy, its layout and its device goes. If both sides are one strategy,
    the parts that distinguish them stay. ``stated`` changes the job and names the baseline.
    """
    job = stated.get("common", {})
    common = overrides(FREE) | {key: text for key, text in published.common.items() if _is_job(key)} | job
    situations = tuple(_fair_situation(published.common, one, stated) for one in published.situations)
    return ClaimSetting(f"{text} {FAIR_WORDS}".strip(), measure, common, situations)


def _fair_situation(common: Overrides, published: Situation, stated: Change) -> Situation:
    shared = {key: text for key, text in common.items() if key == STRATEGY or key.startswith(PARTS)}
    both = {"of": shared | published.of, "to": shared | published.to}
    of, to = ((side | stated.get(name, {})).get(STRATEGY, "") for name, side in both.items())

    def may_differ(key: str) -> bool:
        is_of_side = key == STRATEGY or (key.split(".")[0] == "cluster" and not key.startswith(TUNED))
        return is_of_side or (of == to and key.startswith(PARTS))

    sides = {
        name: {key: text for key, text in side.items() if may_differ(key)} | stated.get(name, {})
        for name, side in both.items()
    }
    return Situation(**sides, at={key: text for key, text in published.at.items() if _is_job(key)})


def _is_job(key: str) -> bool:
    """Whether a key is of the training job, not of a strategy, its layout or its tuning."""
    return key != STRATEGY and not key.startswith(TUNED)


def _without(texts: Overrides, keys: Iterable[str]) -> Overrides:
    return {key: text for key, text in texts.items() if key not in {*keys}}


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
class Claim:
    """A published number and how it is measured here.

    Attributes:
        paper, where: arXiv number or another source by its name (``cited``), and the place in it.
        value: the published number, or the ends of a range, in ``unit``; empty for an order.
        unit: ``x`` for a ratio, ``%`` for a change (with ``to``) or a share (without), else that of the metric itself.
        settings: by label. ``PUBLISHED`` is the paper's as far as it states one (in words: ``paper_setting``). ``FAIR``
            is the same job, tuned by one rule for both sides, if there is a baseline. ``OTHERWISE`` is the published
            one with the opposite of the deciding assumption. Others choose values that the paper does not state.
        assumption, opposite: the deciding assumption, and its opposite.
        no_source: whether the number was not found in the paper, so that nothing can be judged.
        why: explanation of agreement or difference.
        cells, per: the published cells that the claim is about, and those that their number is divided by.
        differs: settings of the cells that the runs cannot have (``gpus``, ``model``, ``data``, a key of their
            setting), with the reason.
        group: name of the claims that are shown as one; empty for one that is shown alone.
        title: heading of the claim or of its group; empty: the claim itself.
        headline: short words for a promise of the paper's abstract by this number; empty for other claims.
        file: name of the YAML, without its suffix.
    """

    name: str
    claim: str
    paper: str
    where: str
    kind: Kind
    value: tuple[float, ...]
    unit: str
    paper_setting: str
    settings: Mapping[str, ClaimSetting]
    assumption: str = ""
    opposite: str = ""
    no_source: bool = False
    why: str = ""
    cells: tuple[PublishedCell, ...] = ()
    per: tuple[PublishedCell, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    title: str = ""
    headline: str = ""
    system: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        """Check kind, unit and number against the setting."""
        require(self.unit in SCALES, "unit", self.unit, f"one of {', '.join(SCALES)}")
        require(
            bool(self.value) != (self.kind == Kind.ORDER), "kind", self.kind, "order without a number, and only then"
        )
        compared = self.published.is_comparison
        require(compared if self.unit == "x" else not compared or self.unit == "%", "to", compared, "fit for the unit")

    @property
    def published(self) -> ClaimSetting:
        """The published setting."""
        return self.settings[PUBLISHED]

    @property
    def sweeps(self) -> list[tuple[str, ...]]:
        """All sweeps that have to run, each once."""
        return [*dict.fromkeys(sweep for setting in self.settings.values() for sweep in setting.sweeps)]

    @property
    def heading(self) -> str:
        """The heading of its section, which claims of a group share."""
        return self.title or self.claim

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


def load_claims() -> list[Claim]:
    """Return every claim: by file, then by name; ``UserError`` naming the file and the claim that is malformed."""
    claims = []
    for path in sorted((config_tree() / FOLDER).glob("*.yaml")):
        parsed = [replace(claim, file=path.stem) for claim in read_definitions(path, "claims", parse_claims)]
        claims += sorted(parsed, key=lambda claim: claim.name)
    return claims


def parse_claims(name: str, values: Mapping[str, Any]) -> Iterator[Claim]:
    """The claim of an entry, with ``each`` one a cell, with ``ranges`` one for cells that agree up to a last ``*``."""
    entry = {"group": name, **values}
    cases: dict[str, str] = {}
    for cell in find_cells(flat(entry.pop("each", []))):
        cases[re.sub(r"[^a-z0-9]+", "_", cell.id.lower())] = cell.id
    if pattern := entry.pop("ranges", ""):
        for cell in find_cells([pattern]):
            parts = cell.id.split("-")[: pattern.count("-")]
            cases["_".join([name, *parts[1:]])] = f"{'-'.join(parts)}-*"
    for case, cells in cases.items():
        yield parse_claim(case, {**entry, "cells": cells})
    if not cases:
        yield parse_claim(name, values)


def parse_claim(name: str, values: Mapping[str, Any]) -> Claim:
    """A claim from the plain values of its YAML."""
    check_keys(values, KEYS, NEEDED)
    cells, per = (find_cells(flat(values.get(key, []))) for key in ("cells", "per"))
    values = insert(values, cell_fields(cells[0]))
    published = _published(values)
    # Numbers that are compared with nothing are levels, and so is memory; anything else is a gain.
    level = not published.is_comparison or published.measure.metric == MEMORY
    kind = Kind(values.get("kind", Kind.LEVEL if level else Kind.GAIN))
    value, unit = _value_of_cells(cells, per, kind, bool(published.situations[0].to))
    texts: dict[str, Any] = {key: words(values.get(key, "")) for key in TEXTS}
    shown = "; ".join(cell.words for cell in (*cells, *per)[:SHOWN_CELLS])
    texts["paper_setting"] = f"{shown}. {texts['paper_setting']}".strip()
    settings = {PUBLISHED: published}
    if fair := _fair(values.get("fair"), published):
        settings[FAIR] = fair
    for changes in flat(values.get("choices", [])):
        settings |= {words(label): _changed(published, label, change) for label, change in changes.items()}
    if decides := {**values.get("assumption", {})}:
        check_keys(decides, ("text", "otherwise", *SIDES), ("text", "otherwise"), "assumption: ")
        texts |= {"assumption": words(decides.pop("text")), "opposite": words(decides.pop("otherwise"))}
        settings[OTHERWISE] = _changed(published, "assumption", decides)
    return Claim(
        **texts,
        name=name,
        where="; ".join(dict.fromkeys(cell.place for cell in (*cells, *per))),
        kind=kind if value or kind != Kind.GAIN else Kind.ORDER,
        value=value,
        unit=unit,
        settings=settings,
        no_source=bool(values.get("no_source", False)),
        cells=cells,
        per=per,
        differs={key: words(reason) for key, reason in values.get("differs", {}).items()},
    )


def _value_of_cells(
    cells: Sequence[PublishedCell], per: Sequence[PublishedCell], kind: Kind, relative: bool
) -> tuple[tuple[float, ...], str]:
    """The number of some cells, or the ends of their range, and its unit; no number for an order."""
    if kind == Kind.ORDER:
        return (), "x"
    if per:
        pairs = zip(cells, [*per] * (len(cells) if len(per) == 1 else 1), strict=True)
        numbers = [cell.value / other.value for cell, other in pairs if cell.value and other.value]
        unit = "x"
    else:
        numbers = [end for cell in cells for end in _ends(cell, kind, relative)]
        units = {UNITS.get(cell.unit, cell.unit) for cell in cells} if numbers else {"x"}
        require(len(units) == 1, "cells", ", ".join(sorted(units)), "of one unit")
        unit = units.pop()
    return (tuple(dict.fromkeys((min(numbers), max(numbers)))) if numbers else ()), unit


def _ends(cell: PublishedCell, kind: Kind, relative: bool) -> list[float]:
    """The number of a cell, or its bounds, in the claim's unit and direction."""
    ends = [cell.high] if kind == Kind.LIMIT and cell.high else [cell.value]
    if cell.value is None and kind == Kind.LEVEL:
        ends = [cell.low, cell.high]
    scale = 100.0 if cell.unit == "1" else 1.0
    sign = -1.0 if relative and cell.metric.endswith("_reduction") else 1.0
    return [sign * scale * end for end in ends if end is not None]


def _published(values: Mapping[str, Any]) -> ClaimSetting:
    """The published setting; each system is tuned as published if the strategy has this option."""
    common, of, to, at = (overrides(values.get(key, [])) for key in (*SIDES, "at"))
    situations = [Situation(of, to, at)]
    if against := values.get("against"):
        check_keys(against, ("at", "of", "to"), where="against: ")
        other: dict[str, Any] = {"at": {}} | {key: overrides(texts) for key, texts in against.items()}
        situations.append(replace(situations[0], **other))
    common = overrides("tuning=own") | common
    return ClaimSetting(words(values["setting"]), _measure(values["measure"]), common, tuple(situations))


def _fair(stated: Mapping[str, Any] | None, published: ClaimSetting) -> ClaimSetting | None:
    """The fair setting of a claim that states one; None without a baseline."""
    if stated is None or not (published.situations[0].to or stated.get("to")):
        return None
    check_keys(stated, ("setting", "measure", *SIDES), where="fair: ")
    usual = {"metric": "iteration_time_s"} if published.measure.metric == "core_time_s" else {}
    measure = _measure(stated.get("measure", usual), published.measure)
    change = {side: overrides(stated[side]) for side in SIDES if side in stated}
    return fair_setting(published, change, measure, words(stated.get("setting", "")))


def _measure(values: Mapping[str, Any] | str, usual: Measure | None = None) -> Measure:
    """A measure from its metric, or from a mapping; keys that it omits are those of ``usual``."""
    stated = {"metric": values} if isinstance(values, str) else values
    return parse(Measure, {**(asdict(usual) if usual else {}), **stated}, "measure")


def _changed(published: ClaimSetting, label: str, values: Mapping[str, Any]) -> ClaimSetting:
    check_keys(values, SIDES, where=f"{label}: ")
    return published.changed({side: overrides(texts) for side, texts in values.items()})
