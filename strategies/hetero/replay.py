"""What a planner believes a program takes: measured microbatches, placed on a clock without transfer delays."""

from __future__ import annotations

from math import ceil

import numpy as np

from entrain_bench.arrays import FloatArray
from entrain_bench.profile import Profile
from entrain_bench.program import Program
from entrain_bench.shapes import SampleShapes
from entrain_bench.simulate.engine import place_actions
from entrain_bench.specs.model import ModuleSpec


def average_layer_s(
    profile: Profile, module: ModuleSpec, samples: SampleShapes, num_samples: float, tp: int, cp: int
) -> FloatArray:
    """Measured forward and backward seconds of each layer on a chunk of average units ``[layers]``.

    Args:
        profile: measurements.
        module: the module.
        samples: samples averaged into one shape.
        num_samples: samples whose units the chunk holds; may be a fraction, units are rounded up as in the fullest
            of several slices.
        tp: tensor-parallel degree.
        cp: context-parallel degree.
    """
    units = module.units(samples)
    if not len(units):
        return np.zeros(len(module.layers))
    each = max(1, round(float(module.lengths(samples, units).mean())))
    count = max(1, ceil(num_samples * len(units) / len(samples) - 1e-9))
    times = profile.measure(module, np.full(count, each), tp, cp)
    return np.array([float(t.total_s[0]) for t in times])[module.layer_kind]


def replay_s(profile: Profile, program: Program) -> float:
    """Seconds from the start to the end of the last backward with every microbatch measured by itself.

    Neither transfers nor the step at the end of the iteration are counted.
    """
    duration = np.zeros(program.num_actions)
    for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
        chunks = program.chunks[index]
        if not len(chunks):
            continue
        counts = module.kind_counts(placed.layers_per_stage)
        lengths = module.lengths(program.shapes, chunks.members)
        forward, backward = [], []
        for low, high in zip(chunks.offsets[:-1], chunks.offsets[1:], strict=True):
            times = profile.measure(module, lengths[low:high], placed.tp, placed.cp)
            forward.append([float((t.forward_s + t.forward_comm_s)[0]) for t in times])
            backward.append([float((t.backward_s + t.backward_comm_s)[0]) for t in times])
        ahead = np.array(forward) @ counts.T
        duration[program.forward_actions(index)] = ahead
        duration[program.backward_actions(index)] = np.array(backward) @ counts.T + (ahead if placed.recompute else 0.0)
    _, end, _ = place_actions(program, duration, np.zeros(len(program.dep_actions)))
    return float(end[program.chunk >= 0].max())
