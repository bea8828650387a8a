"""Draws pictures of pages in a browser: MLflow for docs/images, the report and the site for build/screenshots.

In MLflow a sweep's answer and the comparison of two runs; of the site, which ``make docs`` has built, its main
pages.
"""

from __future__ import annotations

import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from entrain_bench.cli import run_command
from entrain_bench.records.records import Results
from support.browser import opened, save_files, time_text

ROOT = Path(__file__).resolve().parents[1]
IMAGES, PICTURES, SITE = ROOT / "docs" / "images", ROOT / "build" / "screenshots", ROOT / "build" / "docs" / "html"
# Main pages of the site, by the name of their picture.
SITE_PAGES = {
    "site_home": "index.html",
    "site_tutorial": "docs/tutorials/which_strategy.html",
    "site_strategy": "docs/strategies/braid.html",
    "site_results": "docs/results_table.html",
    "site_claims": "docs/claims_table.html",
}
SWEEP = ["--multirun", "strategy=megatron,entrain,disttrain,dip,dflop", "workload=chartqa,opencqa_ocr", "seed=0"]
COMPARED = ("megatron", "disttrain")
# Sections of the comparison that are folded, so that the metrics are in sight.
FOLDED = ("Visualizations", "Parameters")
ANSWER_HEIGHT, COMPARE_HEIGHT, PAGE_HEIGHT = 1000, 1020, 1400
# Two runs of this one are compared.
WORKLOAD = "chartqa"


def main() -> int:
    """Show the site's main pages; then run a small sweep and show it in a report and in MLflow."""
    save_files({PICTURES / f"{name}.png": SITE / page for name, page in SITE_PAGES.items()}, PAGE_HEIGHT)
    with TemporaryDirectory() as folder, chdir(folder):
        results = Results(Path("results"))
        if run_command(SWEEP) or run_command(["report"]):
            return 1
        save_files({PICTURES / "report.png": results.root / "report.html"}, PAGE_HEIGHT)
        found = [record for record in results.records() if record.labels["workload"] == WORKLOAD]
        records = {record.labels["strategy"]: record for record in found}
        with opened(results) as pages:
            pages.show_answer(["Decision", "Next step"])
            pages.save(IMAGES / "mlflow_answer.png", ANSWER_HEIGHT)
            two = [records[name] for name in COMPARED]
            pages.show_comparison([f"{name} {WORKLOAD}" for name in COMPARED], [*map(time_text, two)])
            pages.click(*(f"//*[normalize-space(text())='{title}']" for title in FOLDED))
            pages.save(IMAGES / "mlflow_compare.png", COMPARE_HEIGHT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
