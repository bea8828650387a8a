"""An assigner whose estimates are corrected by executed iterations."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_durations, packed_units_s
from entrain_bench.balancing.estimates import MODULE_CLASSES, Corrector, Observation, shape_classes
from entrain_bench.balancing.interface import Assigner, Drafter, Observer, declares
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import FloatArray, rows_of
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.shapes import SampleShapes

# Weight of a class's last ratio: as strong as the data of an average class. With a hundredth, as for DFLOP, noise of
# 20% on passes makes Braid up to 3% slower (simulated, 2026-11).
RIDGE = 1.0


@dataclass(frozen=True, slots=True)
class CorrectedAssigner:
    """Wraps an assigner: its estimates are corrected by measured times of units of about the same length.

    Attributes:
        base: the wrapped assigner.
        correction: factors learned from executed iterations.
    """

    base: Assigner
    correction: Corrector

    @property
    def handles_generators(self) -> bool:
        """Whether ``base`` handles generators."""
        return declares(self.base, "handles_generators")

    @property
    def handles_widths(self) -> bool:
        """Whether ``base`` handles widths."""
        return declares(self.base, "handles_widths")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Return the labels that ``base`` gives with corrected estimates."""
        return self.base.assign(shapes, layout, profile.corrected(self.correction))

    def draft(self) -> Self:
        """Return this assigner with the draft of ``base``, if it has one."""
        return replace(self, base=self.base.draft()) if isinstance(self.base, Drafter) else self

    def observe(self, timeline: Timeline, profile: Profile) -> Self:
        """Return the assigner that has learned from executed passes; ``base`` observes them, too, if it can."""
        base = self.base.observe(timeline, profile) if isinstance(self.base, Observer) else self.base
        if not self.correction.active:
            return replace(self, base=base)
        program = timeline.program
        modules = profile.job.model.modules
        seen = []
        # Unless a chunk is so short that it takes the least time, estimates of passes are linear in those of units.
        twice = Corrector(ratios=dict.fromkeys(range(MODULE_CLASSES * len(modules)), 2.0))
        believed_s, doubled_s = np.zeros((2, program.num_actions))
        for seconds, view in ((believed_s, profile), (doubled_s, profile.corrected(twice))):
            seconds[: program.first_action[-1]] = packed_durations(program, view)
        units_s = doubled_s - believed_s
        believed_s = profile.programs.with_weights_s(program, believed_s)
        passes = slice(int(program.first_action[-1]))
        seconds = timeline.end_s - timeline.start_s
        # The fixed part of a pass is estimated; a machine that is slower overall is also slower there.
        seconds = seconds - (believed_s - units_s) * (seconds[passes].sum() / believed_s[passes].sum())
        for index, (module, placed) in enumerate(zip(modules, program.layout.modules, strict=True)):
            chunks = program.chunks[index]
            units = module.units(program.shapes)
            groups = placed.expert_groups
            kinds_s = packed_units_s(module, program.shapes, *placed.degrees[0], profile, groups=groups).sum(axis=0)
            added_s = matmul(kinds_s, np.bincount(module.layer_kind, minlength=len(module.kinds)))
            # Shares of units in a chunk are about the same at other degrees, and with recomputation.
            row = rows_of(chunks.offsets)
            own_s = added_s[np.searchsorted(units, chunks.members)]
            share = own_s / np.bincount(row, own_s, len(chunks))[row]
            seen.append(observed(program, index, share * _both_s(program, index, units_s)[row], seconds))
        return replace(self, base=base, correction=self.correction.learn(seen, RIDGE))


def observed(program: Program, index: int, believed_s: FloatArray, seconds: FloatArray) -> Observation:
    """Return a module's executed microbatches from seconds ``[actions]`` and estimates of units ``[members]``."""
    module = program.model.modules[index]
    placed = program.layout.modules[index]
    chunks = program.chunks[index]
    lengths = module.lengths(program.shapes, chunks.members)
    classes, column = np.unique(shape_classes(lengths, index), return_inverse=True)
    predicted = np.zeros((len(chunks), len(classes)))
    np.add.at(predicted, (rows_of(chunks.offsets), column), believed_s)
    num_groups = placed.num_groups[placed.degree_of_copy[chunks.replica]]
    return Observation(classes, predicted, _both_s(program, index, seconds), num_groups)


def _both_s(program: Program, index: int, seconds: FloatArray) -> FloatArray:
    """Seconds of forward and backward of a module's chunks, means over stages ``[chunks]``."""
    both = seconds[program.forward_actions(index)] + seconds[program.backward_actions(index)]
    return np.asarray(both.mean(axis=1))
