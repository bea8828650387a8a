"""Recomputation by chunk and stage: which layers a chunk's backward runs forward once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.errors import require
from entrain_bench.program.columns import Program
from entrain_bench.specs.model import ModuleSpec


def covered_layers(module: ModuleSpec) -> BoolArray:
    """Layers that recomputation covers ``[layers]``: megatron-core recomputes blocks, not the ends."""
    return np.array([layer.recomputed for layer in module.layers])


def covered_per_stage(module: ModuleSpec, layers_per_stage: Sequence[int]) -> IntArray:
    """How many layers of each stage recomputation covers ``[stages]``: what a chunk can recompute there at most."""
    return np.add.reduceat(covered_layers(module).astype(np.int64), np.cumsum([0, *layers_per_stage[:-1]]))


def remade_kinds(module: ModuleSpec, layers_per_stage: Sequence[int], remade: IntArray) -> FloatArray:
    """Layers of each kind that chunks recompute ``[chunks, stages, kinds]``.

    Of a stage's covered layers the first ones are recomputed, as with megatron-core's ``recompute_method=block``.
    ``remade`` is how many each chunk recomputes ``[chunks, stages]``.
    """
    covered = covered_layers(module)
    first = 0
    counts = np.zeros((*remade.shape, len(module.kinds)))
    for stage, count in enumerate(layers_per_stage):
        held = np.arange(first, first + count)[covered[first : first + count]]
        of_kind = np.eye(len(module.kinds))[module.layer_kind[held]]
        # Row n: of the first n covered layers.
        counts[:, stage] = np.concatenate([np.zeros((1, len(module.kinds))), of_kind.cumsum(axis=0)])[remade[:, stage]]
        first += count
    return counts


def recompute_chunks(program: Program, remade: Sequence[IntArray]) -> Program:
    """The program with chunks that recompute so many covered layers of each stage ``[chunks, stages]``, by module.

    ``UserError`` for more than a stage has, and for a module that the layout recomputes as a whole.
    """
    for module, placed, rows, layers in zip(
        program.model.modules, program.layout.modules, program.chunks, remade, strict=True
    ):
        where = f"program.remade.{module.name}"
        require(layers.shape == (len(rows), placed.pp), where, layers.shape, f"of shape {(len(rows), placed.pp)}")
        most = covered_per_stage(module, placed.layers_per_stage)
        fits = bool(np.all((layers >= 0) & (layers <= most)))
        require(fits, where, layers.max(initial=0), f"in [0, n], n = {most.tolist()} on its stages")
        require(not (placed.recompute and layers.any()), where, "given", "0 where the layout recomputes the module")
    return replace(program, remade=tuple(remade) if any(layers.any() for layers in remade) else ())
