"""Every phase balanced by itself, over all replicas, within a micro-step (arXiv:2503.23830)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.balancing import arrival_places
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError, UserError, unknown_choice
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.shapes import SampleShapes

from .balance import COSTS, balanced_batches, unit_costs
from .rearrangement import place_batches


@dataclass(frozen=True, slots=True)
class PostBalancing:
    """Micro-steps are those of arrival; inside one, the units of each encoder and of the LLM go to any replica.

    Attributes:
        cost: of a unit: its tokens (``linear``), or the FLOPs of its forward (``quadratic``).
        padded: modules whose batches count as padded to their longest unit.
        node_wise: whether batches are placed so that little leaves its node; otherwise batch i is on replica i.
    """

    cost: str = "quadratic"
    padded: tuple[str, ...] = ()
    node_wise: bool = True

    def __post_init__(self) -> None:
        if self.cost not in COSTS:
            raise unknown_choice("strategy.assigner.cost", self.cost, COSTS)
        if isinstance(self.padded, str):
            raise UserError(
                f"strategy.assigner.padded={self.padded}: must be a list of modules, such as [{self.padded}]"
            )

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every item and sample.

        Raises:
            UserError: for a padded module that the model does not have.
            IncompatibleError: if encoder and LLM differ in DP, so that they share no micro-steps.
        """
        job = profile.job
        names = [module.name for module in job.model.modules]
        for name in self.padded:
            if name not in names:
                raise unknown_choice("strategy.assigner.padded", name, names)
        *encoders, llm = layout.modules
        arrival, step = arrival_places(len(shapes), job.microbatch_size, llm.dp)
        node = _nodes(llm, job.cluster.gpus_per_node)

        def place(index: int, row: IntArray, home: IntArray, moved: IntArray) -> ModuleAssignment:
            module = job.model.modules[index]
            lengths = module.lengths(shapes, module.units(shapes))
            costs = unit_costs(module, lengths, self.cost)
            batch = balanced_batches(costs, row, llm.dp, padded=module.name in self.padded)
            return ModuleAssignment(place_batches(row, batch, home, moved, node) if self.node_wise else batch, row)

        samples = place(len(names) - 1, step, arrival, shapes.llm_tokens)
        items = []
        for index, (module, placed) in enumerate(zip(job.model.encoders, encoders, strict=True)):
            if placed.dp != llm.dp:
                raise IncompatibleError(
                    f"layout: {placed.module} has dp={placed.dp}, {llm.module} has dp={llm.dp}: phases are balanced "
                    f"over the same replicas"
                )
            units = module.units(shapes)
            owner = shapes.item_sample[units]
            items.append(place(index, step[owner], samples.replica[owner], shapes.item_llm_tokens[units]))
        return Assignment((*items, samples))


def _nodes(placed: ModuleLayout, gpus_per_node: int) -> IntArray:
    """Node of each replica's first rank, numbered from 0 ``[replicas]``."""
    _, number = np.unique(placed.ranks[:, 0, 0] // gpus_per_node, return_inverse=True)
    return np.asarray(number.ravel(), np.int64)
