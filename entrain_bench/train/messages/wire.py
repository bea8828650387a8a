"""Programs and layouts as bytes: rank 0 decides, the other ranks follow to the letter.

Assigners may be limited by wall time, so ranks that each computed a program could disagree, and hang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from io import BytesIO
from typing import Any

import numpy as np

from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

_GIVEN = ("model", "layout", "shapes", "chunks")


def program_to_bytes(program: Program) -> bytes:
    """The arrays of a program; model, layout and shapes are known to every rank."""
    arrays = {f.name: getattr(program, f.name) for f in fields(Program) if f.name not in _GIVEN}
    for index, chunks in enumerate(program.chunks):
        arrays |= {f"chunks.{index}.{f.name}": getattr(chunks, f.name) for f in fields(Chunks)}
    buffer = BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def program_from_bytes(content: bytes, model: ModelSpec, layout: Layout, shapes: SampleShapes) -> Program:
    """The program that ``program_to_bytes`` wrote."""
    with np.load(BytesIO(content), allow_pickle=False) as arrays:
        chunks = tuple(
            Chunks(**{f.name: arrays[f"chunks.{index}.{f.name}"] for f in fields(Chunks)})
            for index in range(len(model.modules))
        )
        columns = {f.name: arrays[f.name] for f in fields(Program) if f.name not in _GIVEN}
    return Program(model=model, layout=layout, shapes=shapes, chunks=chunks, **columns)


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
