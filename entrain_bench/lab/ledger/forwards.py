"""Published ranges of forward times on the A40 (``experiments/ledger/forwards.csv``): the axes of two figures."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from entrain_bench.base.errors import require
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.fidelity.programs import first_program
from entrain_bench.lab.ledger.predict import Change
from entrain_bench.program import Program


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """The published range of a module's forward: a microbatch's over all stages, in milliseconds."""

    workload: str
    model: str
    module: str
    least_ms: float
    most_ms: float
    where: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """The run whose microbatches are compared, on the default cluster and degrees.

        The mean over microbatches depends on no strategy, so the layout is planned with as few trials as possible.
        """
        planning = ("tuning=own", "strategy.planner.num_trials=1", "strategy.planner.profile_samples=16")
        return "strategy=megatron", *planning, f"workload={self.workload}", f"model={self.model}", "iterations=1"


@dataclass(frozen=True, slots=True)
class ForwardCase:
    """A range with the program whose forwards are predicted."""

    row: ForwardRow
    truth: CostTruth
    program: Program

    @classmethod
    def of(cls, row: ForwardRow, composer: Composer) -> ForwardCase:
        """Plan the layout and build the program."""
        setting, program = first_program(composer.run(row.overrides))
        return cls(row, setting.truth, program)

    def predicted_ms(self, change: Change | None = None) -> float:
        """Mean over the microbatches, on the cluster or on a changed one."""
        truth = replace(self.truth, cluster=change(self.truth.cluster)) if change else self.truth
        index = [module.name for module in truth.model.modules].index(self.row.module)
        module = truth.model.modules[index]
        placed = self.program.layout.modules[index]
        times = truth.chunk_times(module, placed, self.program.shapes, self.program.chunks[index])
        return 1e3 * float((times.forward_s + times.forward_comm_s).sum(axis=1).mean())


def read_forwards(path: Path | None = None) -> tuple[ForwardRow, ...]:
    """All rows of a file (default: the committed one); ``UserError`` names file, line and field."""
    path = path or config_tree() / "ledger" / "forwards.csv"
    with path.open(newline="") as lines:
        return tuple(_row(f"{path.name}:{line}", values) for line, values in enumerate(csv.DictReader(lines), 2))


def _row(place: str, values: dict[str, str]) -> ForwardRow:
    least = float(values["least_ms"])
    most = float(values["most_ms"])
    require(0 < least <= most, f"{place}: least_ms", least, f"above 0 and at most most_ms={most:g}")
    return ForwardRow(values["workload"], values["model"], values["module"], least, most, values["where"])
