"""Routes over the boundary between an encoder and the LLM (arXiv:2605.27678, section 1).

The named failure is a mapping whose shapes are valid and whose gradients go to the wrong ranks, so routes are checked.
"""

from __future__ import annotations

import numpy as np

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment, check_assignment
from entrain_bench.program.boundary import is_colocated, ratio_of
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes


def check_colocated(layout: Layout) -> None:
    """Check that every encoder is in one stage on exactly the LLM's ranks, as schedules of three phases need it.

    Raises:
        IncompatibleError: naming the encoder that is not.
    """
    *encoders, llm = layout.modules
    for placed in encoders:
        if not is_colocated(placed, llm) or placed.pp > 1:
            raise IncompatibleError(
                f"layout: a colocated schedule needs {placed.module} in one stage on exactly the ranks of {llm.module}"
            )


def check_routes(
    model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment, *, in_order: bool
) -> None:
    """Check that every item is encoded in the group of the LLM replica that consumes it.

    Args:
        model: the model.
        shapes: the iteration's samples.
        layout: the layout.
        assignment: labels of all modules.
        in_order: whether no LLM microbatch may come before an encoder microbatch that it needs.

    Raises:
        IncompatibleError: naming the sample that takes a wrong way.
    """
    check_assignment(assignment, model, layout, shapes)
    *encoders, llm = layout.modules
    consumer = assignment.modules[-1]
    for module, placed, labels in zip(model.encoders, encoders, assignment.modules, strict=False):
        ratio = ratio_of(placed, llm)
        owner = shapes.item_sample[module.units(shapes)]
        wrong = np.flatnonzero(labels.replica // ratio.fan_in != consumer.replica[owner] // ratio.fan_out)
        if wrong.size:
            first = wrong[0]
            raise IncompatibleError(
                f"assignment: sample {shapes.name_of(owner[first])} is encoded by replica {labels.replica[first]} "
                f"of {placed.dp} of {module.name}, which does not feed replica {consumer.replica[owner[first]]} of "
                f"{llm.dp} of {llm.module}"
            )
        late = np.flatnonzero(labels.microbatch > consumer.microbatch[owner]) if in_order else wrong
        if late.size:
            first = late[0]
            raise IncompatibleError(
                f"assignment: sample {shapes.name_of(owner[first])} is in {module.name} microbatch "
                f"{labels.microbatch[first]} and already in {llm.module} microbatch "
                f"{consumer.microbatch[owner[first]]}; this schedule runs microbatches in order"
            )
