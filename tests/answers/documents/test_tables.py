"""Measured tables: what their YAMLs must state, what a cell shows of its runs, and pages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from entrain_bench.answers.documents.claims import HEADLINES, HOLDING, claims_output
from entrain_bench.answers.documents.listings import listings
from entrain_bench.answers.documents.mechanisms import gain_names
from entrain_bench.answers.documents.results import HEADLINE, results_output
from entrain_bench.answers.documents.tables import (
    DEGREES,
    GIB,
    MICROBATCHES,
    RECOMPUTED,
    SAMPLES,
    Spread,
    Table,
    load_tables,
    microbatches,
    parse_table,
    splice,
    spread,
    table_markdown,
    write_tables,
)
from entrain_bench.base.errors import UserError
from entrain_bench.commands import reference
from entrain_bench.commands.recommend import README_TABLE
from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.page import ERROR, calibration_output
from entrain_bench.records.records import MEASURED, METRICS, Results, new_record
from entrain_bench.run.study import Study

TABLES = load_tables()
DOCS = Path(__file__).parents[3] / "docs"
VALUES: dict[str, Any] = {
    "title": "Seconds\nand more",
    "common": ["model=tiny", "cluster=tiny", "seed=0,1"],
    "corner": "workload",
    "rows": {"one": ["workload=chartqa"], "other": ["workload=coco"]},
    "columns": {"first": ["strategy=megatron"], "second": ["strategy=entrain"]},
    "show": "{iteration_time_s:.1f}",
}


def table_with(**changes: Any) -> Table:
    return parse_table("some", VALUES | changes, "mine")


def write_runs(study: Study, sweep: tuple[str, ...], *runs: dict[str, Any]) -> None:
    """Records of a sweep's cells: a layout and metrics, or how a run failed."""
    for cell, run in zip(study.cells(*sweep), runs, strict=True):
        record = new_record(cell, run.pop("status", "ok"), "told so")
        object.__setattr__(record, "layout", run.pop("layout", {}))
        frame = run.pop("timeline", None)
        if record.status == "ok":
            object.__setattr__(record, "metrics", {"iteration_time_s": 1.0, **run})
        study.results.write(record, frame)


def timeline(*places: tuple[str, str, int, int]) -> pd.DataFrame:
    """Module, pass, replica and microbatch of every action."""
    return pd.DataFrame(places, columns=["module", "pass", "replica", "microbatch"]).assign(
        lane=0, rank=0, stage=0, part=0, start_s=0.0, end_s=1.0
    )


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(UserError, match="key=metric: unknown"):
        table_with(metric="mfu")


def test_every_table_shows_numbers_that_are_the_same_on_all_machines() -> None:
    numbers = {*METRICS} - {*MEASURED} | {GIB, MICROBATCHES, SAMPLES}
    for table in TABLES:
        values = {name: Spread() if name in numbers else "" for name in table.fields}
        assert table.fields <= numbers | {DEGREES, RECOMPUTED}, table.name
        assert all(text.format(**values) is not text for text in table.show.values())


def test_a_cell_has_the_overrides_of_all_its_row_and_its_column() -> None:
    table = table_with()
    assert table.title == "Seconds and more"
    assert table.sweep("other", "first") == (*VALUES["common"], "workload=coco", "strategy=megatron")
    assert len(table.sweeps) == 4
    single = parse_table("some", {key: value for key, value in VALUES.items() if key != "columns"}, "mine")
    # Of several mappings of rows every combination is a row.
    crossed = table_with(rows=[{1: ["a=1"], 2: ["a=2"]}, {"x": ["b=x", "c=0"]}])
    assert crossed.rows == {"1 x": ("a=1", "b=x", "c=0"), "2 x": ("a=2", "b=x", "c=0")}
    assert table_with(rows="workload=chartqa,coco").rows == {
        "chartqa": ("workload=chartqa",),
        "coco": ("workload=coco",),
    }
    assert single.sweeps == [(*VALUES["common"], "workload=chartqa"), (*VALUES["common"], "workload=coco")]


def test_a_spread_is_its_mean_unless_asked_for_more() -> None:
    numbers = spread(pd.Series([4.0, 1.0, 1.0]))
    # 4.303 standard errors of sqrt(3 / 3).
    assert numbers == Spread(2.0, 1.0, 1.0, 4.0, pytest.approx(4.302653))
    assert f"{spread(pd.Series([4.0])).margin:.1f}" == "nan"
    assert f"{numbers:.0f} {numbers.median:.0f} ({numbers.least:.0f} to {numbers.most:.0f})" == "2 1 (1 to 4)"


def test_cells_show_means_over_seeds_and_count_what_has_no_result(tmp_path: Path) -> None:
    study = Study(Results(tmp_path))
    table = table_with(show={"s": "{iteration_time_s:.1f}", "GiB": "{peak_memory_gib:.2f}, {mfu.most:.0%}"})
    gib = 2**30
    write_runs(
        study,
        table.sweep("one", "first"),
        {"iteration_time_s": 1.0, "peak_memory_bytes": 3.0 * gib, "mfu": 0.25},
        {"iteration_time_s": 2.0, "peak_memory_bytes": 1.5 * gib, "mfu": 0.5},
    )
    done = {"iteration_time_s": 1.0, "peak_memory_bytes": 2.0 * gib, "mfu": 0.25}
    write_runs(study, table.sweep("one", "second"), done, {"status": "failed"})
    write_runs(study, table.sweep("other", "first"), {"status": "skipped"}, {"status": "skipped"})
    caption, _, *lines = table_markdown(table, study).splitlines()
    runs = "Runs of [some](../../experiments/table/mine.yaml): `model=tiny cluster=tiny"
    assert caption.startswith(f"Seconds and more. {runs}")
    assert lines == [
        "| workload | first s | first GiB | second s | second GiB |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| one | 1.5 | 2.25, 50% | 1.0, 1 of 2 failed | 2.00, 25%, 1 of 2 failed |",
        "| other | skipped | skipped | missing | missing |",
        "",
        "- one, second: Entrain fails at seed 1 on Tiny ChartQA: told so",
        "- other, first: Megatron is skipped at seeds 0, 1 on Tiny COCO: told so",
        "- other, second: Entrain has not run at seeds 0, 1 on Tiny COCO: not run",
    ]
    problem = write_tables([table], study)
    assert problem == "some: 1 of 2 runs have no result: told so; some: 2 of 2 runs have no result: not run"
    assert (tmp_path / "tables" / "some.md").read_text() == table_markdown(table, study)


def test_microbatches_are_counted_in_every_replica_of_every_seed(tmp_path: Path) -> None:
    study = Study(Results(tmp_path))
    show = "{num_microbatches.median:.0f} ({num_microbatches.least:.0f} to {num_microbatches.most:.0f})"
    table = table_with(rows={"one": []}, columns={"": []}, show=show)
    # Two in replica 0 and one in replica 1; then four in replica 0. Backwards and encoders do not count.
    llm = [("llm", "forward", 0, 0), ("llm", "forward", 0, 0), ("llm", "forward", 0, 1), ("llm", "forward", 1, 0)]
    others = [("llm", "backward", 0, 2), ("vision", "forward", 1, 5)]
    more = [("llm", "forward", 0, microbatch) for microbatch in range(4)]
    write_runs(study, table.sweep("one", ""), {"timeline": timeline(*llm, *others)}, {"timeline": timeline(*more)})
    assert table_markdown(table, study).splitlines()[-1] == "| one | 2 (1 to 4) |"
    # 512 samples in three microbatches, then in four.
    table = table_with(rows={"one": []}, columns={"": []}, show="{samples_per_microbatch.most:.2f}")
    assert table_markdown(table, study).splitlines()[-1] == "| one | 170.67 |"
    with pytest.raises(UserError, match="show=num_microbatches: must be left out"):
        microbatches(pd.DataFrame(columns=["strategy"]))


def test_tables_are_put_between_their_markers() -> None:
    page = "a\n<!-- table: x -->\nold\n| 1 |\n<!-- end -->\nb\n<!-- table: y -->\n<!-- end -->\nc\n"
    expected = "a\n<!-- table: x -->\n\n| 2 |\n\n<!-- end -->\nb\n<!-- table: y -->\n\n\\1 {y}\n\n<!-- end -->\nc\n"
    tables = {"x": "| 2 |\n", "y": "\\1 {y}", "unused": "z"}
    assert splice(page, tables) == expected
    # Indented, it is a block of code.
    assert splice(page, tables | {"x": "\n    | 2 |\n"}) == expected.replace("| 2 |", "    | 2 |")
    assert splice(expected, tables) == expected
    assert splice("no table\n", tables) == "no table\n"


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(UserError, match="table=z: unknown; choices: x, y"):
        splice("<!-- table: z -->\n<!-- end -->", {"x": "", "y": ""})


def test_the_readme_takes_its_numbers_from_what_is_written() -> None:
    named = re.findall(r"<!-- table: (.*?) -->", (DOCS / "../README.md").read_text())
    outputs = (claims_output(), calibration_output(), results_output())
    written = {Path(file).stem for output in outputs for file in output.files} | {Path(README_TABLE).stem}
    assert {HEADLINE, HOLDING, HEADLINES, ERROR} <= {file for output in outputs for file in output.files}
    # Of the gains of mechanisms it states those that it speaks of.
    assert written - {*gain_names()} < {*named} < written


def test_pages_have_the_tables_of_the_configuration() -> None:
    tables = listings()
    assert "| `seed` | `0` | Random seed for samples, " in tables["keys"]
    assert "| [entrain](entrain.md) | Published systems | A static layout " in tables["strategies"]
    # The H200 has what it does not state from the H100, and sources of its own.
    assert "0.655 derived | 0.655 carried over |" in tables["devices"]
    assert "| a40 | nvlink | `bandwidth_bytes_per_s` | 4.8e10 cited | NCCL " in tables["links"]
    pages_of = ("configuration.md", "constants.md", "models.md", "strategies/README.md")
    pages = "".join((DOCS / page).read_text() for page in pages_of)
    for name, text in tables.items():
        assert f"<!-- table: {name} -->\n\n{text}\n<!-- end -->" in pages


def test_every_table_is_on_exactly_one_page() -> None:
    pages = {page: page.read_text() for pattern in reference.PAGES for page in DOCS.glob(pattern)}
    assert {DOCS / "configuration.md", DOCS / "tuning.md", DOCS / "../README.md"} < {*pages}
    pages.pop(DOCS / "../README.md")
    pages.pop(DOCS / "costs.md")
    named = [name for text in pages.values() for name in re.findall(r"<!-- table: (.*?) -->", text)]
    assert len(named) == sum(text.count("<!-- end -->") for text in pages.values())
    assert Counter(named) == Counter([*listings(), *(table.name for table in TABLES)])
    assert len(named) > 8
    spliced = [splice(text, dict.fromkeys(named, "| new |")) for text in pages.values()]
    assert "".join(spliced).count("| new |") == len(named)


@pytest.mark.wide
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_table_composes(table: Table) -> None:
    composer = Composer()
    for sweep in table.sweeps[:: 1 + len(table.sweeps) // 8]:
        first, *_ = composer.sweep(sweep).cells
        composer.run(first)
    composer.save()
