"""Configurations as flat mappings: parameters as text, and changed values inside of choices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices
from entrain_bench.records.keys import COSMETIC_KEYS

# Texts of a group's parameters that are held: a sweep's runs share most.
MAX_TEXTS = 4096
# The column of ``table.csv``.
VARIANT = "variant"
# Groups whose parameters have no column of their own.
GROUPS = ("model", "cluster")


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of a configuration by their dotted paths."""
    if isinstance(node, Mapping):
        leaves: dict[str, Any] = {}
        for key, value in node.items():
            leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return leaves
    if isinstance(node, list | tuple) and any(isinstance(value, Mapping) for value in node):
        return flatten({str(index): value for index, value in enumerate(node)}, prefix)
    return {prefix: node}


def parameters_text(node: Mapping[str, Any]) -> str:
    """The parameters of a group as one text, by their paths."""
    return _parameters_text(json.dumps(node))


@lru_cache(maxsize=MAX_TEXTS)
def _parameters_text(text: str) -> str:
    node = json.loads(text)
    said = {key: value for key, value in node.items() if key != "name" and key not in COSMETIC_KEYS}
    leaves = flatten(said)
    return " ".join(f"{path}={json.dumps(value)}" for path, value in sorted(leaves.items()) if "_target_" not in path)


def setting_text(value: Any) -> Any:
    """Write lists as ``a+b``, mappings as ``a=2.0 b=8`` without factors of 1.0, and other values unmodified."""
    if isinstance(value, Mapping):
        inner = {name: setting_text(one) for name, one in value.items() if not (isinstance(one, float) and one == 1.0)}
        return " ".join(f"{name}={text}" for name, text in inner.items())
    return "+".join(value) if isinstance(value, list) else value


def variant_text(config: Mapping[str, Any]) -> str:
    """Return paths and values inside of model and cluster that differ from the YAML of that name.

    Empty if nothing is changed, or if no YAML of the suite has the name, because the name then shows the change.
    """
    groups = ((group, json.dumps(config.get(group, {}), sort_keys=True)) for group in GROUPS)
    return " ".join(change for group, text in groups for change in _changes(group, text))


@lru_cache(maxsize=1024)
def _changes(group: str, text: str) -> tuple[str, ...]:
    """The changed paths of a group, in the order of the YAML, and their values."""
    values = json.loads(text)
    name = values.get("name", "")
    if name not in choices(group):
        return ()
    changed = flatten(values)
    # The form that JSON gives back.
    chosen = flatten(json.loads(json.dumps(getattr(compose(f"{group}={name}"), group))))
    return tuple(
        f"{group}.{path}={json.dumps(changed[path]) if path in changed else 'absent'}"
        for path in dict.fromkeys((*chosen, *changed))
        if COSMETIC_KEYS.isdisjoint(path.split(".")) and changed.get(path, ...) != chosen.get(path, ...)
    )
