"""Programs as bytes: rank 0 decides, the other ranks follow to the letter.

Assigners may be limited by wall time, so ranks that each computed a program could disagree, and hang.
"""

from __future__ import annotations

from dataclasses import fields
from io import BytesIO

import numpy as np

from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

_GIVEN = ("model", "layout", "shapes", "chunks", "remade")


def program_to_bytes(program: Program) -> bytes:
    """The arrays of a program; model, layout and shapes are known to every rank."""
    arrays = {f.name: getattr(program, f.name) for f in fields(Program) if f.name not in _GIVEN}
    for index, chunks in enumerate(program.chunks):
        arrays |= {f"chunks.{index}.{f.name}": getattr(chunks, f.name) for f in fields(Chunks)}
    arrays |= {f"remade.{index}": own for index, own in enumerate(program.remade)}
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
        remade = tuple(arrays[name] for index in range(len(model.modules)) if (name := f"remade.{index}") in arrays)
        columns = {f.name: arrays[f.name] for f in fields(Program) if f.name not in _GIVEN}
    return Program(model=model, layout=layout, shapes=shapes, chunks=chunks, remade=remade, **columns)
