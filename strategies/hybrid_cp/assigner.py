"""Samples to groups and rounds, as Megatron-LM's schedulers of context-parallel groups choose them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.options import check_choices, check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import first_positions
from entrain_bench.balancing.rounds import Rounds, check_plane, mean_tokens, round_labels
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .group_assignment import Group, dev_rounds, main_rounds

SCHEDULERS = ("dev", "main")
ENCODERS = ("spread", "shared")


@dataclass(frozen=True, slots=True)
class GroupsByLength:
    """Groups by LLM tokens alone; a sample's items are processed by its group.

    Attributes:
        scheduler: ``dev`` makes rounds in which every rank has one pack; ``main`` runs every sample alone, one after
            another in its group, and needs PP 1.
        max_tokens: LLM tokens of a rank in a round at most, Megatron-LM's ``max_seqlen_per_dp_cp_rank``; None: what it
            has on average in the rounds of the layout. Raised for a batch whose longest sample needs more on all ranks.
        encoders: whether the items of a pack are dealt out to the ranks of its group (``spread``), or each is shared by
            all of them by context parallelism (``shared``). Megatron-LM's schedulers do not know encoders.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True

    scheduler: str = "dev"
    max_tokens: int | None = None
    encoders: str = "shared"

    def __post_init__(self) -> None:
        check_choices(self, "strategy.assigner", scheduler=SCHEDULERS, encoders=ENCODERS)
        check_least(self, "strategy.assigner", 1, "max_tokens")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and round of every unit.

        Raises:
            IncompatibleError: for a layout without widths, a DP x CP that is no power of two, and stages with ``main``.
        """
        model = profile.job.model
        llm = layout.modules[model.llm_index]
        check_plane(layout, "hybrid_cp", "strategy/planner=hybrid_cp")
        if self.scheduler == "main" and llm.pp > 1:
            raise IncompatibleError(f"layout.pp={llm.pp}: must be 1 with strategy.assigner.scheduler=main")
        if llm.dp & (llm.dp - 1):
            raise IncompatibleError(f"layout: DP x CP is {llm.dp}, must be a power of two, as groups are")
        tokens = np.asarray(shapes.llm_tokens, np.int64)
        capacity = max(self.max_tokens or mean_tokens(profile, layout), -(-int(tokens.max()) // llm.dp))
        if self.scheduler == "dev":
            rounds = one_pack_a_round(dev_rounds(tokens, llm.dp, capacity), len(shapes))
        else:
            rounds = one_sample_a_round(main_rounds(tokens, llm.dp, capacity), len(shapes))
        return round_labels(model, shapes, layout, rounds, spread=self.encoders == "spread")


def one_pack_a_round(rounds: list[list[Group]], num_samples: int) -> Rounds:
    """Each group's samples as one pack of its round."""
    number, first, width = np.zeros((3, num_samples), np.int64)
    for index, groups in enumerate(rounds):
        for group, start in _placed(groups):
            number[group.samples] = index
            first[group.samples] = start
            width[group.samples] = group.width
    return Rounds(number, first, width)


def one_sample_a_round(rounds: list[list[Group]], num_samples: int) -> Rounds:
    """Each group's samples one after another; the groups of a round begin together in their numbers."""
    number, first, width = np.zeros((3, num_samples), np.int64)
    begin = 0
    for groups in rounds:
        for group, start in _placed(groups):
            number[group.samples] = begin + np.arange(len(group.samples))
            first[group.samples] = start
            width[group.samples] = group.width
        begin += max(len(group.samples) for group in groups)
    return Rounds(number, first, width)


def _placed(groups: list[Group]) -> list[tuple[Group, int]]:
    """Groups with their first positions."""
    return list(zip(groups, first_positions(np.array([group.width for group in groups])).tolist(), strict=True))
