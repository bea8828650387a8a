"""Process groups of a layout: made by every rank in the same order, as torch.distributed demands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Job
from entrain_bench.train.messages.channels import Channels, Place, block_of, places_of, weights_of
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


def make_groups(job: Job, layout: Layout, maker: GroupMaker) -> Groups:
    """Create all groups of a layout; collective."""
    for other in range(maker.control.size()):
        maker.make((other,))
    modules = list(zip(job.model.modules, layout.modules, strict=True))
    for index, (spec, module) in enumerate(modules):
        for replica, position in product(range(module.dp), range(module.ranks_per_block)):
            for stage in range(module.pp):
                for members in _members(module, Place(index, replica, stage, position))[:2]:
                    maker.make(members)
            if spec.config.tied_embeddings:
                maker.make(_tied_pair(module, replica, position))
        for stage, position in product(range(module.pp), range(module.tp)):
            maker.make(_members(module, Place(index, 0, stage, position))[2], (index, stage))
        for group, stage in product(range(module.copies if module.widths else 0), range(module.pp)):
            for members in _inside(layout, index, stage, group):
                maker.make(members)
    rank = dist.get_rank()
    stages = dict[tuple[int, int], StageGroups]()
    tied = dict[int, dist.ProcessGroup]()
    for place in weights_of(layout, rank):
        spec, module = modules[place.module]
        key = place.module, place.stage
        tp, cp, dp_cp = _members(module, place)
        split = job.framework.of(spec).sequence_parallel
        stages[key] = StageGroups(maker.make(tp), maker.make(cp), maker.make(dp_cp, key), split, job.framework.cp_split)
        if spec.config.tied_embeddings and place.stage in (0, module.pp - 1):
            pair = _tied_pair(module, place.replica, place.position)
            if len(pair) == 2:
                tied[place.module] = maker.make(pair)
    widths: dict[tuple[int, int], dict[int, StageGroups]] = {key: {} for key in stages}
    for place in places_of(layout, rank):
        module = layout.modules[place.module]
        key = (place.module, place.stage)
        if module.widths:
            own_tp, own_cp = (maker.make(ranks) for ranks in _inside(layout, *key, place.replica) if rank in ranks)
            widths[key][int(module.degree_of_copy[place.replica])] = replace(
                stages[key], tp=own_tp, cp=own_cp, weights_tp=module.tp
            )
    return Groups(stages, widths, tied, maker.channels, maker.world, maker.control, maker.make((rank,)))


def _inside(layout: Layout, module: int, stage: int, group: int) -> list[tuple[int, ...]]:
    """The tensor parallel groups of ranks of a group of a stage, then its context parallel ones."""
    placed = layout.modules[module]
    block = block_of(layout, module, group, stage)
    tp, cp = placed.widths[int(placed.degree_of_copy[group])]
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


def _tied_pair(module: ModuleLayout, replica: int, position: int) -> tuple[int, ...]:
    first = int(module.ranks[replica, 0, position])
    last = int(module.ranks[replica, -1, position])
    return tuple(dict.fromkeys((first, last)))
