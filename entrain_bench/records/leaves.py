"""Configurations as flat mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
