"""Draws pictures of MLflow in a browser for docs/images: a sweep's answer, its runs and the comparison of two."""

from __future__ import annotations

import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from entrain_bench.cli import run_command
from entrain_bench.records.records import Results
from support.browser import opened, time_text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
SWEEP = ["--multirun", "strategy=megatron,entrain,disttrain,dip,dflop", "workload=chartqa,opencqa_ocr", "seed=0"]
COMPARED = ("megatron", "disttrain")
# Sections of the comparison that are folded, so that the metrics are in sight.
FOLDED = ("Visualizations", "Parameters")
ANSWER_HEIGHT, RUNS_HEIGHT, COMPARE_HEIGHT = 1000, 900, 1020
# Two runs of this one are compared.
WORKLOAD = "chartqa"


def main() -> int:
    """Run a small sweep and show it in MLflow."""
    with TemporaryDirectory() as folder, chdir(folder):
        results = Results(Path("results"))
        if run_command(SWEEP):
            return 1
        found = [record for record in results.records() if record.labels["workload"] == WORKLOAD]
        records = {record.labels["strategy"]: record for record in found}
        with opened(results) as pages:
            pages.show_answer(["Decision", "Next step"])
            pages.save(IMAGES / "mlflow_answer.png", ANSWER_HEIGHT)
            pages.show_runs([f"{name} {WORKLOAD}" for name in records])
            pages.save(IMAGES / "mlflow_runs.png", RUNS_HEIGHT)
            two = [records[name] for name in COMPARED]
            pages.show_comparison([f"{name} {WORKLOAD}" for name in COMPARED], [*map(time_text, two)])
            pages.click(*(f"//*[normalize-space(text())='{title}']" for title in FOLDED))
            pages.save(IMAGES / "mlflow_compare.png", COMPARE_HEIGHT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
