"""What is said of samples that were cut, left out, or used again; and that a run records it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.sentences import notices
from entrain_bench.cli import run_command
from entrain_bench.records.records import Record
from entrain_bench.specs.workload import Counts

SMALL = (
    "model=tiny",
    "cluster=tiny",
    "strategy=megatron",
    "layout.tp=1",
    "layout.dp=2",
    "iterations=1",
    "mlflow=false",
)


def made(samples: Counts, batch: int = 512, workload: str = "mine") -> Record:
    labels = {"workload": workload, "model": "tiny"}
    return Record("0", "ok", "", labels, {"global_batch": batch}, "", samples=samples)


def listed(number: int, truncated: int = 0, dropped: int = 0) -> dict[str, float | Counts]:
    return {"listed": number, "truncated": truncated, "dropped": dropped}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (made({}), []),
        (made(listed(512)), []),
        (
            made(listed(300)),
            ["workload mine: 300 rows for a global batch of 512: every row is used 1.7 times an iteration on average"],
        ),
        (
            made(listed(1), 4),
            ["workload mine: 1 row for a global batch of 4: every row is used 4.0 times an iteration on average"],
        ),
        (
            made(listed(600, 3, 2)),
            ["workload mine: of 602 rows 3 truncated and 2 dropped, longer than the context of model tiny"],
        ),
        (
            made(listed(600, dropped=2)),
            ["workload mine: of 602 rows 2 dropped, longer than the context of model tiny"],
        ),
        (
            # Half of 512 are 256 samples of 64 rows; a quarter of them, of a component's component, 64 of 40.
            made({
                "all": {"share": 0.5, **listed(64, truncated=1)},
                "inner": {"share": 0.25, "some": {"share": 0.5, **listed(40)}, "others": {"share": 0.5, **listed(64)}},
            }),
            [
                "workload mine, component all: of 64 rows 1 truncated, longer than the context of model tiny",
                "workload mine, component all: 64 rows for 50% of a global batch of 512: every row is used "
                "4.0 times an iteration on average",
                "workload mine, component inner.some: 40 rows for 12.5% of a global batch of 512: every row is used "
                "1.6 times an iteration on average",
            ],
        ),
    ],
)  # fmt: skip
def test_what_is_said(record: Record, says: list[str]) -> None:
    assert notices([record, record]) == says


@pytest.mark.wide
def test_a_run_prints_and_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pd.DataFrame({"sample_id": ["a", "b", "c"], "text_tokens": [50, 60, 70]})
    rows.to_parquet(tmp_path / "mine.parquet")
    mine = [*SMALL, "workload=trace", f"workload.path={tmp_path}/mine.parquet", f"results_dir={tmp_path}/results"]
    mine += ["global_batch=8", "microbatch_size=1", "model.modules.llm.context_tokens=60"]
    assert run_command(mine) == 2
    assert "row 3 (sample c) has 70 LLM tokens, but the model takes at most 60" in capsys.readouterr().err
    assert run_command([*mine, "workload.on_overlong=drop"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == [
        "workload mine: of 3 rows 1 dropped, longer than the context of model tiny",
        "workload mine: 2 rows for a global batch of 8: every row is used 4.0 times an iteration on average",
    ]
    (record,) = (tmp_path / "results" / "runs").rglob("*.json")
    assert json.loads(record.read_text())["samples"] == {"listed": 2, "truncated": 0, "dropped": 1}
