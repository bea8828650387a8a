"""What a run changes inside of its model and cluster, in words."""

from __future__ import annotations

import pytest

from entrain_bench.answers.compare import read_text
from entrain_bench.records.cells import Cell
from entrain_bench.records.leaves import variant_text
from entrain_bench.records.records import new_record
from entrain_bench.records.tables import table_csv
from entrain_bench.run.cells import compose_cells


def cell(*overrides: str) -> Cell:
    (found,) = compose_cells(["model=tiny", "cluster=tiny", *overrides])
    return found


@pytest.mark.wide
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ((), ""),
        # What is changed to what it was is not changed; labels and sources say nothing.
        (("model.modules.vision.num_layers=8", "+model.label=Other", "model.modules.vision.source=mine"), ""),
        (("model.modules.vision.num_layers=9",), "model.modules.vision.num_layers=9"),
        (
            ("cluster.num_nodes=3", "model.modules.llm.num_layers=5"),
            "model.modules.llm.num_layers=5 cluster.num_nodes=3",
        ),
        # What follows from a change is changed as well.
        (
            ("model.modules.llm.hidden_size=512",),
            "model.modules.vision.head_gemms.1.n=512 model.modules.llm.hidden_size=512",
        ),
        # A name of its own says it; strategies and workloads have columns of theirs.
        (("model.modules.vision.num_layers=9", "model.name=mine"), ""),
        (("strategy=entrain", "strategy.scheduler.eager=none", "workload=coco"), ""),
        (("+model.modules.llm.attention=1",), "model.modules.llm.attention=1"),
    ],
)
def test_what_is_changed_inside_of_a_choice(overrides: tuple[str, ...], text: str) -> None:
    assert variant_text(cell(*overrides).config.content()) == text


def test_runs_with_the_same_labels_differ_in_the_table() -> None:
    records = [new_record(each, "ok") for each in (cell(), cell("cluster.num_nodes=3"))]
    table = read_text(table_csv(records))
    assert table["variant"].tolist() == ["", "cluster.num_nodes=3"]
    assert table.columns.tolist().index("variant") == table.columns.tolist().index("workload_parameters") + 1
