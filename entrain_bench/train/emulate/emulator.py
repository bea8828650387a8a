"""``harness=emulate``: measured passes and optimizer steps, modelled communication; torch is imported to measure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Annotated, ClassVar, Literal

import numpy as np

from entrain_bench.costs.truth import CostTruth, Prices
from entrain_bench.program import Pass, Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.simulate.executor import Simulator, make_timeline
from entrain_bench.specs.parse import Count, OneOf, at_least
from entrain_bench.train.emulate.work import (
    LaneOrder,
    PassSeconds,
    StageShape,
    StageWork,
    lane_orders,
    stage_shapes,
    works_of,
)
from entrain_bench.train.settings import DEVICES, quiet, refuse_generators

DTYPES = ("float32", "bfloat16")  # by torch's names


@dataclass(slots=True)
class Measured:
    """Measurements so far."""

    passes: dict[StageWork, PassSeconds] = field(default_factory=dict)
    optimizer_s: dict[StageShape, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Emulator:
    """Runs every pass of a program on one device, rank by rank, in the rank's order.

    Collectives are priced by the cost truth, reported memory is modelled, and ranks with equal work run once.
    ``measured`` grows with every program.
    """

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
        """Validate a program, measure those of its passes that are new, and time it.

        Raises:
            UserError: if the program is invalid, or the device is not there.
            IncompatibleError: for modules that cannot be built, and settings that are simulated only.
            OutOfMemoryError: naming what does not fit: a rank's program by the model, or a pass on this device.
            DeadlockError: naming the cycle.
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
        missing = list[LaneOrder]()
        known = set(self.measured.passes)
        for order in lanes:
            wanted = {works[action] for action in order.actions.tolist()}
            if not wanted <= known:
                missing.append(order)
                known |= wanted
        if not missing:
            return
        runs: dict[StageWork, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        with quiet():
            # Imported where needed: torch takes seconds, and checking settings does without.
            from entrain_bench.train.emulate.bench import Bench

            bench = Bench(self.truth, self.device, self.dtype, self.num_warm_ups, self.num_repetitions)
            for order, (seconds, steps_s) in zip(missing, bench.measure(program, missing), strict=True):
                for place, step_s in steps_s.items():
                    self.measured.optimizer_s.setdefault(shapes[place[0]][place[1]], step_s)
                for action, column in zip(order.actions.tolist(), seconds.T, strict=True):
                    runs[works[action]][int(program.kind[action])].extend(column)
        for work, took in runs.items():
            # By number of kind: a weight pass comes last.
            self.measured.passes.setdefault(work, PassSeconds(*(median(took[kind]) for kind in sorted(took))))
