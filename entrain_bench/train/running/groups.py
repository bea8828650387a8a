"""Process groups of a rank: of every module and stage, of the experts that ranks divide, and of messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.base.arrays import IntArray
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.messages.rank_plan import copy_ranks
from entrain_bench.train.messages.transfers import Channels
from entrain_bench.train.modules.packing import ExpertGroups, StageGroups


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank, by module and stage; ``widths`` also by entry of ``ModuleLayout.widths``.

    ``tied`` are the ranks of an embedding's two copies; ``control`` is of all ranks over gloo, ``alone`` of this one.
    """

    stages: dict[tuple[int, int], StageGroups]
    widths: dict[tuple[int, int], dict[int, StageGroups]]
    tied: dict[int, dist.ProcessGroup]
    channels: Channels
    control: dist.ProcessGroup
    alone: dist.ProcessGroup


class GroupMaker:
    """Makes every distinct group once, for runtimes that take turns: gloo's threads wake often. Collective."""

    def __init__(self, control: dist.ProcessGroup, timeout_s: float, device: torch.device) -> None:
        self.control = control
        self.timeout = timedelta(seconds=timeout_s)
        everyone = tuple(range(control.size()))
        self.channels = Channels(lambda: self.new(everyone), device)
        self._known: dict[tuple[object, tuple[int, ...]], dist.ProcessGroup] = {}

    def make(self, ranks: tuple[int, ...], stage: tuple[int, int] | None = None) -> dist.ProcessGroup:
        """A group that all stages with these ranks use, or of a stage alone: gradients go when each stage is ready."""
        if (stage, ranks) not in self._known:
            self._known[stage, ranks] = self.new(ranks)
        return self._known[stage, ranks]

    def find(self, rows: IntArray, stage: tuple[int, int] | None = None) -> dist.ProcessGroup | None:
        """Make a group of each row of ranks ``[groups, ranks]``; return the one with this rank, None for none."""
        groups = {ranks: self.make(ranks, stage) for ranks in map(tuple, rows.tolist())}
        return next((group for ranks, group in groups.items() if dist.get_rank() in ranks), None)

    def new(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """A group of its own."""
        # A new group does not inherit the timeout of the default group: it would wait for half an hour.
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self.timeout)
        return group


def make_groups(
    model: ModelSpec, framework: FrameworkOptions, layout: Layout, maker: GroupMaker, *, slices: bool = True
) -> Groups:
    """Create all groups of a layout, and return this rank's; collective.

    Where stages take no ``slices`` of weights, a group of a wider TP divides tokens instead.
    """
    stages = dict[tuple[int, int], StageGroups]()
    widths = defaultdict[tuple[int, int], dict[int, StageGroups]](dict)
    tied = dict[int, dist.ProcessGroup]()
    alone = maker.find(np.arange(maker.control.size())[:, None])
    assert alone is not None
    for index, (spec, placed) in enumerate(zip(model.modules, layout.modules, strict=True)):
        if spec.config.tied_embeddings and not placed.is_closed:
            pair = maker.find(placed.ranks[:, [0, -1]].swapaxes(1, 2).reshape(-1, 2))
            tied |= {index: pair} if pair else {}
        for stage in range(placed.pp):
            rows = placed.ranks[:, stage].reshape(-1, placed.tp)
            tp = maker.find(rows)
            cp = maker.find(rows.reshape(-1, placed.cp, placed.tp).swapaxes(1, 2).reshape(-1, placed.cp))
            dp_cp = maker.find(rows.T, (index, stage))
            experts = _expert_groups(placed, rows, maker, (index, stage))
            if tp and cp and dp_cp:
                split = framework.of(spec).sequence_parallel
                stages[index, stage] = StageGroups(tp, cp, dp_cp, split, framework.cp_split, experts=experts)
            for degree, (width, copies) in enumerate(zip(placed.widths, copy_ranks(placed), strict=False)):
                wide = width[0] if slices else placed.tp
                rows = copies[:, stage].reshape(-1, wide)
                tp = maker.find(rows)
                deep = width[0] * width[1] // wide
                cp = maker.find(rows.reshape(-1, deep, wide).swapaxes(1, 2).reshape(-1, deep))
                if tp and cp:
                    groups = replace(stages[index, stage], tp=tp, cp=cp, weights_tp=placed.tp)
                    widths[index, stage][degree] = groups
    return Groups(stages, widths, tied, maker.channels, maker.control, alone)


def _expert_groups(
    placed: ModuleLayout, rows: IntArray, maker: GroupMaker, stage: tuple[int, int]
) -> ExpertGroups | None:
    """Groups for the experts of a stage on TP groups ``rows``; None for none."""
    if placed.ep == 1:
        return None
    # A process group numbers its ranks as they rise.
    blocks = np.sort(rows.reshape(-1, placed.ep, placed.tp), axis=1)
    ep = maker.find(blocks.swapaxes(1, 2).reshape(-1, placed.ep))
    tp_ep = maker.find(blocks.reshape(len(blocks), -1))
    same = maker.find(blocks.reshape(len(blocks), -1).T, stage)
    return ExpertGroups(ep, tp_ep, same) if ep and tp_ep and same else None
