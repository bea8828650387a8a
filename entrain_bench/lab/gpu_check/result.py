"""What a section of the check found, and the file that keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrain_bench.lab.files import read_json

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# Largest relative difference of a loss from that of one device. Over gloo (2026-11) the largest was 6e-8 in float32 (19
# strategies, two ranks) and 2.6e-5 in bfloat16 (seven strategies, two and four ranks); GPU kernels add in other orders.
TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-4}

# Rows of a table: values by column.
type Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a section found: its verdict, one line on it, tables of rows and output to show unmodified by title."""

    verdict: str
    result: str
    tables: Mapping[str, Rows] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SectionResult:
    """A section that came to an end; ``identity`` is of all that the result depends on (``identity_of``)."""

    name: str
    identity: str
    finding: Finding
    seconds: float

    @classmethod
    def read(cls, path: Path) -> SectionResult | None:
        """Return the result that a file holds, or None if there is none, or half of one."""
        try:
            values = read_json(path)
            return cls(**values | {"finding": Finding(**values["finding"])})
        except (KeyError, TypeError):
            return None


def judge_losses(
    strategy: str, losses: Sequence[float], reference: Sequence[float], tolerance: float
) -> dict[str, Any]:
    """The row of a run: its last loss, its largest relative difference from the reference, and the verdict."""
    difference = math.nan
    if len(losses) == len(reference) > 0 and all(map(math.isfinite, [*losses, *reference])):
        difference = max(abs(own / wanted - 1.0) for own, wanted in zip(losses, reference, strict=True))
    return {
        "strategy": strategy,
        "last_loss": losses[-1] if losses else math.nan,
        "largest_difference": difference,
        # NaN fails every comparison.
        "verdict": PASSED if difference <= tolerance else FAILED,
    }
