"""Who leads whom: the fastest rival that has most results, ratios seed by seed, what has no result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.documents.tables import Lead, lead_markdown, load_tables, parse_table, write_tables
from entrain_bench.base.errors import UserError
from entrain_bench.records.records import Results, new_record
from entrain_bench.run.study import Study, SweepOverrides

LEADS = [each for each in load_tables() if isinstance(each, Lead)]
FAMILIES = {"published": ["entrain", "dip"], "out_of_the_box": ["megatron"]}
VALUES: dict[str, Any] = {
    "title": "Who\nleads",
    "common": ["model=tiny", "cluster=tiny", "seed=0,1"],
    "corner": "job",
    "rows": {"one": ["workload=chartqa"], "other": ["workload=coco"]},
    "leader": ["strategy=megatron"],
    "strategies": "published",
}


def lead_with(**changes: Any) -> Lead:
    lead = parse_table("some", VALUES | changes, FAMILIES)
    assert isinstance(lead, Lead)
    return replace(lead, file="mine")


def write_runs(study: Study, sweep: SweepOverrides, times: Mapping[str, list[float | None]]) -> None:
    """Records of a sweep's cells by strategy and seed; None for a run that failed."""
    for cell in study.cells(*sweep):
        time = times[str(cell.config.strategy["name"])][cell.config.seed]
        record = new_record(cell, "ok" if time else "failed", "" if time else "told so")
        if time:
            object.__setattr__(record, "metrics", {"iteration_time_s": time, "cluster_bound_s": 0.5})
        study.results.write(record, None)


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.wide
def test_the_fastest_rival_with_all_results_seed_by_seed(tmp_path: Path) -> None:
    lead, study = lead_with(), Study(Results(tmp_path))
    runs: dict[str, dict[str, list[float | None]]] = {
        # At seed 0 twice as fast, at seed 1 8 times: 4 times in the geometric mean.
        "one": {"megatron": [1.0, 0.5], "entrain": [2.0, 4.0], "dip": [3.0, 4.0]},
        # DIP would be faster, had it both results.
        "other": {"megatron": [1.0, 1.0], "entrain": [1.0, 1.0], "dip": [0.1, None]},
    }
    for row, times in runs.items():
        write_runs(study, lead.of_leader(row), times)
        write_runs(study, lead.of_rival(row, ""), times)
    text, told = lead_markdown(lead, study)
    runs = "Runs of [some](../../experiments/table/mine.yaml): `model=tiny cluster=tiny seed=0,1`.\n"
    assert text.startswith(f"Who leads. {runs}")
    first, second = rows_of(text)
    assert first[:4] == ["one", "Entrain", "3.000", "0.750"]
    assert first[4].startswith("4.00x (")
    # Of 0.5 s: once twice as long, once as long.
    assert first[5] == "50%"
    assert second == ["other", "Entrain", "1.000", "1.000", "1.00x (1.00 to 1.00)", "100%"]
    # In the other row DIP has the least mean, but not all results; of equals the first by name wins.
    assert text.splitlines()[-3:] == [
        "- Megatron is the fastest in 2 of 2 jobs.",
        "- Megatron has a speedup of 1.00x to 4.00x over the fastest other strategy, 2.00x in the geometric mean.",
        "- Its gap is 75% in the median and 100% at most.",
    ]
    assert told == " ".join(line.removeprefix("- ") for line in text.splitlines()[-3:])
    write_tables([lead], study)
    assert (tmp_path / "tables" / "some_sentences.md").read_text() == told
    assert (tmp_path / "tables" / "some.md").read_text() == text


def test_runs_without_result_are_counted_and_told(tmp_path: Path) -> None:
    lead, study = lead_with(rows={"one": ["workload=chartqa"]}), Study(Results(tmp_path))
    write_runs(study, lead.of_leader("one"), {"megatron": [1.0, None]})
    write_runs(study, lead.of_rival("one", ""), {"entrain": [None, 4.0], "dip": [None, None]})
    text, _ = lead_markdown(lead, study)
    (row,) = rows_of(text)
    # At no seed have both a result.
    assert row[1:5] == ["Entrain", "4.000, 1 of 2 without result", "1.000, 1 of 2 without result", ""]
    assert "- one: Megatron fails at seed 1" in text
    assert "speedup of" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column": {}}, "key=column: unknown"),
        ({"strategies": "ours"}, "strategies=ours: must be a list, or one of published, out_of_the_box, all"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lead_with(**change)
