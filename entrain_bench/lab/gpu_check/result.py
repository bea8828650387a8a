"""What a step of the check found, and how losses and iteration times are judged."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from entrain_bench.answers.fidelity import pair_rows
from entrain_bench.base.files import write_atomically

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# Largest relative difference of a loss from one device's. Over gloo (2026-11) the largest was 6e-8 in float32, of 19
# strategies on two ranks, and 2.6e-5 in bfloat16, of seven on two and four; kernels of a GPU add in other orders.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-4}

# Rows of a table, each a value by column.
type Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a step found.

    Attributes:
        verdict: ``passed``, ``failed`` or ``skipped``.
        result: one line: what was found, or why it failed or was left out.
        tables: rows by title.
        text: output that is shown as it is, by title.
    """

    verdict: str
    result: str
    tables: Mapping[str, Rows] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that came to an end.

    Attributes:
        name: of the step.
        identity: of what it follows from: machine, devices, options, code (``identity_of``).
        finding: what it found.
        seconds: wall time.
    """

    name: str
    identity: str
    finding: Finding
    seconds: float

    def write(self, path: Path) -> None:
        """Leave the result in a file."""
        write_atomically(path, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, path: Path) -> StepResult | None:
        """The result that a file holds; None if there is none, or half of one."""
        try:
            values = json.loads(path.read_text())
            return cls(**values | {"finding": Finding(**values["finding"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def judge_losses(runs: Mapping[str, Sequence[float]], reference: Sequence[float], tolerance: float) -> Rows:
    """A row for every run: its last loss, and how far its losses are from the reference's.

    Args:
        runs: losses of every iteration, by name.
        reference: losses of the run that they must equal.
        tolerance: largest relative difference of a loss.
    """
    return [
        {
            "strategy": name,
            "last_loss": losses[-1] if losses else math.nan,
            "largest_difference": (difference := _difference(losses, reference)),
            # What is not a number is no smaller than anything.
            "verdict": PASSED if difference <= tolerance else FAILED,
        }
        for name, losses in runs.items()
    ]


def _difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference; not a number if one is missing or not finite."""
    if len(losses) != len(reference) or not reference or not all(map(math.isfinite, [*losses, *reference])):
        return math.nan
    return max(abs(own / wanted - 1.0) for own, wanted in zip(losses, reference, strict=True))


def timing_row(
    workload: str, strategy: str, layout: str, measured: Sequence[float], predicted: Sequence[float]
) -> dict[str, Any]:
    """Measured and predicted seconds of a program's iterations; the first warms up and is left out of both.

    Args:
        workload: its name.
        strategy: its name.
        layout: of every module, as text.
        measured: seconds of every iteration.
        predicted: of the same iterations; empty if there is no prediction.
    """
    own, other = measured[1:], predicted[1:]
    row = {"workload": workload, "strategy": strategy, "layout": layout, "measured_s": fmean(own)}
    if other:
        row |= {"predicted_s": fmean(other), "error": fmean(other) / fmean(own) - 1.0}
    return row | {"repetitions_s": json.dumps(list(own))}


def speedup_rows(rows: Rows, num_ranks: int) -> Rows:
    """A row for every pair of strategies of a workload: by how much the second is faster, measured and predicted."""
    if len(rows) < 2:
        return []
    frame = pd.DataFrame(rows).assign(num_ranks=num_ranks, seed=0)
    pairs = pair_rows(frame)
    columns = ["workload", "slow", "fast", "measured_speedup", "low", "high", "predicted_speedup", "error"]
    return [{name: row[name] for name in columns} for row in pairs.to_dict("records")]
