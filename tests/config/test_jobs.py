"""``figure.jobs``: jobs that differ in several keys at once, each with every value that the figure sweeps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer

JOBS = [["model=tiny", "workload=coco"], ["model=tiny_av", "workload=synthetic", "global_batch=16"]]
SWEPT = ["strategy=lpt seed=0", "strategy=lpt seed=1", "strategy=megatron seed=0", "strategy=megatron seed=1"]


def cells(folder: Path, jobs: Any, *overrides: str) -> list[str]:
    """The runs of a figure with these jobs, two strategies and two seeds."""
    figure = {
        "hydra": {"sweeper": {"params": {"strategy": "lpt,megatron", "seed": "0,1"}}},
        "figure": {"drawing": "iteration_time", "jobs": jobs},
    }
    (folder / "figure").mkdir(exist_ok=True)
    (folder / "figure" / "mine.yaml").write_text(f"# @package _global_\n{json.dumps(figure)}\n")
    return [" ".join(cell) for cell in Composer(str(folder)).sweep(["figure=mine", *overrides]).cells]


def without_figure(found: list[str]) -> list[str]:
    return [text.replace("figure=mine", "").replace("  ", " ").strip() for text in found]


def test_every_job_has_every_strategy_and_seed(tmp_path: Path) -> None:
    expected = [f"{' '.join(job)} {swept}" for job in JOBS for swept in SWEPT]
    assert without_figure(cells(tmp_path, JOBS)) == expected
    # Other keys hold for every job; those that the figure sweeps take the user's values.
    some = without_figure(cells(tmp_path, JOBS, "seed=7", "iterations=1"))
    assert some == [
        f"{' '.join(job)} strategy={name} seed=7 iterations=1" for job in JOBS for name in ("lpt", "megatron")
    ]


def test_a_figure_without_jobs_is_one_product(tmp_path: Path) -> None:
    assert without_figure(cells(tmp_path, [])) == SWEPT


@pytest.mark.parametrize(
    "given", ["model=tiny_vae", "workload=chartqa,coco", "global_batch=16", "cluster=tiny model=tiny"]
)
def test_a_value_that_no_job_has_replaces_the_list(given: str, tmp_path: Path) -> None:
    values = [key_value.partition("=")[::2] for key_value in given.split()]
    expected = [*itertools.product(*([f"{key}={one}" for one in several.split(",")] for key, several in values))]
    found = without_figure(
        cells(tmp_path, JOBS if len(values) == 1 else [[*job, "cluster=h100x8"] for job in JOBS], *given.split())
    )
    assert found == [" ".join((swept, *each)) for swept in SWEPT for each in expected]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (["model=tiny"], JOBS[:1]),
        (["workload=synthetic,coco"], JOBS),
        (["workload=synthetic", "model=tiny,tiny_av"], JOBS[1:]),
    ],
)
def test_values_of_jobs_select_among_them(given: list[str], chosen: list[list[str]], tmp_path: Path) -> None:
    found = without_figure(cells(tmp_path, JOBS, *given, "strategy=lpt"))
    assert found == [f"{' '.join(job)} seed={seed} strategy=lpt" for job in chosen for seed in (0, 1)]


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ("model=tiny", r"^figure\.jobs=model=tiny: must be a list of jobs, each a list of overrides"),
        (["model=tiny"], r"^figure\.jobs=.*: must be a list of jobs, each a list of overrides"),
        ([["model=tiny", "workload=coco,chartqa"]], r"^figure\.jobs: workload=several values: must be one value"),
        ([["model=tiny", "model=tiny_av"]], "model must be given once"),
    ],
)
def test_bad_jobs_are_refused(jobs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        cells(tmp_path, jobs)
