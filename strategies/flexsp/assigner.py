"""Samples to microbatches and groups, as FlexSP's solver chooses them for every batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import SequenceGroups, first_positions, grouped, room_bytes, unit_costs
from entrain_bench.balancing.rounds import Rounds, check_plane, round_labels
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .cutting import blasted
from .group_search import solved


@dataclass(frozen=True, slots=True)
class FlexibleGroups:
    """Microbatches of consecutive lengths, each with the groups that are through first.

    Attributes:
        trials: numbers of microbatches that are considered, from the least that memory allows on.
        buckets: of sequences in the solver's program.
        solver_work: for each microbatch, in CP-SAT's deterministic time (about seconds); 0: the greedy groups alone.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True

    trials: int = 5
    buckets: int = 16
    solver_work: float = 0.05

    def __post_init__(self) -> None:
        check_least(self, "strategy.assigner", 1, "trials", "buckets")
        check_least(self, "strategy.assigner", 0, "solver_work")

    def draft(self) -> FlexibleGroups:
        """Without integer programs."""
        return replace(self, solver_work=0.0)

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and microbatch of every unit.

        Raises:
            IncompatibleError: if the layout has no widths, or has stages.
            OutOfMemoryError: if the longest sample fits on no group.
        """
        model = profile.job.model
        llm = layout.modules[model.llm_index]
        check_plane(layout, "flexsp", "strategy/planner=flexsp")
        if llm.pp > 1:
            raise IncompatibleError(f"layout.pp={llm.pp}: must be 1 with strategy/assigner=flexsp")
        widths = np.array([cp for _, cp in llm.degrees])
        seconds, bytes_ = sample_costs(shapes, layout, profile)
        room = room_bytes(layout, profile)
        if room <= 0 or bytes_.max() > room * widths[-1]:
            raise OutOfMemoryError(
                f"assignment: the longest of {len(shapes)} samples does not fit on {widths[-1]} ranks"
            )
        order = np.argsort(shapes.llm_tokens, kind="stable")
        least = int(np.ceil(decisive(float(bytes_.sum()) / (room * llm.dp))))
        best: list[tuple[IntArray, SequenceGroups]] = []
        best_s = np.inf
        count = least
        last = least + self.trials
        while count <= len(shapes) and (count < last or not best):
            microbatches = self._microbatches(order, count, seconds, bytes_, widths, llm.dp, room)
            total_s = decisive(sum(groups.makespan_s for _, groups in microbatches)) if microbatches else np.inf
            if total_s < best_s:
                best = microbatches
                best_s = total_s
            count += 1
        number, first, width = np.zeros((3, len(shapes)), np.int64)
        for index, (mine, start) in enumerate(best):
            groups = solved(start, seconds[:, mine], bytes_[mine], widths, llm.dp, room, self.buckets, self.solver_work)
            begin = first_positions(groups.width)
            number[mine] = index
            first[mine] = begin[groups.group]
            width[mine] = groups.width[groups.group]
        return round_labels(model, shapes, layout, Rounds(number, first, width), spread=True)

    def _microbatches(
        self,
        order: IntArray,
        count: int,
        seconds: FloatArray,
        bytes_: FloatArray,
        widths: IntArray,
        num_ranks: int,
        room: float,
    ) -> list[tuple[IntArray, SequenceGroups]]:
        """Samples and greedy groups of each of so many microbatches; none if some do not fit in memory."""
        microbatch = blasted(bytes_[order], count)
        group_lists = []
        for number in range(int(microbatch.max()) + 1):
            mine = order[microbatch == number]
            groups = grouped(seconds[:, mine], bytes_[mine], widths, num_ranks, room)
            if groups is None:
                return []
            group_lists.append((mine, groups))
        return group_lists


def sample_costs(shapes: SampleShapes, layout: Layout, profile: Profile) -> tuple[FloatArray, FloatArray]:
    """Believed seconds of both passes of a sample on a group of each width, and bytes that the group shares.

    The LLM's as FlexSP has them, linear and quadratic in the length with communication by width, and the items' on one
    position each, shared out evenly over the group ``[widths, samples]``, ``[samples]``.
    """
    model = profile.job.model
    widths = np.array([cp for _, cp in layout.modules[model.llm_index].degrees])
    seconds = np.zeros((len(widths), len(shapes)))
    bytes_ = np.zeros(len(shapes))
    for module, placed in zip(model.modules, layout.modules, strict=True):
        owner = module.owners(shapes, module.units(shapes))
        unit_s, bytes_of_unit, _ = unit_costs(module, placed, shapes, profile)
        for level, width in enumerate(widths.tolist()):
            seconds[level] += np.bincount(
                owner, unit_s[level] if module is model.llm else unit_s[0] / width, len(shapes)
            )
        bytes_ += np.bincount(owner, bytes_of_unit, len(shapes))
    return seconds, bytes_
