"""Who is ahead on each job: the fastest of every family, ties by paired seeds and by posterior, and the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from entrain_bench.answers.documents.headline import CLOSE, job_rows, jobs_markdown
from entrain_bench.answers.posterior import Chance

FAMILY = {"megatron": "out_of_the_box", "omnibal": "published", "dip": "published", "lpt": "simple", "braid": "ours"}
TIMES = {
    "megatron": [2.0, 2.1, 2.2],
    "omnibal": [1.2, 1.3, 1.4],
    "dip": [1.3, 1.4, 1.5],
    # Ahead of Braid at some seeds, and behind it at others.
    "lpt": [1.01, 1.09, 1.21],
    "braid": [1.0, 1.1, 1.2],
}


def runs(times: dict[str, Sequence[float | None]], workload: str = "coco", cluster: str = "a40x64") -> pd.DataFrame:
    """A run table of one job with a run for each seed; a time that is None failed."""
    rows: list[dict[str, Any]] = [
        {
            "strategy": name,
            "strategy_family": FAMILY[name],
            "model": "tiny",
            "workload": workload,
            "cluster": cluster,
            "seed": seed,
            "status": "ok" if time else "failed",
            "reason": "",
            "iteration_time_s": time,
            "batch": 512,
            "nodes": 8,
            "gpus_per_node": 8,
        }
        for name, by_seed in times.items()
        for seed, time in enumerate(by_seed)
    ]
    return pd.DataFrame(rows)


def test_a_row_names_the_fastest_of_all_the_published_the_baseline_and_ours() -> None:
    (row,) = job_rows(runs(TIMES))
    assert (row.model, row.workload, row.cluster, row.samples_per_gpu) == ("Tiny", "Coco", "64 A40", 8.0)
    assert row.fastest
    assert row.published
    assert row.baseline
    assert row.fastest == row.ours
    assert (row.fastest.strategy, row.fastest.behind, row.fastest.ties) == ("Braid", 1.0, True)
    assert row.fastest.time_s == pytest.approx(1.1)
    # The faster one of two published systems.
    assert (row.published.strategy, row.published.ties) == ("Omnibal", False)
    assert row.published.behind == pytest.approx(1.3 / 1.1, rel=1e-3)
    assert (row.baseline.strategy, row.baseline.ties) == ("LPT", True)
    assert row.tied == ["LPT"]


def test_a_published_system_may_be_ahead() -> None:
    (row,) = job_rows(runs(TIMES | {"dip": [0.5, 0.6, 0.7]}))
    assert row.fastest == row.published
    assert row.ours
    assert row.ours.behind > 1.5
    assert row.tied == []


@pytest.mark.parametrize(("num_fastest", "ties"), [(1, False), (2, True)])
def test_a_strategy_that_constants_may_put_first_ties(num_fastest: int, ties: bool) -> None:
    draws = 30
    assert num_fastest / draws >= CLOSE if ties else num_fastest / draws < CLOSE
    (row,) = job_rows(runs(TIMES), {("tiny", "coco"): {"omnibal": Chance(num_fastest, draws, {})}})
    assert row.published
    assert row.published.ties == ties
    assert ("Omnibal" in row.tied) == ties


def test_who_lacks_a_seed_has_no_place() -> None:
    (row,) = job_rows(runs(TIMES | {"braid": [0.1, 0.1, None]}))
    assert row.ours is None
    assert row.fastest
    assert row.fastest.strategy == "LPT"
    (row,) = job_rows(runs({"braid": [None, None, None]}))
    assert (row.fastest, row.published, row.baseline, row.ours, row.tied) == (None, None, None, None, [])


def test_the_fastest_and_its_ties_are_bold_in_text() -> None:
    data = pd.concat([runs(TIMES), runs({"dip": [None], "lpt": [2.0], "braid": [4.0]}, "chartqa", "mine")])
    lines = jobs_markdown(job_rows(data)).splitlines()
    assert lines[0] == "| model, workload | GPUs | samples per GPU | fastest | published | LPT | ours | ties |"
    assert lines[2:] == [
        "| Tiny Coco | 64 A40 | 8 | **Braid 1.100 s** | Omnibal 1.300 s, 1.18x | **LPT 1.103 s**, 1.00x |"
        " **Braid 1.100 s** | LPT |",
        "| Tiny ChartQA | mine | 8 | **LPT 2.000 s** | no result | **LPT 2.000 s** | Braid 4.000 s, 2.00x | none |",
    ]
