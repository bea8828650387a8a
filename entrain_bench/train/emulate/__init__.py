"""``harness=emulate``: measured passes and optimizer steps, modeled communication; torch is imported to measure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated, ClassVar, Literal

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.costs.truth import CostTruth, Prices
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.simulate.executor import Simulator, make_timeline
from entrain_bench.specs.parse import Count, OneOf, at_least
from entrain_bench.train.settings import DEVICES, quiet, refuse_generators

DTYPES = ("float32", "bfloat16")  # by torch's names
# Values that decide the time of a pass or an optimizer step; equal ones take the same time.
type Key = tuple[object, ...]


def step_keys(program: Program) -> dict[tuple[int, int], Key]:
    """The key of the optimizer step of each stage, by module and stage: its kinds of layers, and the degrees."""
    keys: dict[tuple[int, int], Key] = {}
    for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
        how = (module.name, placed.tp, placed.cp, placed.dp, placed.recompute, placed.recompute_whole, placed.widths)
        kinds = np.split(module.layer_kind, np.cumsum(placed.layers_per_stage)[:-1])
        keys |= {(index, stage): (*how, *of_stage.tolist()) for stage, of_stage in enumerate(kinds)}
    return keys


def pass_keys(program: Program) -> dict[int, Key]:
    """Return the key of each pass, by action: its stage, kind, packed lengths, degrees and recomputed layers."""
    stages = step_keys(program)
    shapes = program.shapes
    keys: dict[int, Key] = {}
    for index, (module, chunks) in enumerate(zip(program.model.modules, program.chunks, strict=True)):
        degrees = program.layout.modules[index].degree_of_copy[chunks.replica].tolist()
        splits = program.splits_backward(index)
        passes = [program.forward_actions(index), program.backward_actions(index)]
        passes += [program.weight_actions(index)] if splits else []
        # LLM tokens of an encoder's items, or text tokens of samples.
        handed = shapes.item_llm_tokens if module.is_encoder else shapes.text_tokens
        for chunk, degree in enumerate(degrees):
            members = chunks.units(chunk)
            pack = (tuple(module.lengths(shapes, members).tolist()), tuple(handed[members].tolist()))
            for kind, actions in enumerate(passes):
                for stage, action in enumerate(actions[chunk].tolist()):
                    remade = int(program.remade[index][chunk, stage]) if program.remade else 0
                    keys[action] = (stages[index, stage], kind, splits, remade, degree, *pack)
    return keys


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The passes of a lane, and the first of its ranks."""

    actions: IntArray
    first_rank: int


def lane_orders(program: Program) -> list[LaneOrder]:
    """The passes of every lane that has any."""
    lanes = np.split(program.lane_actions, program.lane_offsets[1:-1])
    passes = (actions[program.is_pass[actions]] for actions in lanes)
    orders = map(LaneOrder, passes, program.layout.lane_first_rank.tolist())
    return [order for order in orders if len(order.actions)]


@dataclass(frozen=True, slots=True)
class Emulator:
    """Runs passes on one device, rank by rank, equal ones once (``measured_s``); the cost model times the rest."""

    trains: ClassVar[Literal[False]] = False

    truth: CostTruth
    memory_budget_bytes: float
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    dtype: Annotated[str, OneOf(DTYPES)] = "bfloat16"
    num_warm_ups: Annotated[int, at_least(0)] = 1
    num_repetitions: Count = 5
    measured_s: dict[Key, float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        refuse_generators(self.truth.model, "harness=emulate")

    def execute(self, program: Program) -> Timeline:
        """Validate a program, measure those of its passes that are new, and time it; raises as ``Simulator.execute``.

        Also ``IncompatibleError`` for unsupported modules, ``OutOfMemoryError`` naming the pass that does not fit.
        """
        check_program(program)
        for module, placed in zip(program.model.modules, program.layout.modules, strict=True):
            for _, cp in placed.degrees:
                self.truth.framework.check_executable(module, cp, "emulate")
        memory = Simulator(self.truth, self.memory_budget_bytes).check_memory(program)
        return make_timeline(program, self.price(program), memory)

    def price(self, program: Program) -> Prices:
        """Return the cost model's prices with measured computation, and with measured optimizer steps of run stages."""
        self.measure(program)
        prices = self.truth.price(program)
        seconds = np.zeros(program.num_actions)
        for action, key in pass_keys(program).items():
            seconds[action] = self.measured_s[key]
        truth = self.truth
        modelled_s = np.concatenate([*map(truth.step_costs.optimizer_s, truth.model.modules, program.layout.modules)])
        measured_s = np.array([*map(self.measured_s.get, step_keys(program).values(), modelled_s)])
        steps = replace(prices.steps, optimizer_s=prices.steps.optimizer_s - modelled_s + measured_s)
        return replace(prices, duration_s=seconds + prices.comm_s, steps=steps)

    def measure(self, program: Program) -> None:
        """Run the lanes that have unmeasured passes."""
        keys = pass_keys(program)
        stages = step_keys(program)
        runs = defaultdict[Key, list[float]](list)
        for order in lane_orders(program):
            wanted = [keys[action] for action in order.actions.tolist()]
            if all(key in self.measured_s or key in runs for key in wanted):
                continue
            with quiet():
                # Imported where needed: torch takes seconds, and checking settings does without.
                from entrain_bench.train.emulate.bench import measure_rank

                seconds, steps_s = measure_rank(self, program, order.first_rank)
            for stage, step_s in steps_s.items():
                self.measured_s.setdefault(stages[stage], step_s)
            for key, column in zip(wanted, seconds.T, strict=True):
                runs[key].extend(column)
        for key, took in runs.items():
            self.measured_s.setdefault(key, median(took))
