"""Published numbers: what papers print, cell by cell (``experiments/published``)."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.tree import config_tree

FOLDER = "published"
NAMES = "names.yaml"
GROUPS = ("models", "data")
KINDS = ("time", "throughput", "ratio", "memory", "count", "std", "share", "loss", "mfu", "setting")
# How a number was obtained: read, in a figure, from an axis, inferred from other cells, from a secondary source.
HOW = ("R", "F", "A", "I", "S")
SECONDARY = "S"
NOTES = "notes"
# Sizes of the papers' nodes.
GPUS_PER_NODE = 8
_THOUSANDS = re.compile(r"(\d+)K")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True)
class PublishedCell:
    """One number of a paper, or one word that stands where a number could.

    Attributes:
        id: stable name.
        source: name of the CSV, without its suffix.
        where: table and row, figure and panel, or section.
        system, baseline: the system of the number, and for a ratio or gain the system it is compared with.
        model, data: as the paper writes them.
        gpus, gpu_type: GPUs of the number; ``256/264`` is baseline / system.
        setting: degrees, batch, tokens and other keys, as the paper writes them.
        value: the number in ``unit``; None if the cell holds a word.
        printed: the number as printed.
        kind: one of ``KINDS``.
        how: one of ``HOW``.
        low, high: bounds of a value from an axis, in ``unit``.
        note: misprints, contradictions, inferences.
    """

    id: str
    source: str
    where: str
    system: str
    baseline: str
    model: str
    data: str
    gpus: str
    gpu_type: str
    setting: Mapping[str, str]
    metric: str
    value: float | None
    printed: str
    unit: str
    kind: str
    how: str
    low: float | None
    high: float | None
    note: str

    @property
    def numbers_of_gpus(self) -> tuple[int, ...]:
        """GPUs of the baseline and of the system, or their one number; empty if none or no single number is stated."""
        return tuple(map(int, self.gpus.split("/"))) if re.fullmatch(r"\d+(/\d+)*", self.gpus) else ()

    @property
    def place(self) -> str:
        """Table, figure or section, and whether only notes of others have the number."""
        return self.where if self.how != SECONDARY or NOTES in self.where else f"{self.where} ({NOTES} of others)"

    @property
    def words(self) -> str:
        """The setting as a paper's table would say it."""
        gpus = f"{self.gpus} {self.gpu_type} GPUs".replace("  ", " ") if self.gpus else self.gpu_type
        setting = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in self.setting.items())
        parts = [
            f"{self.printed} {self.unit} ({self.system or 'paper'})" if self.printed else "",
            self.model,
            self.data,
        ]
        return ", ".join(part for part in (*parts, gpus, setting) if part)


@cache
def published_cells(config_dir: str | None = None) -> Mapping[str, PublishedCell]:
    """Every cell by its id, those in a folder of the user's included.

    Raises:
        UserError: naming file and line, for a kind, a source of the value or a number that cannot be, and for an id
            that another cell has.
    """
    found: dict[str, PublishedCell] = {}
    for path in (path for folder in _folders(config_dir) for path in sorted(folder.glob("*.csv"))):
        with path.open(newline="", encoding="utf-8") as file:
            for line, row in enumerate(csv.DictReader(file), 2):
                try:
                    cell = _parsed(path.stem, row)
                    require(cell.id not in found, "id", cell.id, "stated once")
                except (UserError, ValueError) as error:
                    raise UserError(f"{path.name}:{line}: {error}") from error
                found[cell.id] = cell
    return MappingProxyType(found)


def _folders(config_dir: str | None) -> list[Path]:
    return [folder / FOLDER for folder in (config_tree(), *([Path(config_dir)] if config_dir else []))]


def find_cells(patterns: Sequence[str], config_dir: str | None = None) -> tuple[PublishedCell, ...]:
    """The cells of some ids, in order; a pattern (``*``, ``?``) stands for all cells with a number that it matches.

    Raises:
        UserError: for an unknown id, and for a pattern without any cell.
    """
    cells = published_cells(config_dir)
    found: dict[str, PublishedCell] = {}
    for pattern in patterns:
        if pattern in cells:
            found[pattern] = cells[pattern]
            continue
        several = [cell for cell in cells.values() if cell.value is not None and fnmatchcase(cell.id, pattern)]
        if not several:
            raise unknown_choice("cells", pattern, cells)
        found |= {cell.id: cell for cell in several}
    return tuple(found.values())


@cache
def our_names(config_dir: str | None = None) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Models and data of the papers by our names: ``models`` and ``data``; what a user's folder says comes last."""
    found: dict[str, dict[str, tuple[str, ...]]] = {group: {} for group in GROUPS}
    for file in (folder / NAMES for folder in _folders(config_dir)):
        for group, names in ((yaml.safe_load(file.read_text()) or {}) if file.exists() else {}).items():
            require(group in GROUPS, f"{FOLDER}/{NAMES}", group, f"one of {', '.join(GROUPS)}")
            found[group] |= {str(each): (to,) if isinstance(to, str) else tuple(to) for each, to in names.items()}
    return found


def cell_fields(cell: PublishedCell, config_dir: str | None = None) -> dict[str, Any]:
    """Return a cell's fields for its claim: ``value``, ``gpus``, ``nodes``, our ``model`` and ``workload``, settings.

    Numbers of the setting are plain (``8K`` is 8192, ``50%`` is 0.5); ``full`` recomputation is the module's name, none
    is empty. As printed they have the suffix ``_text``. With two numbers of GPUs the baseline's have the prefix
    ``base_``.
    """
    names = our_names(config_dir)
    gpus = cell.numbers_of_gpus
    fields: dict[str, Any] = {
        "cell": cell.id,
        "value": cell.printed,
        "their_model": cell.model,
        "their_data": cell.data,
    }
    fields |= {"their_system": cell.system, "their_baseline": cell.baseline, "their_metric": cell.metric}
    for key, text in cell.setting.items():
        fields |= {key: _plain(key, text), f"{key}_text": text}
    if gpus:
        fields |= {"base_gpus": gpus[0], "base_nodes": gpus[0] // GPUS_PER_NODE}
        fields |= {"gpus": gpus[-1], "nodes": gpus[-1] // GPUS_PER_NODE}
    if cell.model in names["models"]:
        fields["model"] = ",".join(names["models"][cell.model])
    if cell.data in names["data"]:
        fields["workload"] = ",".join(names["data"][cell.data])
    return fields


def _plain(key: str, text: str) -> Any:
    if key.endswith("_recompute"):
        module = {"enc": "vision"}.get(key.split("_")[0], "llm")
        return {"none": "", "full": module}.get(text, text)
    if thousands := _THOUSANDS.fullmatch(text):
        return int(thousands[1]) * 1024
    if percent := _PERCENT.fullmatch(text):
        return float(percent[1]) / 100
    return text


def _parsed(source: str, row: Mapping[str, str]) -> PublishedCell:
    require(row["kind"] in KINDS, "kind", row["kind"], f"one of {', '.join(KINDS)}")
    require(row["how"] in HOW, "how", row["how"], f"one of {', '.join(HOW)}")
    low, high, value = (_number(row[key]) for key in ("low", "high", "value"))
    require(low is None or high is None or low <= high, "low", low, f"at most high={high}")
    pairs = [text.partition("=") for text in row["setting"].split(";") if text]
    setting = {key.strip(): value.strip() for key, _, value in pairs}
    texts = {key: row[key] for key in _TEXTS}
    return PublishedCell(source=source, setting=setting, value=value, printed=row["value"], low=low, high=high, **texts)


_TEXTS = (
    *("id", "where", "system", "baseline", "model", "data", "gpus", "gpu_type"),
    *("metric", "unit", "kind", "how", "note"),
)


def _number(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
