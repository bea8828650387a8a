"""Estimated seconds of chunks on stages, from the profile's estimates of units."""

from collections.abc import Callable

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import FloatArray, IntArray, sum_rows
from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.columns import covered_per_stage, remade_kinds
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


def covered_layer_s(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, chunks: Chunks, profile: Profile
) -> FloatArray:
    """Estimated seconds of recomputing a mean layer of those it covers ``[chunks, stages]``; 0 without backward."""
    if placed.widths:
        return estimate_by_group(
            placed, chunks, lambda group: (covered_layer_s(module, group, shapes, chunks, profile),)
        )[0]
    forward, _ = stages_s(module, placed, shapes, chunks, profile)
    counts = module.kind_counts(placed.layers_per_stage)
    kinds = _kinds_s(module, placed, shapes, profile)
    covered = counts * [kind.remade_share for kind in module.kinds]
    number = np.maximum(covered_per_stage(module, placed.layers_per_stage), 1)
    return np.asarray(forward * (matmul(covered, kinds) / matmul(counts, kinds) / number))


def estimate_by_group(
    placed: ModuleLayout, chunks: Chunks, values: Callable[[ModuleLayout], tuple[FloatArray, ...]]
) -> tuple[FloatArray, ...]:
    """Each chunk's values at the degree of its group; ``values`` are those of all chunks at one ``[chunks, ...]``."""
    used, place = np.unique(placed.degree_of_copy[chunks.replica], return_inverse=True)
    # Most degrees of a layout have no chunk; without any chunk one states the number of stages.
    by_degree = [values(placed.at(degree)) for degree in (used.tolist() or [0])]
    chunk = np.arange(len(chunks))
    return tuple(np.asarray(np.stack(columns)[place, chunk]) for columns in zip(*by_degree, strict=True))


def _kinds_s(module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, profile: Profile) -> FloatArray:
    """Estimated forward seconds of a layer of each kind for a unit of mean length ``[kinds]``."""

    def made() -> FloatArray:
        units = module.units(shapes)
        mean = float(module.lengths(shapes, units).mean()) if len(units) else 0.0
        fit = profile.layers.forward_fit(module, placed.tp, placed.cp, placed.expert_groups)
        return np.maximum(matmul(fit, [mean**2, mean, 1.0]), 1e-12)

    key = ("kinds", module.name, placed.tp, placed.cp, *profile.layers.name_of(placed.expert_groups))
    return profile.estimates.remember(shapes, key, made)


def stages_s(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, chunks: Chunks, profile: Profile
) -> tuple[FloatArray, FloatArray]:
    """Estimated forward seconds ``[chunks, stages]``; share of a full backward's products needed ``[stages]``."""
    seconds = np.zeros(shapes.num_items if module.per_item else len(shapes))
    seconds[module.units(shapes)] = profile.estimates.units(module, shapes, placed.tp, placed.cp, placed.expert_groups)
    kinds = _kinds_s(module, placed, shapes, profile)
    stages = matmul(module.kind_counts(placed.layers_per_stage), kinds)
    forward = sum_rows(chunks.offsets, seconds[chunks.members])[:, None] * (stages / stages.sum())
    kept = kinds * np.array([kind.backward_share for kind in module.kinds])
    return forward, matmul(module.kind_counts(placed.layers_per_stage), kept) / stages


def packed_units_s(
    module: ModuleSpec,
    shapes: SampleShapes,
    tp: int,
    cp: int,
    profile: Profile,
    split: bool = False,
    groups: IntArray | None = None,
) -> FloatArray:
    """Estimated seconds that each unit adds to a packed chunk's passes, three with ``split`` ``[2, units, kinds]``.

    ``groups`` are the ranks of expert-parallel groups, if any.
    """

    def made() -> FloatArray:
        times = profile.layers.pack_times(module, tp, cp, split, groups)
        added = times.of(module.lengths(shapes, module.units(shapes)))
        return np.asarray(added * profile.estimates.error_factor(module, shapes)[:, None])

    key = ("packed", module.name, tp, cp, split, *profile.layers.name_of(groups))
    return profile.estimates.remember(shapes, key, made)


def packed_chunks_s(
    module: ModuleSpec,
    placed: ModuleLayout,
    shapes: SampleShapes,
    chunks: Chunks,
    profile: Profile,
    remade: IntArray | None = None,
    split: bool = False,
) -> tuple[FloatArray, ...]:
    """Estimated seconds of passes of packed chunks that recompute ``remade`` layers, as the layout says by default."""
    if placed.widths:
        return estimate_by_group(
            placed, chunks, lambda group: packed_chunks_s(module, group, shapes, chunks, profile, remade, split)
        )
    groups = placed.expert_groups
    times = profile.layers.pack_times(module, placed.tp, placed.cp, split, groups)
    seconds = np.zeros((2 + split, shapes.num_items if module.per_item else len(shapes), len(module.kinds)))
    seconds[:, module.units(shapes)] = packed_units_s(module, shapes, placed.tp, placed.cp, profile, split, groups)
    sums = [
        np.stack([sum_rows(chunks.offsets, kind) for kind in added_s[chunks.members].T], axis=1) for added_s in seconds
    ]
    forward, backward, *weights = np.maximum(sums + times.chunk_s[:, None], times.least_s[:, None])
    counts = module.kind_counts(placed.layers_per_stage)
    needed = np.array([kind.remade_share for kind in module.kinds], np.float64)
    again = counts * needed * placed.recompute
    stages = [matmul(kinds_s, counts.T) for kinds_s in (forward, backward, *weights)]
    stages[1] += matmul(forward, again.T)
    if remade is not None and not placed.recompute:
        kinds = remade_kinds(module, placed.layers_per_stage, remade) * needed
        stages[1] += (forward[:, None] * kinds).sum(axis=2)
    return tuple(stages)


def packed_durations(
    program: Program, profile: Profile, chunks_s: Callable[..., tuple[FloatArray, ...]] = packed_chunks_s
) -> FloatArray:
    """Estimated seconds of every pass of a program by ``chunks_s`` ``[first_action[-1]]``."""
    duration = np.zeros(int(program.first_action[-1]))
    for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
        remade = program.remade[index] if program.remade else None
        split = {"split": True} if program.splits_backward(index) else {}
        passes = chunks_s(module, placed, program.shapes, program.chunks[index], profile, remade, **split)
        for span, seconds in zip(program.spans(index), passes, strict=False):
            duration[span] = seconds.ravel()
    return duration


def packed_iteration_s(program: Program, profile: Profile) -> float:
    """Return an iteration's estimated seconds: passes by ``packed_durations``, and exposed transfers and steps."""
    duration = np.zeros(program.num_actions)
    duration[: program.first_action[-1]] = packed_durations(program, profile)
    return profile.programs.iteration_s(program, duration)
