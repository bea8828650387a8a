"""Process groups of a layout: made by every rank in the same order, as torch.distributed demands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.messages.rank_plan import Place, block_of, places_of, weights_of
from entrain_bench.train.messages.transfers import Channels
from entrain_bench.train.modules import StageGroups


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank, by module and stage; ``widths`` also by entry of ``ModuleLayout.widths``.

    ``tied`` are the ranks of an embedding's two copies; ``control`` is of all ranks over gloo, ``alone`` of this one.
    """

    stages: dict[tuple[int, int], StageGroups]
    widths: dict[tuple[int, int], dict[int, StageGroups]]
    tied: dict[int, dist.ProcessGroup]
    channels: Channels
    world: dist.ProcessGroup
    control: dist.ProcessGroup
    alone: dist.ProcessGroup


class GroupMaker:
    """Makes every distinct group once, for runtimes that take turns: gloo's threads wake often. Collective."""

    def __init__(self, control: dist.ProcessGroup, timeout_s: float, device: torch.device) -> None:
        self.control = control
        self.timeout = timedelta(seconds=timeout_s)
        everyone = tuple(range(control.size()))
        self.world = self.new(everyone)
        self.channels = Channels(lambda: self.new(everyone), device)
        self._known: dict[tuple[object, tuple[int, ...]], dist.ProcessGroup] = {}

    def make(self, ranks: tuple[int, ...], stage: tuple[int, int] | None = None) -> dist.ProcessGroup:
        """A group that all stages with these ranks use, or of a stage alone: gradients go when each stage is ready."""
        if (stage, ranks) not in self._known:
            self._known[stage, ranks] = self.new(ranks)
        return self._known[stage, ranks]

    def new(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """A group of its own."""
        # A new group does not inherit the timeout of the default group: it would wait for half an hour.
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self.timeout)
        return group


def make_groups(model: ModelSpec, framework: FrameworkOptions, layout: Layout, maker: GroupMaker) -> Groups:
    """Create all groups of a layout, and return this rank's; collective."""
    stages = dict[tuple[int, int], StageGroups]()
    tied = dict[int, dist.ProcessGroup]()
    widths = dict[tuple[int, int], dict[int, StageGroups]]()
    for rank in range(maker.control.size()):
        is_this = rank == dist.get_rank()
        maker.make((rank,))
        for place in weights_of(layout, rank):
            spec = model.modules[place.module]
            module = layout.modules[place.module]
            key = place.module, place.stage
            tp, cp, dp_cp = _members(module, place)
            split = framework.of(spec).sequence_parallel
            groups = StageGroups(maker.make(tp), maker.make(cp), maker.make(dp_cp, key), split, framework.cp_split)
            ends = tuple(dict.fromkeys(module.ranks[place.replica, [0, -1], place.position].tolist()))
            pair = maker.make(ends) if spec.config.tied_embeddings and len(ends) == 2 else None
            if is_this:
                stages[key] = groups
                widths[key] = {}
                if pair is not None and rank in ends:
                    tied[place.module] = pair
        for place in places_of(layout, rank):
            key = place.module, place.stage
            module = layout.modules[place.module]
            inside = [(members, maker.make(members)) for members in _inside(layout, place)]
            if is_this and module.widths:
                tp_group, cp_group = (group for members, group in inside if rank in members)
                degree = int(module.degree_of_copy[place.replica])
                widths[key][degree] = replace(stages[key], tp=tp_group, cp=cp_group, weights_tp=module.tp)
    alone = maker.make((dist.get_rank(),))
    return Groups(stages, widths, tied, maker.channels, maker.world, maker.control, alone)


def _inside(layout: Layout, place: Place) -> list[tuple[int, ...]]:
    """The tensor parallel groups of ranks of a group of a stage, then its context parallel ones."""
    placed = layout.modules[place.module]
    if not placed.widths:
        return []
    block = block_of(layout, place.module, place.replica, place.stage)
    tp, cp = placed.widths[int(placed.degree_of_copy[place.replica])]
    return [*(tuple(block[row * tp : (row + 1) * tp]) for row in range(cp)), *(tuple(block[i::tp]) for i in range(tp))]


def _members(module: ModuleLayout, place: Place) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Ranks of the tensor, the context, and the data and context parallel group of a place."""
    block = module.ranks[place.replica, place.stage]
    lane = place.position % module.tp
    row = place.position // module.tp
    tp = block[row * module.tp : (row + 1) * module.tp]
    cp = block[lane :: module.tp]
    dp_cp = module.ranks[:, place.stage, lane :: module.tp].ravel()
    return tuple(tp.tolist()), tuple(cp.tolist()), tuple(dp_cp.tolist())
