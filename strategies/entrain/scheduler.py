"""Entrain's schedule: 1F1B with split encoder backwards and eager forwards (section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray, IntArray, sum_rows
from entrain_bench.errors import unknown_choice
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.profile import Profile
from entrain_bench.strategy.schedules import backward_microbatch, chain_chunks, chain_program, stages_behind

EAGER = ("none", "encoder", "all")


@dataclass(frozen=True, slots=True)
class EntrainScheduler:
    """1F1B in which deferred samples run backward with the LLM microbatch that took them.

    Attributes:
        split_backward: whether an encoder microbatch's backward is cut; else it waits for its last deferred sample.
        eager: stages that warm up with as many forwards as memory allows: none, those of encoders, or all.
    """

    split_backward: bool = True
    eager: str = "encoder"

    def __post_init__(self) -> None:
        if self.eager not in EAGER:
            raise unknown_choice("strategy.scheduler.eager", self.eager, EAGER)

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; warm-up grows with free memory, one stage at least one forward ahead of the next."""
        model = profile.job.model
        warmup = stages_behind(layout)
        if self.eager != "none":
            plain = chain_program(model, shapes, layout, assignment, warmup, self.split_backward)
            handed = profile.memory.handed_bytes(plain)
            chunks = chain_chunks(model, shapes, layout, assignment, self.split_backward)
            freed = backward_microbatch(model, shapes, assignment, chunks)
            warmup = eager_warmup(profile, shapes, layout, chunks, freed, handed, only_encoders=self.eager == "encoder")
        return chain_program(model, shapes, layout, assignment, warmup, self.split_backward)


def eager_warmup(
    profile: Profile,
    shapes: SampleShapes,
    layout: Layout,
    chunks: list[Chunks],
    freed: list[IntArray],
    handed: tuple[FloatArray, FloatArray],
    only_encoders: bool,
) -> list[IntArray]:
    """The longest warm-up of each stage whose activations fit the memory budget ``[stages]`` for every module.

    Never less than 1F1B's, and falling by at least one from stage to stage, so that no stage waits for a forward that
    the stage before holds back.
    """
    job = profile.job
    memory = profile.memory
    given, moving = handed
    room = job.planning_budget_bytes - memory.lane_state_bytes(layout) - moving
    num_microbatches = 1 + max(int(last.max(initial=0)) for last in freed)
    # Of another module's tensors a microbatch that is held keeps its own.
    need = given[:, None] * (1.0 + np.arange(num_microbatches))
    for module, placed, blocks, rows, last in zip(
        job.model.modules, layout.modules, layout.blocks, chunks, freed, strict=True
    ):
        tokens = sum_rows(rows.offsets, module.lengths(shapes, rows.members))
        kept, working = memory.token_bytes(module, placed)
        held = held_tokens(rows, tokens, placed.dp, num_microbatches, last)
        bytes_held = kept[:, None] * held + (working * tokens.max(initial=0.0))[:, None]
        per_block = np.tile(bytes_held, (placed.dp, 1))
        need[blocks.lanes] += np.repeat(per_block, np.diff(blocks.offsets), axis=0)
    longest = (need <= room[:, None]).sum(axis=1) - 1
    behind = stages_behind(layout)
    # The longest warm-up of a stage of the chain in all replicas; the stage has as many behind it as its index here.
    fits = np.full(1 + max(int(stages.max()) for stages in behind), num_microbatches)
    for blocks, stages in zip(layout.blocks, behind, strict=True):
        np.minimum.at(fits, stages, longest[blocks.first_lane()].min(axis=0))
    warmup = np.arange(len(fits))
    num_llm_stages = len(behind[-1])
    ahead = num_microbatches
    for stage in range(len(fits) - 1, num_llm_stages - 1 if only_encoders else -1, -1):
        warmup[stage] = max(stage, min(fits[stage], ahead))
        ahead = warmup[stage] - 1
    return [warmup[stages] for stages in behind]


def held_tokens(
    rows: Chunks, tokens: FloatArray, num_replicas: int, num_microbatches: int, freed: IntArray
) -> FloatArray:
    """Most tokens a stage holds at once in any replica if it warms up with w forwards ``[w]``, w = 0..K-1.

    When forward i runs, microbatches up to i have arrived and backwards up to i - w - 1 are done.
    """
    arrived = np.zeros((num_replicas, num_microbatches + 1))
    gone = np.zeros((num_replicas, num_microbatches + 1))
    np.add.at(arrived, (rows.replica, rows.microbatch + 1), tokens)
    np.add.at(gone, (rows.replica, freed + 1), tokens)
    arrived, gone = arrived.cumsum(axis=1), gone.cumsum(axis=1)
    held = np.empty(num_microbatches)
    for warmup in range(num_microbatches):
        done = np.maximum(np.arange(1, num_microbatches + 1) - warmup - 1, 0)
        held[warmup] = (arrived[:, 1:] - gone[:, done]).max()
    return held
