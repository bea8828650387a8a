"""An experiment's page: of machine learning, its present runs fastest first, with the columns that answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import urlencode

from entrain_bench.answers.comparison import TIME
from entrain_bench.answers.tracking.entries import CURRENT_TAG

# Other pages are made for generative models.
KIND = {"mlflow.experimentKind": "custom_model_development"}
WORKFLOW = {"workflowType": "machine_learning"}
# The name under which a page's link finds its view among the experiment's tags.
VIEW = "fastest_first"
SHOWN = (TIME, "gap_to_lower_bound", "bubble_ratio", "peak_memory_bytes")


def page_tags(first: Sequence[str] = ()) -> dict[str, str]:
    """Tags of an experiment that make its page, with some metrics first beside the iteration time."""
    time, *others = SHOWN
    view = {
        "searchFilter": f"tags.`{CURRENT_TAG}` = 'yes'",
        "orderByKey": f"metrics.`{TIME}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": [f"metrics.`{name}`" for name in (time, *first, *others)],
    }
    return {**KIND, f"mlflow.sharedViewState.{VIEW}": json.dumps(view)}


def runs_link(base: str, experiment: str) -> str:
    """Address of an experiment's runs on a server."""
    return f"{base}/#/experiments/{experiment}/runs?{urlencode({**WORKFLOW, 'viewStateShareKey': VIEW})}"


def run_link(base: str, experiment: str, run_id: str) -> str:
    """Address of one of its runs."""
    return f"{base}/#/experiments/{experiment}/runs/{run_id}?{urlencode(WORKFLOW)}"
