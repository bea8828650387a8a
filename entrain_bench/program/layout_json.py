"""Layouts as text, for other processes and later ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from entrain_bench.program.layout import Layout, ModuleLayout


def layout_to_json(layout: Layout) -> str:
    """A layout as text, complete and comparable."""
    modules = [
        {f.name: getattr(module, f.name) for f in fields(ModuleLayout)} | {"ranks": module.ranks.tolist()}
        for module in layout.modules
    ]
    rest = {f.name: getattr(layout, f.name) for f in fields(Layout) if f.init and f.name != "modules"}
    return json.dumps({"modules": modules, **rest}, sort_keys=True)


def layout_from_json(text: str) -> Layout:
    """The layout that ``layout_to_json`` wrote."""
    values: dict[str, Any] = json.loads(text)
    modules = tuple(_module_layout(module) for module in values.pop("modules"))
    return Layout(modules, **values)


def _module_layout(values: Mapping[str, Any]) -> ModuleLayout:
    ranks = np.array(values["ranks"])
    return ModuleLayout(**{**values, "layers_per_stage": tuple(values["layers_per_stage"]), "ranks": ranks})
