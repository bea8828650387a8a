"""``harness=emulate``: measured passes and optimizer steps, modelled communication; torch is imported to measure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Annotated, ClassVar, Literal

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.truth import CostTruth, Prices
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.simulate.executor import Simulator, make_timeline
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import Count, OneOf, at_least
from entrain_bench.train.settings import DEVICES, quiet, refuse_generators


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage of a module as one of its ranks holds it, by kind of each layer; stages with the same kinds are equal."""

    module: str
    kinds: tuple[int, ...]
    tp: int
    cp: int
    dp: int
    recompute: bool
    widths: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StageWork:
    """The passes of a chunk on a stage; ``lengths`` are tokens of each packed sequence.

    ``outputs`` (LLM tokens of items) are of an encoder's last stage, ``num_projected`` tokens of the LLM's first stage.
    The first ``remade`` blocks are recomputed.
    """

    stage: StageShape
    lengths: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    num_projected: int = 0
    splits_backward: bool = False
    remade: int = 0
    degree: int = 0


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of a forward, a backward, and a weight pass if there is one."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0


def stage_shapes(module: ModuleSpec, placed: ModuleLayout) -> list[StageShape]:
    """The stages of a module under a layout, in order."""
    how = placed.tp, placed.cp, placed.dp, placed.recompute, placed.widths
    kinds = np.split(module.layer_kind, np.cumsum(placed.layers_per_stage)[:-1])
    return [StageShape(module.name, tuple(of_stage.tolist()), *how) for of_stage in kinds]


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The passes of a lane, the idle seconds before each, and the ranks that run them together."""

    actions: IntArray
    waits_s: FloatArray
    first_rank: int
    num_ranks: int


def lane_orders(program: Program, timeline: Timeline | None = None) -> list[LaneOrder]:
    """The passes of every lane that has any, with the waits of a timeline of the program, or none."""
    orders = []
    firsts = program.layout.lane_first_rank.tolist()
    lanes = np.split(program.lane_actions, program.lane_offsets[1:-1])
    for actions, first, width in zip(lanes, firsts, program.layout.lane_width.tolist(), strict=True):
        passes = actions[program.is_pass[actions]]
        waits_s = np.zeros(len(passes))
        if timeline is not None and len(passes):
            before_s = np.append(0.0, timeline.end_s[passes[:-1]])
            waits_s = np.maximum(timeline.start_s[passes] - before_s, 0.0)
        if len(passes):
            orders.append(LaneOrder(passes, waits_s, first, width))
    return orders


def works_of(program: Program) -> dict[int, StageWork]:
    """The work that every pass belongs to, by action."""
    works = dict[int, StageWork]()
    shapes = program.shapes
    projected_of = shapes.llm_tokens - shapes.text_tokens
    for index, (module, chunks) in enumerate(zip(program.model.modules, program.chunks, strict=True)):
        placed = program.layout.modules[index]
        splits = program.splits_backward(index)
        passes = [program.forward_actions(index), program.backward_actions(index)]
        passes += [program.weight_actions(index)] if splits else []
        for chunk in range(len(chunks)):
            members = chunks.units(chunk)
            lengths = tuple(module.lengths(shapes, members).tolist())
            outputs = tuple(shapes.item_llm_tokens[members].tolist()) if module.is_encoder else ()
            projected = 0 if module.is_encoder else int(projected_of[members].sum())
            degree = int(placed.degree_of_copy[chunks.replica[chunk]])
            for place, stage in enumerate(stage_shapes(module, placed)):
                remade = int(program.remade[index][chunk, place]) if program.remade else 0
                work = StageWork(
                    stage,
                    lengths,
                    outputs if place == placed.pp - 1 else (),
                    0 if place else projected,
                    splits,
                    remade,
                    degree,
                )
                works |= {int(actions[chunk, place]): work for actions in passes}
    return works


DTYPES = ("float32", "bfloat16")  # by torch's names


@dataclass(slots=True)
class Measured:
    """Measurements so far."""

    passes: dict[StageWork, PassSeconds] = field(default_factory=dict)
    optimizer_s: dict[StageShape, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Emulator:
    """Runs passes on one device, rank by rank, equal ones once (``measured`` grows); the cost truth prices the rest."""

    trains: ClassVar[Literal[False]] = False

    truth: CostTruth
    memory_budget_bytes: float
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    dtype: Annotated[str, OneOf(DTYPES)] = "bfloat16"
    num_warm_ups: Annotated[int, at_least(0)] = 1
    num_repetitions: Count = 5
    measured: Measured = field(default_factory=Measured, repr=False)

    def __post_init__(self) -> None:
        refuse_generators(self.truth.model, "harness=emulate")

    def execute(self, program: Program) -> Timeline:
        """Validate a program, measure those of its passes that are new, and time it; raises as ``Simulator.execute``.

        Also ``IncompatibleError`` for what cannot be built, ``OutOfMemoryError`` naming what does not fit this device.
        """
        check_program(program)
        for module, placed in zip(program.model.modules, program.layout.modules, strict=True):
            for _, cp in placed.degrees:
                self.truth.framework.check_executable(module, cp, "emulate")
        memory = Simulator(self.truth, self.memory_budget_bytes).check_memory(program)
        return make_timeline(program, self.price(program), memory)

    def price(self, program: Program) -> Prices:
        """The cost truth's prices with measured computation, and optimizer steps measured where a stage has run."""
        self.measure(program, lane_orders(program))
        prices = self.truth.price(program)
        seconds = np.zeros(program.num_actions)
        for action, work in works_of(program).items():
            took = self.measured.passes[work]
            of_kind = {Pass.FORWARD: took.forward_s, Pass.BACKWARD: took.backward_s, Pass.WEIGHT: took.weight_s}
            seconds[action] = of_kind[Pass(program.kind[action])]
        modules = self.truth.model.modules
        placed = program.layout.modules
        modelled_s = np.concatenate([*map(self.truth.step_costs.optimizer_s, modules, placed)])
        shapes = chain.from_iterable(map(stage_shapes, modules, placed))
        measured_s = np.array([*map(self.measured.optimizer_s.get, shapes, modelled_s)])
        steps = replace(prices.steps, optimizer_s=prices.steps.optimizer_s - modelled_s + measured_s)
        return replace(prices, duration_s=seconds + prices.comm_s, steps=steps)

    def measure(self, program: Program, lanes: Sequence[LaneOrder]) -> None:
        """Run those of the lanes that have something new; a core that was idle takes longer for its next pass."""
        works = works_of(program)
        shapes = list(map(stage_shapes, program.model.modules, program.layout.modules))
        runs: dict[StageWork, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        known = set(self.measured.passes)
        for order in lanes:
            wanted = [works[action] for action in order.actions.tolist()]
            if known.issuperset(wanted):
                continue
            known.update(wanted)
            with quiet():
                # Imported where needed: torch takes seconds, and checking settings does without.
                from entrain_bench.train.emulate.bench import measure_rank

                seconds, steps_s = measure_rank(self, program, order)
            for (module, stage), step_s in steps_s.items():
                self.measured.optimizer_s.setdefault(shapes[module][stage], step_s)
            for work, kind, column in zip(wanted, program.kind[order.actions].tolist(), seconds.T, strict=True):
                runs[work][kind].extend(column)
        for work, took in runs.items():
            # By number of kind: a weight pass comes last.
            self.measured.passes.setdefault(work, PassSeconds(*(median(took[kind]) for kind in sorted(took))))
