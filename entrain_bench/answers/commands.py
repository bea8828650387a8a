"""Command lines that make records again: of the overrides and the folder that the records say they were made of."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.config.compose import SWEEP_KEYS
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import ASIDE
from entrain_bench.config.tree import config_tree
from entrain_bench.records.leaves import flatten
from entrain_bench.records.records import Record

COMMAND = "entrain-bench"
RESULTS_DIR = "results"
_FIGURE = "figure"
# Texts that Hydra takes without quotes.
PLAIN = re.compile(r"[\w/.-]+", re.ASCII)
# Values of every key, all combinations of which are cells.
type Block = Sequence[Sequence[str]]


def command_line(arguments: Sequence[str], config_dir: str | None = None) -> str:
    """A command as a shell takes it, with the user's folder if there is one."""
    folder = ["--config-dir", config_dir] if config_dir else []
    return shlex.join([COMMAND, *arguments, *folder])


def sweep_command(overrides: Sequence[str], config_dir: str | None = None) -> str:
    """The command that runs a sweep."""
    return command_line(["--multirun", *overrides], config_dir)


def commands_of(records: Iterable[Record], results_dir: str | Path = RESULTS_DIR) -> list[str]:
    """Command lines that give exactly the keys of some records, in order of appearance.

    Cells whose values are a full product become one ``--multirun`` line. Relative paths are those of the records.
    """
    where = results_word(str(results_dir))
    groups: dict[tuple[str, tuple[str, ...]], dict[tuple[str, ...], None]] = {}
    for record in records:
        values = decisive_overrides(record.overrides, record.config_dir)
        groups.setdefault((record.config_dir, tuple(values)), {})[tuple(values.values())] = None
    lines = []
    for (folder, keys), cells in groups.items():
        for block in _blocks([*cells]):
            # Each text begins with = unless the key is only removed.
            words = [
                f"{key}{texts[0]}" if len(texts) == 1 else f"{key}={','.join(text[1:] or "''" for text in texts)}"
                for key, texts in zip(keys, block, strict=True)
            ]
            several = ["--multirun"] if prod(map(len, block)) > 1 else []
            lines.append(command_line([*several, *words, *where], folder))
    return lines


def results_word(results_dir: str) -> list[str]:
    """The override that names a folder of results; nothing for the default one."""
    return [] if results_dir == RESULTS_DIR else [f"results_dir={quoted(results_dir)}"]


def decisive_overrides(overrides: Sequence[str], config_dir: str = "") -> dict[str, str]:
    """Return the overrides that decide a run, by key, each value as Hydra reads it; the last one of a key counts.

    Keys that say where results go, which runs are retried and how a sweep is launched are left out. ``figure=`` names a
    sweep, whose values the other overrides hold; values that its YAML sets for single runs come first.
    """
    values: dict[str, str] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if key == _FIGURE:
            values = {**_set_by_figure(value, config_dir), **values}
        elif not key.lstrip("+~").startswith((f"{_FIGURE}.", "hydra")) and key.lstrip("+") not in ASIDE:
            values.pop(key, None)
            values[key] = text[len(key) :]
    return values


def quoted(value: Any) -> str:
    """A plain value as Hydra's grammar has it."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(quoted, value)) + "]"
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else repr(value)
    if PLAIN.fullmatch(value) and parse(f"key={value}").value() == value:
        return value
    # Backslashes before a quote are doubled, the quote escaped.
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", escaped) + "'"


def _blocks(cells: Sequence[tuple[str, ...]]) -> Iterator[Block]:
    """Products of values that are exactly some cells, split by the first key that has several values."""
    columns = [[*dict.fromkeys(values)] for values in zip(*cells, strict=True)]
    if prod(map(len, columns)) == len(cells):
        yield columns
        return
    place, values = next((place, values) for place, values in enumerate(columns) if len(values) > 1)
    for value in values:
        yield from _blocks([cell for cell in cells if cell[place] == value])


@cache
def _set_by_figure(name: str, config_dir: str) -> Mapping[str, str]:
    """Return overrides for single runs from a figure's YAML, by key; usually empty."""
    folders = [config_tree(), *([Path(config_dir)] if config_dir else [])]
    files = (folder / _FIGURE / f"{name}.yaml" for folder in folders)
    values = next((yaml.safe_load(file.read_text()) or {} for file in files if file.is_file()), {})
    stated = {}
    for entry in values.get("defaults", ()):
        for group, choice in entry.items() if isinstance(entry, dict) else ():
            stated[str(group).removeprefix("override").strip().lstrip("/")] = f"={choice}"
    settings = {key: value for key, value in values.items() if key not in {*SWEEP_KEYS, "defaults"}}
    return stated | {path: f"={quoted(value)}" for path, value in flatten(settings).items()}
