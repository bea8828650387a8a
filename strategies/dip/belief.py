"""What DIP believes its programs to take: the simulator that its search scores schedules with (arXiv:2504.14145)."""

from __future__ import annotations

import numpy as np

from entrain_bench.balancing.beliefs import covered_layer_s, stages_s
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


def chunk_s(
    module: ModuleSpec,
    placed: ModuleLayout,
    shapes: SampleShapes,
    chunks: Chunks,
    profile: Profile,
    remade: IntArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Estimated seconds of forward and backward of each chunk on each stage ``[chunks, stages]``.

    A chunk costs what its units cost alone; a module's time is shared out over stages as that of a unit of mean length.
    A backward takes two forwards, and one more if activations are recomputed; less where layers are frozen. Of layers
    that chunks recompute one by one (``remade``), the backward takes one more forward of these.
    """
    forward, share = stages_s(module, placed, shapes, chunks, profile)
    backward = forward * (3.0 * recompute_factor(placed.recompute) - 1.0) * share
    if remade is not None and not placed.recompute:
        backward = backward + remade * covered_layer_s(module, placed, shapes, chunks, profile)
    return forward, backward


def believed_durations(program: Program, profile: Profile) -> FloatArray:
    """Believed seconds of every forward and backward ``[first_action[-1]]``."""
    duration = np.zeros(int(program.first_action[-1]))
    for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
        forward, backward = program.forward_actions(index), program.backward_actions(index)
        duration[forward], duration[backward] = chunk_s(
            module,
            placed,
            program.shapes,
            program.chunks[index],
            profile,
            program.remade[index] if program.remade else None,
        )
    return duration


def believed_s(profile: Profile, program: Program) -> float:
    """Believed time of a program up to its last backward, without transfers, seconds."""
    duration = np.zeros(program.num_actions)
    duration[: program.first_action[-1]] = believed_durations(program, profile)
    return float(profile.simulate(program, duration).max())


def lanes_of_actions(program: Program) -> IntArray:
    """Lane of every forward and backward, where every block is one lane ``[first_action[-1]]``."""
    lane = np.zeros(int(program.first_action[-1]), np.int64)
    for index, (rows, blocks) in enumerate(zip(program.chunks, program.layout.blocks, strict=True)):
        forward, backward = program.forward_actions(index), program.backward_actions(index)
        lane[forward] = lane[backward] = blocks.first_lane()[rows.replica]
    return lane
