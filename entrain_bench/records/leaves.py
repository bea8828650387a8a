"""Configurations as flat mappings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from entrain_bench.records.keys import COSMETIC_KEYS

# Texts of a group's parameters that are held: a sweep's runs share most.
MAX_TEXTS = 4096


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
    leaves = {path: value for path, value in flatten(node).items() if path != "name" and path not in COSMETIC_KEYS}
    return " ".join(f"{path}={json.dumps(value)}" for path, value in sorted(leaves.items()) if "_target_" not in path)


def setting_text(value: Any) -> Any:
    """Write lists as ``a+b``, factors other than 1 as ``a=2.0``, and other values unmodified."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={factor}" for name, factor in value.items() if factor != 1)
    return "+".join(value) if isinstance(value, list) else value
