"""Cells of the committed table computed again: every strategy, small clusters and large, several degrees of DP."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import yaml

from entrain_bench.answers.compare import as_written, drifts, read_file
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.records.records import new_record
from entrain_bench.records.tables import table_of
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment
from support.wide import FEW, wide_unless

REFERENCE = Path(__file__).parents[1] / "results" / "reference" / "table.parquet"


def in_figures(*words: str) -> tuple[str, ...]:
    stated = {
        name: yaml.safe_load((config_tree() / "strategy" / f"{name}.yaml").read_text()) for name in choices("strategy")
    }
    return tuple(name for name, values in stated.items() if values.get("in_figures", "all") in words)


# A search of 256 rollouts an iteration: seconds a cell.
QUICK = tuple(name for name in in_figures("all") if name != "dip")
# What the headline leaves free.
FREE = ("layout.tp=null", "layout.cp=null", "layout.dp=null", "microbatch_size=null")
NODES = ("cluster=h100x64", "cluster.num_nodes={}", "cluster.name={}", "microbatch_size=1", "workload=uniform_mix")
MIXED = ("model=vit1b_llm7b", "global_batch=4", *FREE[:3])


def on_nodes(count: int, *overrides: str) -> tuple[str, ...]:
    return (*(text.format(count if "num" in text else f"h100x{8 * count}") for text in NODES), *overrides)


CELLS = [
    *((f"strategy={name}", "workload=coco") for name in in_figures("all")),
    *((f"strategy={name}", "workload=opencqa_ocr", *FREE) for name in in_figures("main")),
    *((f"strategy={name}", "workload=chartqa", "model=qwen25vl_llama3_3b", "seed=1") for name in QUICK),
    ("strategy=entrain", "workload=opencqa_ocr", *FREE),
    ("strategy=entrain", "workload=mathvision", "strategy.planner.encoder_stages=3", "tuning=own"),
    *(
        on_nodes(4, f"strategy={name}", *MIXED, "workload.sequence_tokens=16384", "workload.vision_share=0.75")
        for name in ("megatron", "hetero_colocated", "hetero_noncolocated")
    ),
]
SLOW = [(f"strategy={name}", "workload=opencqa_ocr", *FREE) for name in QUICK if name != "entrain"]
# Without make test-wide.
OFTEN = [(f"strategy={name}", "workload=coco") for name in FEW]
TOO_LONG = [("strategy=dip", "workload=opencqa_ocr", *FREE)]


@cache
def reference() -> pd.DataFrame:
    return read_file(REFERENCE.read_bytes())


@pytest.mark.wide
@pytest.mark.parametrize(
    "overrides",
    [
        *(pytest.param(each, marks=wide_unless(each in OFTEN)) for each in CELLS),
        *(pytest.param(each, marks=pytest.mark.slow) for each in [*SLOW, *TOO_LONG]),
    ],
    ids=" ".join,
)
def test_a_cell_comes_out_as_in_the_reference_to_the_last_bit(overrides: tuple[str, ...]) -> None:
    (cell,) = compose_cells(overrides)
    record = new_record(cell, "ok", outcome=run_experiment(cell.config))
    again = drifts(reference(), as_written(table_of([record])))
    assert [line for line in again if not line.endswith(": gone")] == []
