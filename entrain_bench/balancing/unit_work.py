"""Samples in packs on groups of several widths: units of a pack may share its ranks in narrower groups."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from entrain_bench.balancing.lpt import deal
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import unit_costs
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.program.assignment import ModuleAssignment
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


class UnitWork(NamedTuple):
    """Units of a module on groups of every degree. Units of a pack may share its ranks in narrower groups."""

    module: ModuleSpec
    placed: ModuleLayout
    shapes: SampleShapes
    seconds: FloatArray  # of a unit ``[degrees, units]``
    bytes_: FloatArray  # of a unit on the narrowest group ``[units]``
    pack_s: FloatArray  # fixed seconds of a pack ``[degrees]``

    @classmethod
    def of(cls, module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, profile: Profile) -> Self:
        """Return the estimated work of a batch's units."""
        return cls(module, placed, shapes, *unit_costs(module, placed, shapes, profile))

    @property
    def owner(self) -> IntArray:
        """Sample of each unit ``[units]``."""
        return self.module.owners(self.shapes, self.module.units(self.shapes))

    @property
    def ranks(self) -> IntArray:
        """Ranks of a group ``[degrees]``."""
        return np.array([tp * cp for tp, cp in self.placed.degrees])

    def on_widths(self, widths: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return seconds of samples in packs of some widths, in ranks ``[widths, samples]``.

        Further: their bytes on the narrowest width ``[samples]``, and the fixed seconds of a pack ``[widths]``.
        """
        count = len(self.shapes)
        owner = self.owner
        sums = np.stack([np.bincount(owner, unit_s, count) for unit_s in self.seconds])
        longest = np.zeros_like(sums)
        for row, unit_s in zip(longest, self.seconds, strict=True):
            np.maximum.at(row, owner, unit_s)
        seconds = np.zeros((len(widths), count))
        pack_s = np.zeros(len(widths))
        for level, width in enumerate(widths.tolist()):
            groups = np.maximum(width // self.ranks, 1)[:, None]
            # The narrowest packs hold many samples, whose units fill all groups.
            alone = longest if level else 0.0
            options = np.where(self.ranks[:, None] <= width, np.maximum(sums / groups, alone), np.inf)
            best = int(decisive(options.sum(axis=1) + self.pack_s).argmin())
            seconds[level] = options.min(axis=0)
            pack_s[level] = self.pack_s[best]
        return seconds, np.bincount(owner, self.bytes_, count) * self.placed.tp / widths[0], pack_s

    def labels(self, pack: IntArray, number: IntArray, first: IntArray, width: IntArray) -> ModuleAssignment:
        """Return each unit's group, of the degree with which its pack's units end first; its round is its sample's.

        Of samples: their packs, rounds, and the packs' first ranks and widths ``[samples]``.
        """
        owner = self.owner
        pack = pack[owner]
        first = first[owner]
        width = width[owner]
        num_packs = 1 + int(pack.max(initial=-1))
        ends_s = np.full(num_packs, np.inf)
        replica = np.zeros(len(owner), np.int64)
        starts = offsets_from_counts(self.placed.num_groups)
        for degree, (ranks, unit_s) in enumerate(zip(self.ranks.tolist(), decisive(self.seconds), strict=True)):
            groups = np.zeros(num_packs, np.int64)
            groups[pack] = width // ranks
            place = deal(np.argsort(-unit_s, kind="stable"), pack, unit_s, np.maximum(groups, 1))
            load_s = np.zeros((num_packs, int(groups.max(initial=1)) or 1))
            np.add.at(load_s, (pack, place), unit_s)
            spans_s = np.where(groups > 0, decisive(load_s.max(axis=1) + self.pack_s[degree]), np.inf)
            faster = (spans_s < ends_s)[pack]
            ends_s = np.minimum(ends_s, spans_s)
            replica = np.where(faster, starts[degree] + first // ranks + place, replica)
        return ModuleAssignment(replica, number[owner])
