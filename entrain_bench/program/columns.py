"""The columns of a program, a view of one action, and which layers its chunks recompute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.errors import require
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


class Pass(IntEnum):
    """Kind of an action; ``WEIGHT`` makes weights' gradients of a split backward (arXiv:2401.10241, section 2)."""

    FORWARD = 0
    BACKWARD = 1
    GRAD_SYNC = 2
    OPTIMIZER = 3
    WEIGHT = 4


@dataclass(frozen=True, slots=True)
class ActionView:
    """One action as an object."""

    index: int
    module: str
    stage: int
    replica: int
    microbatch: int
    part: int
    kind: Pass
    members: tuple[int, ...]
    group: str = ""

    def __str__(self) -> str:
        if self.kind in (Pass.GRAD_SYNC, Pass.OPTIMIZER):
            return f"{self.kind.name.lower()} of {self.module} stage {self.stage}"
        part = f" part {self.part}" if self.part else ""
        place = f"stage {self.stage} of replica {self.replica}"
        if self.group:
            place = f"{self.group}, stage {self.stage}"
        return f"{self.kind.name.lower()} of {self.module} microbatch {self.microbatch}{part} on {place}"


@dataclass(frozen=True, slots=True)
class Program:
    """A program as a struct of arrays.

    Actions of module ``m`` with ``C`` chunks and ``S`` stages are numbered from ``first_action[m]``: all forwards,
    chunk-major ``[C, S]``, then all backwards ``[C, S]``, then, if its backward is split, all weight passes ``[C, S]``.
    Then come one gradient synchronization and one optimizer step per stage of each module, on the stage's lanes of all
    replicas.
    """

    model: ModelSpec
    layout: Layout
    shapes: SampleShapes
    chunks: tuple[Chunks, ...]
    first_action: IntArray  # of each module ``[modules + 1]``; the last entry is the first step action
    module: IntArray  # of each action ``[actions]``, as all labels
    stage: IntArray
    replica: IntArray  # -1 for steps
    chunk: IntArray  # -1 for steps
    kind: IntArray
    num_lanes: IntArray  # that each action occupies ``[actions]``
    lane_offsets: IntArray  # order of actions on every lane, CSR
    lane_actions: IntArray
    dep_offsets: IntArray  # actions that each action waits for, CSR
    dep_actions: IntArray
    dep_bytes: IntArray  # that travel along each dependency ``[dependencies]``; 0 for mere order
    remade: tuple[
        IntArray, ...
    ] = ()  # of each module, layers that chunks recompute ``[chunks, stages]``; none if empty

    @property
    def num_actions(self) -> int:
        """Number of actions."""
        return len(self.module)

    def spans(self, module: int) -> tuple[slice, slice, slice]:
        """Where a module's forwards, backwards and weight passes are among the actions; the last may be empty."""
        first = int(self.first_action[module])
        count = len(self.chunks[module]) * self.layout.modules[module].pp
        forward = slice(first, first + count)
        backward = slice(first + count, first + 2 * count)
        return forward, backward, slice(backward.stop, int(self.first_action[module + 1]))

    def forward_actions(self, module: int) -> IntArray:
        """Action numbers of a module's forwards ``[chunks, stages]``; its backwards follow at + chunks * stages."""
        return self._actions(module, Pass.FORWARD)

    def backward_actions(self, module: int) -> IntArray:
        """Action numbers of a module's backwards ``[chunks, stages]``."""
        return self._actions(module, Pass.BACKWARD)

    def weight_actions(self, module: int) -> IntArray:
        """Action numbers of a module's weight passes ``[chunks, stages]``; ``[0, stages]`` if it has none."""
        return self._actions(module, -1)

    def _actions(self, module: int, which: int) -> IntArray:
        span = self.spans(module)[which]
        return np.arange(span.start, span.stop).reshape(-1, self.layout.modules[module].pp)

    def splits_backward(self, module: int) -> bool:
        """Whether a module's backward is split into two passes."""
        weight = self.spans(module)[-1]
        return bool(weight.start < weight.stop)

    def blocks(self, actions: IntArray) -> IntArray:
        """Block of each of the given passes, numbered through all modules."""
        module = self.module[actions]
        stages = np.array([blocks.num_stages for blocks in self.layout.blocks])[module]
        first = np.cumsum([0, *(len(blocks.rank_set) for blocks in self.layout.blocks)])[module]
        return np.asarray(first + self.replica[actions] * stages + self.stage[actions])

    @property
    def is_pass(self) -> BoolArray:
        """Whether each action is a pass of a chunk rather than a step ``[actions]``."""
        return np.asarray(self.chunk >= 0)

    def view(self, action: int) -> ActionView:
        """One action as an object."""
        module = int(self.module[action])
        chunk = int(self.chunk[action])
        chunks = self.chunks[module]
        labels = (-1, 0) if chunk < 0 else (int(chunks.microbatch[chunk]), int(chunks.part[chunk]))
        members = () if chunk < 0 else tuple(chunks.units(chunk).tolist())
        place = self.model.modules[module].name, int(self.stage[action]), int(self.replica[action])
        kind = Pass(int(self.kind[action]))
        return ActionView(int(action), *place, *labels, kind, members, self.group_name(action))

    def group_name(self, action: int) -> str:
        """Name the ranks and degrees that run a pass, such as ``ranks 4-7 cp4``; empty if groups are replicas."""
        placed = self.layout.modules[self.module[action]]
        replica = int(self.replica[action])
        if len(placed.widths) < 2 or replica < 0:
            return ""
        blocks = self.layout.blocks[self.module[action]]
        block = replica * blocks.num_stages + int(self.stage[action])
        low = int(blocks.low[block])
        high = int(blocks.high[block])
        tp, cp = placed.degrees[placed.degree_of_copy[replica]]
        ranks = f"rank {low}" if low == high else f"ranks {low}-{high}"
        return " ".join([ranks, *[f"tp{tp}"] * (tp > 1), *[f"cp{cp}"] * (cp > 1)])

    def lane(self, lane: int) -> list[ActionView]:
        """The ordered actions of one lane."""
        return [self.view(a) for a in self.lane_actions[self.lane_offsets[lane] : self.lane_offsets[lane + 1]]]


def covered_layers(module: ModuleSpec) -> BoolArray:
    """Layers that recomputation covers ``[layers]``: megatron-core recomputes blocks, not the ends."""
    return np.array([layer.recomputed for layer in module.layers])


def covered_per_stage(module: ModuleSpec, layers_per_stage: Sequence[int]) -> IntArray:
    """Return the maximum number of layers that a chunk can recompute on each stage ``[stages]``."""
    return np.add.reduceat(covered_layers(module).astype(np.int64), np.cumsum([0, *layers_per_stage[:-1]]))


def remade_kinds(module: ModuleSpec, layers_per_stage: Sequence[int], remade: IntArray) -> FloatArray:
    """Return the layers of each kind that chunks recompute, the first ones of a stage ``[chunks, stages, kinds]``."""
    covered = np.flatnonzero(covered_layers(module))
    stage = np.repeat(np.arange(len(layers_per_stage)), layers_per_stage)[covered]
    place = np.arange(len(covered)) - np.searchsorted(stage, stage)
    # Entry n of a stage: of its first n covered layers.
    counts = np.zeros((len(layers_per_stage), 1 + max(layers_per_stage), len(module.kinds)))
    counts[stage, 1 + place, module.layer_kind[covered]] = 1.0
    return np.asarray(counts.cumsum(axis=1)[np.arange(len(layers_per_stage)), remade])


def recompute_chunks(program: Program, remade: Sequence[IntArray]) -> Program:
    """The program with chunks that recompute covered layers ``[chunks, stages]``; ``UserError`` for too many."""
    for module, placed, rows, layers in zip(
        program.model.modules, program.layout.modules, program.chunks, remade, strict=True
    ):
        where = f"program.remade.{module.name}"
        require(layers.shape == (len(rows), placed.pp), where, layers.shape, f"of shape {(len(rows), placed.pp)}")
        most = covered_per_stage(module, placed.layers_per_stage)
        fits = bool(np.all((layers >= 0) & (layers <= most)))
        require(fits, where, layers.max(initial=0), f"in [0, n], n = {most.tolist()} on its stages")
        require(not (placed.recompute and layers.any()), where, "given", "0 where the layout recomputes the module")
    return replace(program, remade=tuple(remade) if any(layers.any() for layers in remade) else ())
