"""Keys, rows and tables of run records."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.compare import read_text
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.cells import Cell
from entrain_bench.records.leaves import variant_text
from entrain_bench.records.records import METRICS, Record, Results, new_record
from entrain_bench.records.tables import table_csv, write_tables
from entrain_bench.run.cells import compose_cells


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose_cells(["model=tiny", "cluster=tiny"])[0].config


def made_up(config: RunConfig) -> Record:
    return replace(new_record(Cell.of((), config), "ok"), metrics=dict.fromkeys(METRICS, 1.0))


def test_a_record_older_than_a_setting_keeps_its_row(config: RunConfig, tmp_path: Path) -> None:
    record = made_up(config)
    older = {key: value for key, value in record.config.items() if key != "belief_error"}
    results = Results(tmp_path)
    results.write(replace(record, key="0" * 16, config=older), None)
    results.write(record, None)
    write_tables(results)
    table = pd.read_csv(tmp_path / "table.csv", dtype={"key": str}).set_index("key")
    assert pd.isna(table.loc["0" * 16, "belief_error"])
    assert table.loc[record.key, "belief_error"] == 0


def test_a_record_is_read_once_and_again_if_its_file_changes(config: RunConfig, tmp_path: Path) -> None:
    mine, other, record = Results(tmp_path), Results(tmp_path), made_up(config)
    assert mine.read(record.key) is None
    other.write(record, None)
    first = mine.read(record.key)
    assert first == record
    assert mine.read(record.key) is first
    assert pickle.loads(pickle.dumps(mine)) == mine  # noqa: S301
    changed = replace(record, metrics={**record.metrics, "mfu": 0.75})
    other.write(changed, None)
    assert mine.read(record.key) == changed
    # Of the same size, and as old: whoever has not read it does not believe it.
    path = mine.record_path(record.key)
    before = path.stat()
    path.write_text(path.read_text().replace('"mfu": 0.75', '"mfu": 0.76'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Results(tmp_path).read(record.key) is None
    path.unlink()
    assert mine.read(record.key) is None


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


@pytest.mark.parametrize(("name", "value"), [("ep", 4), ("sharding", "zero2"), ("recompute_rule", "together")])
def test_what_a_run_requests_of_its_layout_has_a_column(name: str, value: object) -> None:
    usual = cell().config
    layout = replace(usual.layout, **{name: value})
    records = [new_record(Cell.of((), each), "ok") for each in (usual, replace(usual, layout=layout))]
    table = read_text(table_csv(records))
    assert sorted(table[f"layout_{name}"]) == ["", str(value)]
    assert table.columns.tolist().index(f"layout_{name}") == table.columns.tolist().index("layout_dp") + 1
    assert f"layout_{name}" not in read_text(table_csv(records[:1]))


def test_times_of_experts_have_columns_where_any_run_has_experts() -> None:
    dense = new_record(cell(), "ok")
    shares = {"time_exchange_share": 0.25, "time_experts_share": 0.125}
    table = read_text(table_csv([dense, replace(dense, metrics=shares)]))
    columns = table.columns.tolist()
    place = columns.index("time_unused_share")
    assert columns[place + 1 : place + 3] == [*shares]
    assert table["time_exchange_share"].tolist() == ["", "0.25"]
    assert not {*shares} & {*read_text(table_csv([dense]))}


def test_padding_has_a_column_only_where_a_run_pads() -> None:
    packs, pads, wide = (
        new_record(cell(*texts), "ok")
        for texts in ((), ("padding=longest",), ("padding=multiple", "pad_to_multiple_of=64"))
    )
    assert "padding" not in read_text(table_csv([packs]))
    table = read_text(table_csv([packs, pads]))
    assert table["padding"].tolist() == ["none", "longest"]
    assert "pad_to_multiple_of" not in table
    columns = table.columns.tolist()
    assert columns.index("communicator_bytes") < columns.index("padding") < columns.index("freeze")
    assert read_text(table_csv([packs, wide]))["pad_to_multiple_of"].tolist() == ["8", "64"]


def test_no_bound_of_a_layout_is_below_that_of_every_layout() -> None:
    one = replace(new_record(cell(), "ok"), metrics={"iteration_time_s": 1.0, "cluster_bound_s": 0.5})
    for known, shown, gap in ((0.4, 0.5, 1.0), (0.8, 0.8, 0.25)):
        record = replace(one, metrics={**one.metrics, "lower_bound_s": known, "gap_to_lower_bound": 1 / known - 1})
        (row,) = read_text(table_csv([record])).to_dict("records")
        shown_values = [float(row[name]) for name in ("lower_bound_s", "gap_to_lower_bound", "gap_to_cluster_bound")]
        assert shown_values == [shown, gap, 1.0]
        assert record.row["lower_bound_s"] == known
