"""What runs come to, as text: ``python -m support.outcomes``, for comparing this machine with others that it can play.

Reads a JSON list of override lists on standard input and writes, for each, layout, metrics and a hash of the timeline.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence

from entrain_bench.answers.compare import MEASURED
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment


def outcome_of(overrides: Sequence[str]) -> dict[str, object]:
    """Layout, metrics that hold no wall times, to the last digit, and the first iteration's timeline, hashed."""
    (cell,) = compose_cells(overrides)
    outcome = run_experiment(cell.config)
    metrics = {name: value for name, value in outcome.metrics.items() if name not in MEASURED}
    assert outcome.timeline is not None
    timeline = hashlib.sha256(outcome.timeline.to_csv().encode()).hexdigest()
    return {"layout": dict(outcome.layout.describe()), "metrics": metrics, "timeline": timeline}


if __name__ == "__main__":
    json.dump([outcome_of(overrides) for overrides in json.load(sys.stdin)], sys.stdout)
