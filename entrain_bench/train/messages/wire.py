"""Rank 0's program as bytes for the other ranks: NumPy arrays, read without running code.

Assigners may be limited by wall time, so ranks that each computed a program could disagree, and hang.
"""

from __future__ import annotations

from dataclasses import fields
from io import BytesIO
from typing import Any

import numpy as np

from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# Known to every rank, or with names of their own.
_ASIDE = ("model", "layout", "shapes", "chunks", "remade")


def program_to_bytes(program: Program) -> bytes:
    """Return the arrays of a program; every rank knows model, layout and shapes."""
    arrays = {f"columns.{field.name}": getattr(program, field.name) for field in _columns()}
    for module, chunks in enumerate(program.chunks):
        arrays |= {f"chunks.{module}.{field.name}": getattr(chunks, field.name) for field in fields(Chunks)}
    arrays |= {f"remade.{module}": blocks for module, blocks in enumerate(program.remade)}
    file = BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def program_from_bytes(content: bytes, model: ModelSpec, layout: Layout, shapes: SampleShapes) -> Program:
    """Return the program that ``program_to_bytes`` wrote."""
    with np.load(BytesIO(content), allow_pickle=False) as arrays:
        columns = {field.name: arrays[f"columns.{field.name}"] for field in _columns()}
        chunks = tuple(
            Chunks(**{field.name: arrays[f"chunks.{module}.{field.name}"] for field in fields(Chunks)})
            for module in range(len(model.modules))
        )
        num_remade = sum(name.startswith("remade.") for name in arrays)
        remade = tuple(arrays[f"remade.{module}"] for module in range(num_remade))
    return Program(model, layout, shapes, chunks=chunks, remade=remade, **columns)


def _columns() -> list[Any]:
    return [field for field in fields(Program) if field.name not in _ASIDE]
