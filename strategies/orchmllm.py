"""OrchMLLM (arXiv:2503.23830): every phase balanced separately, over all replicas, within a micro-step.

Batch post-balancing forms the batches of a phase; node-wise rearrangement places them. The layout is FSDP's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from scipy.optimize import linear_sum_assignment

from entrain_bench.balancing.lpt import arrival_places, longest_first_by_row
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import step_assignment
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError, unknown_choice
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import OneOf
from entrain_bench.specs.shapes import SampleShapes

# Halvings of the interval in which the least cost of the longest padded batch lies: a double has 53 bits.
BISECTIONS = 60


def balanced_batches(cost: FloatArray, row: IntArray, num_batches: int, *, padded: bool) -> IntArray:
    """Batch of each unit among those of its row, a micro-step ``[units]``: LPT by sums of packed batches.

    In a padded batch every unit costs as much as the longest, so a batch is consecutive units of the sorted row.
    """
    if not padded:
        return longest_first_by_row(cost, row, num_batches)
    rounded = decisive(cost)
    batch = np.zeros(len(cost), np.int64)
    for step in np.unique(row):
        mine = np.flatnonzero(row == step)
        rising = mine[np.argsort(rounded[mine], kind="stable")]
        batch[rising] = cut_padded(rounded[rising], num_batches)
    return batch


def cut_padded(rising: FloatArray, num_batches: int) -> IntArray:
    """Cut units, sorted by cost, into batches with the least maximum cost (number of units times largest unit)."""
    if not len(rising):
        return np.zeros(0, np.int64)
    # Nothing is cheaper than the dearest unit alone, and all in one batch is always possible.
    low = float(rising[-1])
    high = float(len(rising) * rising[-1])
    if _fill(rising, low)[-1] < num_batches:
        high = low
    for _ in range(BISECTIONS if high > low else 0):
        middle = (low + high) / 2
        if _fill(rising, middle)[-1] < num_batches:
            high = middle
        else:
            low = middle
    return np.asarray(_fill(rising, high))


@njit()
def _fill(rising, most):  # type: ignore[no-untyped-def]
    """Return the batch of each unit if each batch takes as many units as cost at most ``most``."""
    batch = np.empty(len(rising), np.int64)
    number = 0
    count = 0
    for unit in range(len(rising)):
        if count and (count + 1) * rising[unit] > most:
            number = number + 1
            count = 0
        batch[unit] = number
        count += 1
    return batch


def place_batches(row: IntArray, batch: IntArray, home: IntArray, tokens: IntArray, node: IntArray) -> IntArray:
    """Return each unit's replica: the batches of a row (micro-step) go to different replicas ``[units]``.

    A unit has a batch, a home replica that it comes from or goes to, and tokens that move if it is elsewhere
    ``[units]``; ``node`` is that of each replica ``[replicas]``.
    """
    dp = len(node)
    replica = np.zeros(len(batch), np.int64)
    for step in np.unique(row):
        mine = np.flatnonzero(row == step)
        # Tokens of batch b whose home is replica r [batches, replicas].
        volume = np.bincount(batch[mine] * dp + home[mine], weights=tokens[mine], minlength=dp * dp).reshape(dp, dp)
        replica[mine] = _replica_of_batches(volume.astype(np.int64), node)[batch[mine]]
    return replica


def _replica_of_batches(volume: IntArray, node: IntArray) -> IntArray:
    """Replica of each batch ``[batches]``, by tokens of batch b at home on replica r ``[batches, replicas]``."""
    num_nodes = int(node.max()) + 1
    on_node = np.zeros((len(volume), num_nodes), np.int64)
    np.add.at(on_node.T, node, volume.T)
    # Tokens that stay on the node outweigh all that stay on the replica; sums of such integers are exact.
    stays = on_node[:, node] * (int(volume.sum()) + 1) + volume
    _, columns = linear_sum_assignment(stays, maximize=True)
    return np.asarray(columns, np.int64)


@dataclass(frozen=True, slots=True)
class PostBalancing:
    """Micro-steps are those of arrival; inside one, the units of each encoder and of the LLM go to any replica.

    With groups of several widths, units of every module take those that end first by estimated seconds. Groups are
    placed by width, not by node, and no module counts as padded.

    Attributes:
        cost: of a unit: its tokens (``linear``), or the FLOPs of its forward (``quadratic``).
        padded: modules whose batches count as padded to their longest unit.
        node_wise: whether batches are placed so that little leaves its node; otherwise batch i is on replica i.
    """

    handles_widths: ClassVar[bool] = True
    cost: Annotated[str, OneOf(("linear", "quadratic"))] = "quadratic"
    padded: tuple[str, ...] = ()
    node_wise: bool = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every item and sample; ``IncompatibleError`` if encoder and LLM differ in DP."""
        job = profile.job
        names = [module.name for module in job.model.modules]
        for name in self.padded:
            if name not in names:
                raise unknown_choice("strategy.assigner.padded", name, names)
        if layout.modules[0].widths:
            return step_assignment(shapes, layout, profile, balanced=names)
        *encoders, llm = layout.modules
        arrival, step = arrival_places(len(shapes), job.microbatch_size, llm.dp)
        # Node of each replica's first rank, numbered from 0.
        _, number = np.unique(llm.ranks[:, 0, 0] // job.cluster.gpus_per_node, return_inverse=True)
        node = np.asarray(number, np.int64)

        def place(index: int, row: IntArray, home: IntArray, moved: IntArray) -> ModuleAssignment:
            module = job.model.modules[index]
            lengths = module.lengths(shapes, module.units(shapes))
            costs = module.forward_flops(lengths) if self.cost == "quadratic" else lengths.astype(np.float64)
            batch = balanced_batches(costs, row, llm.dp, padded=module.name in self.padded)
            return ModuleAssignment(place_batches(row, batch, home, moved, node) if self.node_wise else batch, row)

        samples = place(len(names) - 1, step, arrival, shapes.llm_tokens)
        items = []
        for index, (module, placed) in enumerate(zip(job.model.encoders, encoders, strict=True)):
            if placed.dp != llm.dp:
                raise IncompatibleError(
                    f"layout: {placed.module} has dp={placed.dp}, {llm.module} has dp={llm.dp}: must be equal, "
                    f"because phases are balanced over the same replicas"
                )
            units = module.units(shapes)
            owner = shapes.item_sample[units]
            items.append(place(index, step[owner], samples.replica[owner], shapes.item_llm_tokens[units]))
        return Assignment((*items, samples))
