"""Believed seconds of chunks on stages, from the profile's estimates of units."""

from __future__ import annotations

import numpy as np

from entrain_bench.arithmetic import matmul
from entrain_bench.arrays import FloatArray, sum_rows
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.program.recomputation import covered_per_stage
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.profile import Profile


def covered_layer_s(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, chunks: Chunks, profile: Profile
) -> FloatArray:
    """Estimated forward seconds of a mean layer that recomputation covers ``[chunks, stages]``; 0 without backward."""
    forward, _ = stages_s(module, placed, shapes, chunks, profile)
    counts, kinds = module.kind_counts(placed.layers_per_stage), _kinds_s(module, placed, shapes, profile)
    covered = counts * [kind.recomputed and kind.backward_share > 0 for kind in module.kinds]
    number = np.maximum(covered_per_stage(module, placed.layers_per_stage), 1)
    return np.asarray(forward * (matmul(covered, kinds) / matmul(counts, kinds) / number))


def _kinds_s(module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, profile: Profile) -> FloatArray:
    """Estimated forward seconds of a layer of each kind for a unit of mean length ``[kinds]``."""
    units = module.units(shapes)
    mean = float(module.lengths(shapes, units).mean()) if len(units) else 0.0
    return np.maximum(matmul(profile.forward_fit(module, placed.tp, placed.cp), [mean**2, mean, 1.0]), 1e-12)


def stages_s(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, chunks: Chunks, profile: Profile
) -> tuple[FloatArray, FloatArray]:
    """Estimated forward seconds ``[chunks, stages]``, and the share of a full backward's products that is needed.

    A chunk costs what its units cost alone; a module's time is shared out over stages as that of a unit of mean length.

    Returns:
        Seconds, and the share of each stage ``[stages]``.
    """
    units = module.units(shapes)
    seconds = np.zeros(shapes.num_items if module.per_item else len(shapes))
    seconds[units] = profile.estimate_units(module, shapes, placed.tp, placed.cp)
    kinds = _kinds_s(module, placed, shapes, profile)
    stages = matmul(module.kind_counts(placed.layers_per_stage), kinds)
    forward = sum_rows(chunks.offsets, seconds[chunks.members])[:, None] * (stages / stages.sum())
    kept = kinds * np.array([kind.backward_share for kind in module.kinds])
    return forward, matmul(module.kind_counts(placed.layers_per_stage), kept) / stages
