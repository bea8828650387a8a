"""Who is ahead on each job: overall, published, in a framework; ties by paired seeds and by posterior; the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from entrain_bench.answers.documents.headline import ahead, job_rows, jobs_markdown, today_sweeps, with_today
from entrain_bench.answers.labels import framework_of
from entrain_bench.config.compose import compose

FAMILY = {"megatron": "out_of_the_box", "omnibal": "published", "dip": "published", "lpt": "simple", "braid": "ours"}
TODAY = {"megatron": "Megatron-LM"}
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
            "strategy_today": TODAY.get(name, ""),
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


def test_a_row_names_the_fastest_of_all_the_published_and_that_in_a_framework() -> None:
    (row,) = job_rows(runs(TIMES))
    assert (row.model, row.workload, row.cluster, row.samples_per_gpu) == ("Tiny", "COCO", "64 A40", 8.0)
    assert row.fastest
    assert row.published
    assert row.baseline
    assert row.today
    assert (row.today.name, row.today.framework, row.today.ties) == ("Megatron", "Megatron-LM", False)
    assert (row.fastest.name, row.fastest.behind, row.fastest.ties) == ("Braid", 1.0, True)
    assert row.fastest.time_s == pytest.approx(1.1)
    # The faster one of two published systems.
    assert (row.published.name, row.published.ties) == ("OmniBal", False)
    assert row.published.behind == pytest.approx(1.3 / 1.1, rel=1e-3)
    assert (row.baseline.name, row.baseline.ties) == ("LPT", True)
    assert row.tied == ["LPT"]


def test_a_strategy_counts_as_of_today_only_with_what_its_framework_has() -> None:
    named = {"strategy_label": "Megatron"}
    tuned = runs({"megatron": [0.9, 0.9, 0.9]}).assign(**named)
    today = runs({"megatron": [2.0, 2.1, 2.2]}).assign(**named)
    (row,) = job_rows(with_today(pd.concat([tuned, runs({"braid": [1.0, 1.1, 1.2]})]), {"Megatron": today}))
    assert row.fastest
    assert row.today
    assert (row.fastest.time_s, row.fastest.framework) == (pytest.approx(0.9), "")
    assert (row.today.name, row.today.time_s, row.today.framework) == (
        "Megatron",
        pytest.approx(2.1),
        "Megatron-LM",
    )
    assert row.tied == []
    configs = {label: compose(*sweep[1:]).content() for label, sweep in today_sweeps("figure=iteration_time").items()}
    assert {label: framework_of(config) for label, config in configs.items()} == {
        "Megatron": "Megatron-LM",
        **dict.fromkeys(["ZeRO-1", "ZeRO-2", "FSDP"], "HF Trainer"),
    }
    # Its multimodal code does not split an encoder's sequences.
    split = {**configs["Megatron"], "encoder_cp": True}
    assert framework_of(split) == framework_of(compose("strategy=megatron").content()) == ""


def test_a_published_system_may_be_ahead() -> None:
    (row,) = job_rows(runs(TIMES | {"dip": [0.5, 0.6, 0.7]}))
    assert row.fastest == row.published
    assert row.tied == []


@pytest.mark.parametrize(("lost", "ties"), [(1, False), (2, True)])
def test_a_lead_that_constants_may_undo_is_a_tie(lost: int, ties: bool) -> None:
    # Behind in every seed, but ahead in 1 or 2 of 20 draws.
    draws = {"braid": dict.fromkeys(range(20), 1.0), "omnibal": {n: 0.9 if n < lost else 1.2 for n in range(20)}}
    (row,) = job_rows(runs(TIMES), {("tiny", "coco"): draws})
    assert row.published
    assert row.published.ties == ties
    assert ("OmniBal" in row.tied) == ties


def test_who_lacks_a_seed_has_no_place() -> None:
    (row,) = job_rows(runs(TIMES | {"braid": [0.1, 0.1, None]}))
    assert row.fastest
    assert row.fastest.name == "LPT"
    (row,) = job_rows(runs({"braid": [None, None, None]}))
    assert (row.fastest, row.published, row.today, row.baseline, row.tied) == (None, None, None, None, [])
    assert ahead([row]) == {"num_jobs": 1, "num_tied": 0, "fastest": None, "published": None, "today": None}


def test_the_fastest_and_its_ties_are_bold_in_text() -> None:
    data = pd.concat([runs(TIMES), runs({"dip": [None], "lpt": [2.0], "braid": [4.0]}, "chartqa", "mine")])
    rows = job_rows(data)
    lines = jobs_markdown(rows).splitlines()
    assert lines[0] == (
        "| model, workload | GPUs | samples per GPU | fastest | fastest published | in a framework today | LPT | ties |"
    )
    assert lines[2:] == [
        "| Tiny COCO | 64 A40 | 8 | **Braid 1.100 s** | OmniBal 1.300 s, 1.18x |"
        " Megatron (Megatron-LM) 2.100 s, 1.91x | **LPT 1.103 s**, 1.00x | LPT |",
        "| Tiny ChartQA | mine | 8 | **LPT 2.000 s** | no result | no result | **LPT 2.000 s** | none |",
    ]
    found = ahead(rows)
    assert (found["num_jobs"], found["num_tied"], found["fastest"]["wins"]) == (2, 1, {"Braid": 1, "LPT": 1})
    assert found["published"]["num_jobs"] == 1
    assert found["published"]["mean"] == pytest.approx(1.3 / 1.1, rel=1e-3)
    assert found["today"]["wins"] == {"Megatron in Megatron-LM": 1}
