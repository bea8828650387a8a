"""Names and addresses in MLflow: the place of runs, what a sweep is called, its pages and their view."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from entrain_bench.records.records import Results

# The server to log to if no key names one; MLflow's own variable.
URI_VARIABLE = "MLFLOW_TRACKING_URI"
# Overrides that say nothing about what is swept.
ASIDE = ("results_dir=", "mlflow", "retry=", "hydra")
# MLflow takes 500 characters; the page is readable with fewer.
MAX_NAME = 160
# Longest name of a parameter, metric or run in a store, in characters.
MAX_KEY = 250
# Characters that no parameter or metric may have in its name.
FORBIDDEN = re.compile(r"[^/\w.\- :]")
# Other pages are made for generative models.
WORKFLOW = {"workflowType": "machine_learning"}
# The name under which a page's link finds its view among the experiment's tags.
VIEW = "fastest_first"
# Columns of the page after the iteration time and the speedup.
COLUMNS = ("metrics.`gap_to_lower_bound`", "metrics.`bubble_ratio`", "metrics.`peak_memory_bytes`")
# An artifact of a sweep's parent run.
ANSWER_PAGE = "answer.html"
# Tags of runs: the job, if a sweep has several; whether the present code makes the run, yes or no; of a parent, the
# answer in short, and the strategy that speedups are over.
CASE_TAG = "case"
CURRENT_TAG = "current"
NOTE_TAG = "mlflow.note.content"
BASELINE_TAG = "baseline"


def tracking_uri(given: str | None) -> str:
    """Return the address of the tracking server; empty for the store in the folder of results."""
    return given or os.environ.get(URI_VARIABLE, "")


def store_path(results: Results) -> Path:
    """Return the SQLite file of a results folder."""
    return results.root / "mlflow.db"


def sweep_name(overrides: Sequence[str]) -> str:
    """Return the name of a sweep: its figure, or its overrides, or ``defaults`` without any."""
    texts = [text for text in overrides if not text.lstrip("+").startswith(ASIDE)]
    name = texts[0].removeprefix("figure=") if len(texts) == 1 else " ".join(texts)
    return shortened(name) or "defaults"


def shortened(name: str) -> str:
    """Cut a name that is too long for a page or a file; a hash keeps different names different."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}... {digest}"


def clean(name: str) -> str:
    """Return a name that MLflow takes for a parameter or a metric."""
    return FORBIDDEN.sub("_", name)[:MAX_KEY]


def speedup_name(baseline: str) -> str:
    """Return the metric that holds the speedup over a strategy."""
    return clean(f"speedup_over_{baseline}")


def page_tags(baseline: str = "", by_case: bool = False) -> dict[str, str]:
    """Return the tags of an experiment that make its page.

    ``by_case`` groups runs by their case: times of different jobs are not comparable.
    """
    speedup = [f"metrics.`{speedup_name(baseline)}`"] if baseline else []
    groups = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": CASE_TAG}]}
    view = {
        "searchFilter": f"tags.`{CURRENT_TAG}` = 'yes'",
        "orderByKey": "metrics.`iteration_time_s`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": ["metrics.`iteration_time_s`", *speedup, *COLUMNS],
        **({"groupBy": groups} if by_case else {}),
    }
    return {"mlflow.experimentKind": "custom_model_development", f"mlflow.sharedViewState.{VIEW}": json.dumps(view)}


def experiments_link(base: str) -> str:
    """Return the address of all experiments on a server; its root shows MLflow's pages for GenAI."""
    return f"{base}/#/experiments?{urlencode(WORKFLOW)}"


def runs_link(base: str, experiment: str) -> str:
    """Return the address of an experiment's runs on a server."""
    return f"{base}/#/experiments/{experiment}/runs?{urlencode({**WORKFLOW, 'viewStateShareKey': VIEW})}"


def answer_link(base: str, experiment: str, run_id: str) -> str:
    """Return the address of a sweep's answer, a page in the artifacts of its parent run."""
    return f"{base}/#/experiments/{experiment}/runs/{run_id}/artifacts/{ANSWER_PAGE}?{urlencode(WORKFLOW)}"
