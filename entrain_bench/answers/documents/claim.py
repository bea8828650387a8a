"""A published claim: the cells that it names, the settings in which it is measured here, and their agreement."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from entrain_bench.answers.documents.definition import (
    check_keys,
    flat,
    insert,
    override_value,
    overrides,
    read_definitions,
    words,
)
from entrain_bench.answers.documents.published import PublishedCell, cell_fields, find_cells, our_names
from entrain_bench.answers.documents.sides import (
    MEMORY,
    SIDES,
    ClaimSetting,
    Measure,
    Situation,
    fair_setting,
)
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.specs.parse import parse

FOLDER = "claim"
TEXTS = ("claim", "paper", "why", "system", "title", "group", "where", "paper_setting")
# Keys that a claim without cells states, and a claim with cells takes from them.
FROM_CELLS = ("value", "unit", "where")
NEEDED = ("claim", "paper", "measure", "setting", "of")
KEYS = (
    *(*TEXTS, *FROM_CELLS, *SIDES, "cells", "each", "ranges", "per", "kind", "measure", "setting", "at", "against"),
    *("fair", "choices", "assumption", "differs", "no_source"),
)
# Units of numbers that are metrics unchanged.
COUNTED = ("stages", "GPUs", "GPU days", "TFLOPS")
# Factor from the metric to the unit: of a ratio, of a change or share, of bytes, of seconds.
SCALES = {"x": 1.0, "%": 100.0, "GB": 1e-9, "s": 1.0, "ms": 1e3} | dict.fromkeys(COUNTED, 1.0)
# Units of the metric itself, which is never compared.
BARE = ("GB", "s", "ms", *COUNTED)
# Units of cells by that of a claim, if they differ.
UNITS = {"1": "%", "GPUs of 16": "GPUs"}
# At most so many cells are in the text on the paper's setting.
SHOWN_CELLS = 4

# The cluster of a run without further overrides.
DEFAULT_CLUSTER = "a40x64"
# Keys of a cell's setting by the configuration key that states them.
SETTINGS = {
    "global_batch": "global_batch",
    "microbatch_size": "microbatch_size",
    "seq_len": "workload.sequence_tokens",
    "vision_share": "workload.vision_share",
    "encoder_stages": "strategy.planner.encoder_stages",
    "enc_tp": "strategy.planner.encoder_tp",
}
DEGREES = ("tp", "cp", "pp", "dp")


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
        unit: ``x`` for a ratio, ``%`` for a change (with ``to``) or a share (without), one of ``BARE`` for the metric
            itself.
        paper_setting: the setting as the paper states it, in words.
        published: the paper's setting as far as it is stated.
        fair: the same job, tuned by one rule for both sides; None for a number without a baseline.
        assumption, opposite, otherwise: the assumption that decides, its opposite, and the published setting with the
            opposite; None if nothing was toggled.
        choices: the published setting with other values of what the paper does not state, by label.
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
    assumption: str = ""
    opposite: str = ""
    otherwise: ClaimSetting | None = None
    choices: Mapping[str, ClaimSetting] = field(default_factory=dict)
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
        require(self.unit in SCALES, "unit", self.unit, f"one of {', '.join(SCALES)}")
        require(self.unit not in BARE or not self.published.situations[0].to, "to", "given", f"empty for {self.unit}")
        is_order = self.kind == Kind.ORDER
        require(bool(self.value) != is_order, "kind", str(self.kind), "order without a number, and only then")
        is_ratio = self.unit == "x"
        require(not is_ratio or self.published.is_comparison, "to", [], "given for a ratio, or at and against")
        bare = bool(self.value) and len(self.published.situations) == 1
        require(is_ratio or bare, "unit", self.unit, "x for an order and two situations")
        is_gain = self.kind != Kind.GAIN or float(is_ratio) not in self.value
        require(is_gain, "value", list(self.value), "a gain or a loss, or null for an order")

    @property
    def settings(self) -> list[ClaimSetting]:
        """All settings that have to run."""
        return [one for one in (self.published, *self.choices.values(), self.fair, self.otherwise) if one]

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
    for case, stated in (cases or {name: values}).items():
        claim = parse_claim(case, stated, config_dir)
        if wrong := mismatches(claim):
            raise UserError("; ".join(wrong))
        yield claim


def parse_claim(name: str, values: Mapping[str, Any], config_dir: str | None = None) -> Claim:
    """A claim from the plain values of its YAML, which may name published cells of the user's folder."""
    cells, per = (_cells(values.get(key, []), config_dir) for key in ("cells", "per"))
    check_keys(values, KEYS, NEEDED if cells else (*NEEDED, "where", "value", "paper_setting"))
    values = insert(values, cell_fields(cells[0], config_dir) if cells else {})
    published = _published(values)
    # Numbers that are compared with nothing are levels, and so is memory; anything else is a gain.
    level = not published.is_comparison or published.measure.metric == MEMORY
    stated = values.get("kind", Kind.LEVEL if level else Kind.GAIN)
    require(stated in [*Kind], "kind", stated, f"one of {', '.join(Kind)}")
    kind = Kind(stated)
    if cells:
        for key in FROM_CELLS:
            require(key not in values, key, values.get(key), "left out; the cells state it")
        value, unit = _value_of_cells(cells, per, kind, bool(published.situations[0].to))
    else:
        value = tuple(float(number) for number in flat(values["value"]) if number is not None)
        unit = values.get("unit", "x")
    texts: dict[str, Any] = {key: words(values.get(key, "")) for key in TEXTS}
    texts["where"] = texts["where"] or "; ".join(dict.fromkeys(cell.place for cell in (*cells, *per)))
    shown = "; ".join(cell.words for cell in (*cells, *per)[:SHOWN_CELLS])
    texts["paper_setting"] = f"{shown}. {texts['paper_setting']}".strip() if shown else texts["paper_setting"]
    other = {label: change for listed in flat(values.get("choices", {})) for label, change in listed.items()}
    claim = Claim(
        **texts,
        name=name,
        kind=Kind.ORDER if kind == Kind.GAIN and not value else kind,
        value=value,
        unit=unit,
        published=published,
        fair=_fair(values.get("fair"), published),
        choices={words(label): _changed(published, label, change) for label, change in other.items()},
        no_source=bool(values.get("no_source", False)),
        cells=cells,
        per=per,
        differs={key: words(reason) for key, reason in values.get("differs", {}).items()},
        config_dir=config_dir,
    )
    if "assumption" not in values:
        return claim
    decides = {**values["assumption"]}
    check_keys(decides, ("text", "otherwise", *SIDES), ("text", "otherwise"), "assumption: ")
    said: dict[str, Any] = {
        key: words(decides.pop(text)) for key, text in (("assumption", "text"), ("opposite", "otherwise"))
    }
    return replace(claim, **said, otherwise=_changed(published, "assumption", decides))


def _cells(patterns: Any, config_dir: str | None) -> tuple[PublishedCell, ...]:
    return find_cells([*flat(patterns)], config_dir)


def _value_of_cells(
    cells: Sequence[PublishedCell], per: Sequence[PublishedCell], kind: Kind, relative: bool
) -> tuple[tuple[float, ...], str]:
    """The number of some cells, or the ends of their range, and its unit; no number if no cell has one."""
    unit = "x"
    numbers: list[float | None] = []
    if per and kind != Kind.ORDER:
        pairs = zip(cells, [*per] * (len(cells) if len(per) == 1 else 1), strict=True)
        numbers = [cell.value / other.value for cell, other in pairs if cell.value and other.value]
    elif kind != Kind.ORDER:
        for cell in cells:
            ends = [cell.high] if kind == Kind.LIMIT and cell.high else [cell.value]
            if cell.value is None and kind == Kind.LEVEL:
                ends = [cell.low, cell.high]
            scale = 100.0 if cell.unit == "1" else 1.0
            sign = -1.0 if relative and cell.metric.endswith("_reduction") else 1.0
            numbers += [None if end is None else sign * scale * end for end in ends]
        units = {UNITS.get(cell.unit, cell.unit) for cell in cells}
        require(len(units) == 1 or not any(numbers), "cells", ", ".join(sorted(units)), "of one unit")
        unit = units.pop() if any(numbers) else unit
    known = [number for number in numbers if number is not None]
    return tuple(dict.fromkeys((min(known), max(known)))) if known else (), unit


def _published(values: Mapping[str, Any]) -> ClaimSetting:
    """The published setting; each system is tuned as it was published if strategies can be told to."""
    common, of, to, at = (overrides(values.get(key, [])) for key in (*SIDES, "at"))
    require(bool(of), "of", "[]", "the overrides of the runs in the numerator")
    situations = [Situation(of, to, at)]
    against = values.get("against")
    require(bool(against) or not at, "against", against, "given with at")
    if against:
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
    """A measure from its metric, or from a mapping; what it leaves out is that of ``usual``."""
    stated = {"metric": values} if isinstance(values, str) else values
    return parse(Measure, {**(asdict(usual) if usual else {}), **stated}, "measure")


def _changed(published: ClaimSetting, label: str, values: Mapping[str, Any]) -> ClaimSetting:
    check_keys(values, SIDES, where=f"{label}: ")
    require(any(values.values()), label, "{}", "overrides that make a difference")
    return published.changed({side: overrides(texts) for side, texts in values.items()})


def num_gpus(sweep: Sequence[str]) -> int:
    """GPUs of the cluster that overrides choose."""
    texts = overrides(sweep)
    cluster = _cluster(_cluster_name(sweep))
    return int(cluster["gpus_per_node"]) * int(
        override_value(texts.get("cluster.num_nodes", "")) or cluster["num_nodes"]
    )


def device_memory_bytes(sweep: Sequence[str]) -> float:
    """Memory of a device of the cluster that overrides choose, as its YAML states it; they may change it."""
    return float(_cluster(_cluster_name(sweep))["device"]["memory_bytes"])


def _cluster_name(sweep: Sequence[str]) -> str:
    return override_value(overrides(sweep).get("cluster", "")) or DEFAULT_CLUSTER


@cache
def _cluster(name: str) -> Mapping[str, Any]:
    if name not in choices("cluster"):
        raise unknown_choice("cluster", name, choices("cluster"))
    return compose(f"cluster={name}").cluster


def mismatches(claim: Claim) -> list[str]:
    """Return a line for each statement of its cells that a claim's published setting contradicts.

    What the setting cannot have is named in ``differs``. It is a mismatch to name there what does not differ.
    """
    differences = dict(_differences(claim)) if claim.cells else {}
    lines = [text for key, text in differences.items() if key not in claim.differs]
    same = [key for key in claim.differs if claim.cells and key not in differences]
    return lines + [f"differs.{key}: the setting has what the cells state" for key in same]


def _differences(claim: Claim) -> Iterator[tuple[str, str]]:
    """Contradictions to the published setting (GPUs, model, data, configuration keys), in words."""
    cells = (*claim.cells, *claim.per)
    sweeps = claim.published.sweeps
    sides = [{key: override_value(text) for key, text in overrides(sweep).items()} for sweep in sweeps]
    clusters = [DEFAULT_CLUSTER, *choices("cluster")]
    numbers = sorted({num_gpus(sweep) for sweep in sweeps if _cluster_name(sweep) in clusters})
    allowed = [limits for cell in cells for limits in _gpus(cell.gpus)]
    if allowed and not all(any(low <= number <= high for low, high in allowed) for number in numbers):
        texts = ", ".join(dict.fromkeys(cell.gpus for cell in cells if cell.gpus))
        yield "gpus", f"cluster: {', '.join(map(str, numbers))} GPUs, the cells say {texts}"
    names = our_names(claim.config_dir)
    for key, group, chosen in (("model", "models", "model"), ("data", "data", "workload")):
        theirs = sorted({getattr(cell, key) for cell in cells} - {""})
        lacking = [text for text in theirs if text not in names[group]]
        ours = {name for side in sides if chosen in side for name in side[chosen].split(",")}
        if lacking:
            yield key, f"{key}: {', '.join(lacking)} has no name of ours (names.yaml)"
        elif theirs and not ours <= {name for text in theirs for name in names[group][text]}:
            yield key, f"{chosen}={','.join(sorted(ours))}: the cells say {', '.join(theirs)}"
    first = cells[0]
    plain = {key: str(value) for key, value in cell_fields(first, claim.config_dir).items() if key in first.setting}
    compared = sides if len(claim.published.situations) == 1 else []
    for index, side in enumerate(compared):
        for key, text in _stated(plain, of=index == 0):
            if key in side and not _same(side[key], text):
                yield key, f"{key}={side[key]}: {first.id} states {text}"


def _gpus(text: str) -> list[tuple[int, int]]:
    """Numbers of GPUs that a cell allows, as ranges; none if it states none."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return [(numbers[0], numbers[-1])] if " to " in text else [(number, number) for number in numbers]


def _stated(plain: Mapping[str, str], of: bool) -> Iterator[tuple[str, str]]:
    """Configuration keys that a cell's setting states of one side, with their values."""
    if of:
        yield from ((ours, plain[theirs]) for theirs, ours in SETTINGS.items() if theirs in plain)
    has_base = any(key.startswith("base_") for key in plain)
    prefixes = ("", "llm_", "shared_") if of else ("base_llm_", "base_shared_") if has_base else ("",)
    for degree in DEGREES:
        yield from ((f"layout.{degree}", plain[key]) for prefix in prefixes if (key := f"{prefix}{degree}") in plain)


def _same(ours: str, theirs: str) -> bool:
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return ours in (theirs, "null")
