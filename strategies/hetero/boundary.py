"""The boundary between an encoder and the LLM: integer ratios of their data parallelism (arXiv:2605.27678, section 1).

The named failure is a mapping whose shapes are valid and whose gradients go to the wrong ranks, so routes are checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.assignment import Assignment, check_assignment
from entrain_bench.errors import IncompatibleError
from entrain_bench.layout import Layout, ModuleLayout
from entrain_bench.shapes import SampleShapes
from entrain_bench.specs.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Ratio:
    """How replicas meet at the boundary; at least one of the two is 1.

    Encoder replica u and LLM replica v are of one group if ``u // fan_in == v // fan_out``.

    Attributes:
        fan_in: encoder replicas whose shards one LLM replica concatenates.
        fan_out: LLM replicas among which one encoder replica's shard is sliced.
    """

    fan_in: int
    fan_out: int


def is_integer_ratio(encoder_dp: int, llm_dp: int) -> bool:
    """Whether one degree is a multiple of the other."""
    return encoder_dp % llm_dp == 0 or llm_dp % encoder_dp == 0


def ratio_of(encoder: ModuleLayout, llm: ModuleLayout) -> Ratio:
    """The ratio of two layouts.

    Raises:
        IncompatibleError: if it is no integer.
    """
    if not is_integer_ratio(encoder.dp, llm.dp):
        raise IncompatibleError(
            f"layout: {encoder.module} has dp={encoder.dp}, {llm.module} has dp={llm.dp}: "
            "the batch-dimension transform needs one to be a multiple of the other"
        )
    return Ratio(max(1, encoder.dp // llm.dp), max(1, llm.dp // encoder.dp))


def is_colocated(encoder: ModuleLayout, llm: ModuleLayout) -> bool:
    """Whether both modules occupy exactly the same ranks."""
    return np.array_equal(np.unique(encoder.ranks), np.unique(llm.ranks))


def is_disjoint(encoder: ModuleLayout, llm: ModuleLayout) -> bool:
    """Whether the modules share no rank."""
    return not np.intersect1d(encoder.ranks, llm.ranks).size


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
                f"assignment: sample {shapes.sample_ids[owner[first]]} is encoded by replica {labels.replica[first]} "
                f"of {placed.dp} of {module.name}, which does not feed replica {consumer.replica[owner[first]]} of "
                f"{llm.dp} of {llm.module}"
            )
        late = np.flatnonzero(labels.microbatch > consumer.microbatch[owner]) if in_order else wrong
        if late.size:
            first = late[0]
            raise IncompatibleError(
                f"assignment: sample {shapes.sample_ids[owner[first]]} is in {module.name} microbatch "
                f"{labels.microbatch[first]} and already in {llm.module} microbatch "
                f"{consumer.microbatch[owner[first]]}; this schedule runs microbatches in order"
            )
