"""1F1B and its warm-up: the forwards a stage runs before it alternates, and more of them as far as memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.options import Amount, Eager
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.schedules import backward_microbatch, chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray, IntArray, sum_rows
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward(Recomputation):
    """1F1B over the chain of all stages; a microbatch keeps its place in all modules.

    Attributes:
        eager: stages that warm up with more forwards than 1F1B's, one a stage behind: none, those of encoders, or all.
        max_extra_forwards: how many more at most; None: as many as memory allows.
    """

    handles_generators: ClassVar[bool] = True

    eager: Eager = "none"
    max_extra_forwards: Amount | None = None

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """Return the program; ``IncompatibleError`` if the modules do not form a chain."""
        return self.in_chain(shapes, layout, assignment, profile)

    def in_chain(
        self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile, split: bool = False
    ) -> Program:
        """Return the 1F1B program over the chain of all stages with this warm-up; ``split``: see ``chain_program``."""
        model = profile.job.model
        warmup = stages_behind(layout, model.llm_index)
        program = chain_program(model, shapes, layout, assignment, warmup, split)
        if self.eager != "none" and self.max_extra_forwards != 0:
            freed = backward_microbatch(model, shapes, assignment, program.chunks)
            warmup = eager_warmup(program, freed, profile, self.eager == "encoder", self.max_extra_forwards)
            program = chain_program(model, shapes, layout, assignment, warmup, split)
        return self.within_memory(program, profile)


def eager_warmup(
    program: Program, freed: Sequence[IntArray], profile: Profile, only_encoders: bool, max_extra: int | None = None
) -> list[IntArray]:
    """Return the longest warm-up of each stage that fits the memory budget, for every module ``[stages]``.

    Never less than 1F1B's, and falling by at least one from stage to stage, so that no stage waits for a forward that
    the stage before holds back. ``freed`` is the microbatch in whose slot each chunk of a 1F1B program runs backward,
    for every module ``[chunks]``. With ``only_encoders`` stages of the LLM and of generators, and what shares their
    lanes, keep 1F1B's warm-up; ``max_extra`` limits the forwards beyond it.
    """
    job = profile.job
    memory = profile.memory
    layout = program.layout
    given, moving = memory.handed_bytes(program)
    room = job.planning_budget_bytes - memory.lane_state_bytes(layout) - moving
    num_microbatches = 1 + max(int(last.max(initial=0)) for last in freed)
    # Of another module's tensors a microbatch that is held keeps its own.
    need = given[:, None] * (1.0 + np.arange(num_microbatches))
    for module, placed, blocks, rows, last in zip(
        job.model.modules, layout.modules, layout.blocks, program.chunks, freed, strict=True
    ):
        tokens = sum_rows(rows.offsets, module.lengths(program.shapes, rows.members))
        kept, working = memory.token_bytes(module, placed)
        held = held_tokens(rows, tokens, placed.dp, num_microbatches, last)
        bytes_held = kept[:, None] * held + (working * tokens.max(initial=0.0))[:, None]
        per_block = np.tile(bytes_held, (placed.dp, 1))
        need[blocks.lanes] += np.repeat(per_block, np.diff(blocks.offsets), axis=0)
    longest = (need <= room[:, None]).sum(axis=1) - 1
    behind = stages_behind(layout, job.model.llm_index)
    # The longest warm-up of a stage of the chain in all replicas; the stage has as many behind it as its index here.
    fits = np.full(1 + max(int(stages.max()) for stages in behind), num_microbatches)
    for blocks, stages in zip(layout.blocks, behind, strict=True):
        np.minimum.at(fits, stages, longest[blocks.first_lane()].min(axis=0))
    warmup = np.arange(len(fits))
    extra = num_microbatches if max_extra is None else max_extra
    last_eager = 1 + int(behind[job.model.llm_index].max()) if only_encoders else 0
    ahead = num_microbatches
    for stage in range(len(fits) - 1, last_eager - 1, -1):
        warmup[stage] = max(stage, min(fits[stage], ahead, stage + extra))
        ahead = warmup[stage] - 1
    return [warmup[stages] for stages in behind]


def held_tokens(
    rows: Chunks, tokens: FloatArray, num_replicas: int, num_microbatches: int, freed: IntArray
) -> FloatArray:
    """Return the most tokens a stage of any replica holds after a warm-up of w forwards ``[w]``, w = 0..K-1.

    When forward i runs, microbatches up to i have arrived and backwards up to i - w - 1 are done.
    """
    arrived = np.zeros((num_replicas, num_microbatches + 1))
    gone = np.zeros((num_replicas, num_microbatches + 1))
    np.add.at(arrived, (rows.replica, rows.microbatch + 1), tokens)
    np.add.at(gone, (rows.replica, freed + 1), tokens)
    arrived = arrived.cumsum(axis=1)
    gone = gone.cumsum(axis=1)
    held = np.empty(num_microbatches)
    for warmup in range(num_microbatches):
        done = np.maximum(np.arange(1, num_microbatches + 1) - warmup - 1, 0)
        held[warmup] = (arrived[:, 1:] - gone[:, done]).max()
    return held
