"""A claim by hand, and the tables that its runs would make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pandas as pd

from entrain_bench.answers.documents import claim as claim_module
from entrain_bench.answers.documents.claim import Claim, parse_claim
from entrain_bench.answers.documents.claims import value_text
from entrain_bench.answers.documents.definition import flat
from entrain_bench.answers.documents.published import PublishedCell, find_cells, published_cells
from entrain_bench.answers.documents.verdict import judge

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
    "cells": ["some"],
    "value": 2.0,
    "unit": "x",
    "measure": {"metric": "iteration_time_s"},
    "setting": "as theirs",
    "common": [*TINY, "workload=chartqa", "seed=0,1"],
    "of": ["strategy=megatron_rigid"],
    "to": ["strategy=entrain"],
    "fair": {"setting": "as it should be", "of": ["strategy=megatron"]},
    "why": "because",
}
# One side, without anything to compare it with.
ALONE: dict[str, Any] = {"of": ["strategy=megatron"], "to": [], "fair": None}


def claim_with(**changes: Any) -> Claim:
    """The claim of ``VALUES`` with some changes; ``value`` and ``unit`` are those of its cell."""
    stated = VALUES | changes
    cell = replace(published_cells()["E-head-speedup"], id="some", where="Table 3", unit=stated.pop("unit"))
    known = tuple(replace(cell, value=number) for number in flat(stated.pop("value")))

    def find(names: Iterable[str]) -> tuple[PublishedCell, ...]:
        asked = [*names]
        return known if asked == ["some"] else find_cells(asked)

    with patch.object(claim_module, "find_cells", find):
        return replace(parse_claim("some", stated), file="paper", system="Some")


def runs(*rows: tuple[str, str, float]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["workload", "configuration", "iteration_time_s"])
    return table.assign(model="m", seed=table.groupby(["workload", "configuration"]).cumcount(), status="ok")


def cases(*rows: list[float]) -> pd.DataFrame:
    return pd.DataFrame([*rows])


def verdict_on(claim: Claim, found: pd.DataFrame) -> str:
    return str(judge(claim, claim.published.measure, found).verdict)


def text_on(claim: Claim, found: pd.DataFrame) -> str:
    return value_text(claim, judge(claim, claim.published.measure, found))
