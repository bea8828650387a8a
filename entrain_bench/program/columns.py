"""The columns of a program, and a view of one action for people, tests and the training runtime."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from entrain_bench.base.arrays import BoolArray, IntArray
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes


class Pass(IntEnum):
    """Kind of an action: a pass of a chunk, or a stage's step at the end of the iteration.

    Where a module's backward is split, ``BACKWARD`` makes the gradients of a stage's inputs, ``WEIGHT`` those of its
    weights (arXiv:2401.10241, section 2); otherwise ``BACKWARD`` makes both.
    """

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
    chunk-major ``[C, S]``, then all backwards ``[C, S]``, then, if its backward is split, all weight passes ``[C, S]``;
    after the modules' actions come one gradient synchronisation and one optimizer step for each stage of each module,
    which occupy that stage's lanes of all replicas.

    Attributes:
        model, layout, shapes: what the program runs, where, on which samples.
        chunks: chunks of each module.
        first_action: first action of each module ``[modules + 1]``; the last entry is the first step action.
        module, stage, replica, chunk, kind: labels of each action ``[actions]``; chunk and replica are -1 for steps.
        num_lanes: lanes each action occupies ``[actions]``.
        lane_offsets, lane_actions: order of actions on every lane, CSR.
        dep_offsets, dep_actions: actions each action waits for, CSR.
        dep_bytes: bytes that travel along each dependency ``[dependencies]``; 0 for mere order.
        remade: for every module how many layers of a stage each chunk recomputes in its backward ``[chunks, stages]``
            (``recomputation``); empty if none does, but for modules that the layout recomputes.
    """

    model: ModelSpec
    layout: Layout
    shapes: SampleShapes
    chunks: tuple[Chunks, ...]
    first_action: IntArray
    module: IntArray
    stage: IntArray
    replica: IntArray
    chunk: IntArray
    kind: IntArray
    num_lanes: IntArray
    lane_offsets: IntArray
    lane_actions: IntArray
    dep_offsets: IntArray
    dep_actions: IntArray
    dep_bytes: IntArray
    remade: tuple[IntArray, ...] = ()

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
        first = self.layout.first_block[module]
        stages = self.layout.num_stages[module]
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
        members = () if chunk < 0 else tuple(chunks.members[chunks.offsets[chunk] : chunks.offsets[chunk + 1]].tolist())
        return ActionView(
            int(action),
            self.model.modules[module].name,
            int(self.stage[action]),
            int(self.replica[action]),
            labels[0],
            labels[1],
            Pass(int(self.kind[action])),
            members,
            self.group_name(action),
        )

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
