"""A claim by hand, and the tables that its runs would make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from entrain_bench.answers.documents.claim import Claim, parse_claim

TINY = (
    "model=tiny",
    "cluster=tiny",
    "global_batch=16",
    "microbatch_size=2",
    "layout.tp=1",
    "layout.dp=2",
    "iterations=1",
)
VALUES: dict[str, Any] = {
    "claim": "One is faster\nthan the other",
    "paper": "2605.27918",
    "where": "Table 3",
    "value": 2.0,
    "unit": "x",
    "paper_setting": "theirs",
    "measure": {"metric": "iteration_time_s"},
    "published": {
        "setting": "as theirs",
        "common": [*TINY, "workload=chartqa", "seed=0,1"],
        "of": ["strategy=megatron_rigid"],
        "to": ["strategy=entrain"],
    },
    "fair": {"setting": "as it should be", "of": ["strategy=megatron"]},
    "why": "because",
}
# A setting of one side, without anything to compare it with.
SHARE = {**{key: VALUES["published"][key] for key in ("setting", "common")}, "of": ["strategy=megatron"]}


def claim_with(published: Any = None, fair: Any = None, **changes: Any) -> Claim:
    """A claim with changed settings; without a fair one if ``fair`` is False."""
    own = VALUES["fair"] | (fair or {}) if fair is not False else None
    settings = {"published": VALUES["published"] | (published or {}), "fair": own}
    return replace(parse_claim("some", VALUES | settings | changes), file="paper", system="Some")


def runs(*rows: tuple[str, str, float]) -> pd.DataFrame:
    """Runs of a workload and a configuration, seed after seed."""
    table = pd.DataFrame(rows, columns=["workload", "configuration", "iteration_time_s"])
    return table.assign(model="m", seed=table.groupby(["workload", "configuration"]).cumcount(), status="ok")


def cases(*rows: list[float]) -> pd.DataFrame:
    """A case a row, a seed a column."""
    return pd.DataFrame([*rows])
