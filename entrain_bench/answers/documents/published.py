"""Published numbers of papers, cell by cell (``experiments/published``)."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import yaml

from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.tree import config_tree

FOLDER = "published"
NAMES = "names.yaml"
NOTES = "notes"
# Sizes of the papers' nodes.
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCell:
    """One number of a paper, or one word that stands where a number could: a row of a CSV.

    Attributes:
        source: name of the CSV, without its suffix.
        where: table and row, figure and panel, or section.
        system, baseline: the system of the number, and for a ratio or gain the system it is compared with.
        gpus: GPUs of the number; ``256/264`` is baseline / system.
        value, printed: the number in ``unit``, None if the cell holds a word; the number as printed.
        low, high: bounds of a value from an axis, in ``unit``.
        how: how a number was obtained: R read, F in a figure, A from an axis, I inferred from other cells, S from a
            secondary source.
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
    def place(self) -> str:
        """Table, figure or section, and whether only notes of others have the number."""
        return f"{self.where} ({NOTES} of others)" if self.how == "S" and NOTES not in self.where else self.where

    @property
    def words(self) -> str:
        """The setting as a paper's table would say it."""
        number = f"{self.printed} {self.unit} ({self.system or 'paper'})" if self.printed else ""
        gpus = f"{self.gpus} {self.gpu_type} GPUs".replace("  ", " ") if self.gpus else self.gpu_type
        setting = [f"{key.replace('_', ' ')} {value}" for key, value in self.setting.items()]
        return ", ".join(filter(None, (number, self.model, self.data, gpus, *setting)))


@cache
def published_cells() -> Mapping[str, PublishedCell]:
    """Every cell by its id."""
    cells: dict[str, PublishedCell] = {}
    for path in sorted((config_tree() / FOLDER).glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            cells |= {row["id"]: _cell(path.stem, row) for row in csv.DictReader(file)}
    return cells


def _cell(source: str, row: Mapping[str, str]) -> PublishedCell:
    pairs = [text.partition("=") for text in row["setting"].split(";") if text]
    setting = {key.strip(): value.strip() for key, _, value in pairs}
    numbers: dict[str, Any] = {key: _number(row[key]) for key in ("value", "low", "high")}
    return PublishedCell(**{**row, **numbers, "source": source, "setting": setting, "printed": row["value"]})


def _number(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def find_cells(patterns: Iterable[str]) -> tuple[PublishedCell, ...]:
    """The cells of some ids, in order; a pattern (``*``, ``?``) means all cells with a number that it matches.

    ``UserError`` for an unknown id, and a pattern without any cell.
    """
    cells = published_cells()
    chosen: dict[str, PublishedCell] = {}
    for pattern in patterns:
        matches = {name: one for name, one in cells.items() if one.value is not None and fnmatchcase(name, pattern)}
        if pattern not in cells and not matches:
            raise unknown_choice("cells", pattern, cells)
        chosen |= {pattern: cells[pattern]} if pattern in cells else matches
    return tuple(chosen.values())


@cache
def our_names() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Models and data of the papers by our names: ``models`` and ``data``."""
    stated = yaml.safe_load((config_tree() / FOLDER / NAMES).read_text())
    return {
        group: {str(name): (ours,) if isinstance(ours, str) else tuple(ours) for name, ours in names.items()}
        for group, names in stated.items()
    }


def cell_fields(cell: PublishedCell) -> dict[str, Any]:
    """Return a cell's fields for its claim: ``value``, ``gpus``, ``nodes``, our ``model`` and ``workload``, settings.

    Numbers of the setting are plain (``8K`` is 8192, ``50%`` is 0.5); ``full`` recomputation is the module's name, none
    is empty. As printed they have the suffix ``_text``. With two numbers of GPUs the baseline's have the prefix
    ``base_``.
    """
    fields: dict[str, Any] = {"cell": cell.id, "value": cell.printed}
    fields |= {f"their_{name}": getattr(cell, name) for name in ("model", "data", "system", "baseline", "metric")}
    for key, text in cell.setting.items():
        fields |= {key: _plain(key, text), f"{key}_text": text}
    if re.fullmatch(r"\d+(/\d+)*", cell.gpus):
        gpus = [int(number) for number in cell.gpus.split("/")]
        for prefix, number in (("base_", gpus[0]), ("", gpus[-1])):
            fields |= {f"{prefix}gpus": number, f"{prefix}nodes": number // GPUS_PER_NODE}
    names = our_names()
    ours = {"model": names["models"].get(cell.model), "workload": names["data"].get(cell.data)}
    return fields | {key: ",".join(known) for key, known in ours.items() if known}


def _plain(key: str, text: str) -> Any:
    if key.endswith("_recompute"):
        module = "vision" if key.startswith("enc_") else "llm"
        return {"none": "", "full": module}.get(text, text)
    if thousands := re.fullmatch(r"(\d+)K", text):
        return int(thousands[1]) * 1024
    if percent := re.fullmatch(r"(\d+(?:\.\d+)?)%", text):
        return float(percent[1]) / 100
    return text
