"""Tables of pages that come from the configuration alone: keys of a run, strategies, constants of clusters."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import yaml

from entrain_bench.answers import support
from entrain_bench.answers.labels import strategy_facts
from entrain_bench.answers.text import markdown_table
from entrain_bench.config.comments import documented_keys
from entrain_bench.config.tree import config_tree

# Devices and nodes of the tables, by the names of their YAMLs; others are printed by ``--help=cluster/device/NAME``.
DEVICES = ("a40", "a100", "h100", "h200")
NODES = ("a40", "a100", "hopper", "h800")
# Keys of a tier that are no constants.
NAMES = ("name", "num_ranks")


def listings() -> dict[str, str]:
    """The tables by their names on pages."""
    tables = {
        "keys": keys_table(),
        "strategies": strategies_table(),
        "devices": devices_table(),
        "links": links_table(),
    }
    supported = {"support_families": support.families_table(), "support_devices": support.devices_table()}
    return tables | {name: markdown_table(*table) for name, table in supported.items()}


def keys_table() -> str:
    """Every key of a run with its default and its comment."""
    rows = [[f"`{key.name}`", f"`{key.default}`", key.comment] for key in documented_keys()]
    return markdown_table(["key", "default", "meaning"], rows)


def strategies_table() -> str:
    """Every strategy with its page and its summary."""
    rows = [[f"[{each.name}]({each.page})", each.family, each.summary] for each in strategy_facts()]
    return markdown_table(["strategy", "family", "idea"], rows)


def devices_table() -> str:
    """Constants of devices, and how each was obtained."""
    devices = [_part("device", name)["device"] for name in DEVICES]
    sources = _sources()
    constants = [name for name in devices[0] if name != "name"]
    rows = [
        [f"`{constant}`", sources[devices[0]["name"], constant]["unit"], *(_stated(each, constant) for each in devices)]
        for constant in constants
    ]
    return markdown_table(["constant", "unit", *(str(each["name"]) for each in devices)], rows)


def _stated(device: Mapping[str, Any], constant: str) -> str:
    """A constant's value and how it was obtained."""
    return f"{_number(device[constant])} {_sources()[str(device['name']), constant]['obtained']}"


def links_table() -> str:
    """Constants of the links of nodes, and their sources."""
    sources = _sources()
    rows = []
    for name in NODES:
        for tier in _part("node", name)["tiers"]:
            for constant in (key for key in tier if key not in NAMES):
                source = sources[f"node/{name}", f"{tier['name']}.{constant}"]
                value = f"{_number(tier[constant])} {source['obtained']}"
                rows.append([name, str(tier["name"]), f"`{constant}`", value, source["source"]])
    return markdown_table(["node", "tier", "constant", "value", "source"], rows)


def _part(group: str, name: str) -> dict[str, Any]:
    """A device or node as its YAML states it, over the one that it is based on."""
    content: dict[str, Any] = yaml.safe_load((config_tree() / "cluster" / group / f"{name}.yaml").read_text())
    for base in content.pop("defaults", []):
        content = {key: _part(group, base)[key] | value for key, value in content.items()}
    return content


def _number(value: Any) -> str:
    return re.sub(r"e\+?(-?)0?", r"e\1", f"{float(value):.4g}")


@cache
def _sources() -> dict[tuple[str, str], dict[str, str]]:
    """Rows of ``sources.csv`` by part and constant."""
    with (config_tree() / "cluster" / "sources.csv").open(newline="") as file:
        rows: Iterable[dict[str, str]] = csv.DictReader(file)
        return {(row["part"], row["constant"]): row for row in rows}
