"""Layouts as plain values and as text, for other processes and later ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from entrain_bench.program.layout import Layout, ModuleLayout


def layout_values(layout: Layout) -> dict[str, Any]:
    """A layout as plain values, complete and comparable: its fields, and those of each module under ``modules``."""
    modules = [
        {f.name: getattr(module, f.name) for f in fields(ModuleLayout)}
        | {"layers_per_stage": [*module.layers_per_stage], "ranks": module.ranks.tolist()}
        for module in layout.modules
    ]
    rest = {f.name: getattr(layout, f.name) for f in fields(Layout) if f.init and f.name != "modules"}
    return {"modules": modules, **rest}


def layout_of_values(values: Mapping[str, Any]) -> Layout:
    """The layout that ``layout_values`` wrote."""
    rest = {name: value for name, value in values.items() if name != "modules"}
    return Layout(tuple(_module_layout(module) for module in values["modules"]), **rest)


def layout_to_json(layout: Layout) -> str:
    """A layout as text, complete and comparable."""
    return json.dumps(layout_values(layout), sort_keys=True)


def layout_from_json(text: str) -> Layout:
    """The layout that ``layout_to_json`` wrote."""
    return layout_of_values(json.loads(text))


def _module_layout(values: Mapping[str, Any]) -> ModuleLayout:
    widths = tuple((tp, cp) for tp, cp in values.get("widths", ()))
    arrays = {"layers_per_stage": tuple(values["layers_per_stage"]), "ranks": np.array(values["ranks"])}
    return ModuleLayout(**{**values, **arrays, "widths": widths})
