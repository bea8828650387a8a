"""Programs of any strategy with their backwards split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.validate import check_program
from entrain_bench.train.messages.rank_plan import positions_of_actions


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
