"""The batch's loss out of what the ranks of the last stages computed, and the culprit if it is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from entrain_bench.program import Program
from entrain_bench.train.messages.places import places_of

# How many samples an error names.
MOST_NAMED = 8


def total_loss(program: Program, losses: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Mean loss of a predicted token, from action and loss of every chunk, by rank."""
    llm = next(index for index, module in enumerate(program.model.modules) if not module.is_encoder)
    tp, counted = program.layout.modules[llm].tp, list[float]()
    for rank, own in enumerate(losses):
        # Tensor-parallel ranks hold copies, context-parallel ranks parts.
        if all(place.position % tp == 0 for place in places_of(program.layout, rank) if place.module == llm):
            counted += [loss for _, loss in own]
    return float(sum(counted))


def name_non_finite(program: Program, iteration: int, losses: Sequence[Sequence[tuple[int, float]]]) -> str:
    """One line that names iteration, microbatch and samples of the first loss that is not finite."""
    for action, loss in (row for own in losses for row in own):
        if not isfinite(loss):
            view = program.view(action)
            samples = [program.shapes.name_of(sample) for sample in view.members]
            named = ", ".join(samples[:MOST_NAMED]) + (", ..." if len(samples) > MOST_NAMED else "")
            return (
                f"loss={loss} in iteration {iteration}, microbatch {view.microbatch} of replica {view.replica} "
                f"(samples {named}); harness.on_non_finite=skip goes on without its update"
            )
    return (
        f"gradient norm is not finite in iteration {iteration}, though all losses are; "
        f"harness.on_non_finite=skip goes on without its update"
    )
