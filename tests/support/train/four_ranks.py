"""Layouts of two modules on four ranks, random programs on them, and programs with their backwards split."""

from dataclasses import replace

import numpy as np

from entrain_bench.balancing.schedules import chain_program, stages_behind, three_phase_program
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.messages.rank_plan import positions_of_actions
from support.builders import labels, placed, tiny_model

MODEL = tiny_model(encoder=2, llm=2)
VISION, LLM = MODEL.modules


def layouts() -> dict[str, Layout]:
    def layout(vision: object, llm: object, **degrees: int) -> Layout:
        vision_tp, llm_tp = degrees.get("vision_tp", 1), degrees.get("llm_tp", 1)
        cp = degrees.get("cp", 1)
        return Layout((placed(VISION, vision, tp=vision_tp), placed(LLM, llm, tp=llm_tp, cp=cp)), 1)

    return {
        "chain": layout([[[0]], [[2]]], [[[1]], [[3]]]),
        "fan_in": layout([[[0]], [[1]]], [[[2], [3]]]),
        "fan_out": layout([[[0], [1]]], [[[2]], [[3]]]),
        "wider_llm": layout([[[0]]], [[[2, 3]]], llm_tp=2),
        "context_parallel": layout([[[0]]], [[[2, 3]]], cp=2),
        "wider_encoder": layout([[[0, 1]]], [[[2]], [[3]]], vision_tp=2),
        "colocated": layout([[[0]], [[1]], [[2]], [[3]]], [[[0, 1]], [[2, 3]]], llm_tp=2),
        "colocated_pipeline": layout([[[0]], [[1]], [[2]], [[3]]], [[[0], [1]], [[2], [3]]]),
    }


LAYOUTS = layouts()


def programs(shapes: SampleShapes, layout: Layout, rng: np.random.Generator, split: bool) -> Program:
    """Random replicas and microbatches; an item is encoded in the microbatch of its sample or an earlier one."""
    colocated = np.intersect1d(layout.modules[0].ranks, layout.modules[1].ranks).size > 0
    vision_dp, llm_dp = layout.modules[0].dp, layout.modules[1].dp
    llm_replica = rng.integers(llm_dp, size=len(shapes))
    llm_microbatch = rng.integers(3, size=len(shapes))
    owner = shapes.item_sample
    if colocated:
        # Every encoder replica works for the LLM replica whose ranks it shares.
        replica = llm_replica[owner] * (vision_dp // llm_dp) + rng.integers(vision_dp // llm_dp, size=len(owner))
        zero = np.zeros(len(owner), np.int64)
        assignment = Assignment((labels(replica, zero), labels(llm_replica, llm_microbatch)))
        return three_phase_program(MODEL, shapes, layout, assignment)
    replica = llm_replica[owner] if vision_dp == llm_dp else rng.integers(vision_dp, size=len(owner))
    microbatch = np.maximum(llm_microbatch[owner] - rng.integers(2, size=len(owner)), 0)
    assignment = Assignment((labels(replica, microbatch), labels(llm_replica, llm_microbatch)))
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout), split)


def split_backwards(program: Program) -> Program:
    """The program with a weight pass after every backward: at once, or so much later that others come between.

    Every module's is split, those that learn nothing included.
    """
    place = positions_of_actions(program)
    scale = int(place.max()) + 1
    slots = []
    for module, chunks in enumerate(program.chunks):
        forward, backward = place[program.forward_actions(module)], place[program.backward_actions(module)]
        later = backward + 5 * (np.arange(len(chunks)) % 3)[:, None]
        # No two stages of a module on a rank have the same: their backwards have not.
        slots.append(Slots(2 * scale * forward, 2 * scale * backward, (2 * later + 1) * scale + backward))
    made = build_program(program.model, program.layout, program.shapes, program.chunks, slots)
    check_program(made)
    return replace(made, remade=program.remade)
