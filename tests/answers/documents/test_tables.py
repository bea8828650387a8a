"""Measured tables and leads: what their YAMLs must state, what a cell shows of its runs, who leads whom, and pages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from entrain_bench.answers.documents.claims import COUNTS, claims_output
from entrain_bench.answers.documents.results import HEADLINE, results_output
from entrain_bench.answers.documents.tables import (
    DEGREES,
    GIB,
    MICROBATCHES,
    RECOMPUTED,
    SAMPLES,
    SENTENCES,
    Lead,
    Spread,
    Table,
    lead_markdown,
    load_tables,
    microbatches,
    parse_table,
    splice,
    spread,
    strategies_by_family,
    table_markdown,
    write_tables,
)
from entrain_bench.base.errors import UserError
from entrain_bench.commands import reference
from entrain_bench.commands.recommend import README_TABLE
from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.page import ERROR, calibration_output
from entrain_bench.records.records import MEASURED, METRICS, Results, new_record
from entrain_bench.run.study import Study, SweepOverrides

TABLES = [each for each in load_tables() if isinstance(each, Table)]
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
    table = parse_table("some", VALUES | changes, "mine")
    assert isinstance(table, Table)
    return table


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
    with pytest.raises(UserError, match="key=column: unknown"):
        lead_with(column={})


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
    leads = {f"{each.name}{SENTENCES}" for each in load_tables() if isinstance(each, Lead)}
    assert {HEADLINE, COUNTS, ERROR} <= {file for output in outputs for file in output.files}
    assert {*named} == written | ({*named} & leads)
    assert len(named) == len({*named}) == 5


def test_every_table_is_on_exactly_one_page() -> None:
    pages = {page: page.read_text() for pattern in reference.PAGES for page in DOCS.glob(pattern)}
    assert {DOCS / "tuning.md", DOCS / "../README.md"} < {*pages}
    pages.pop(DOCS / "../README.md")
    pages.pop(DOCS / "costs.md")
    named = [name for text in pages.values() for name in re.findall(r"<!-- table: (.*?) -->", text)]
    assert len(named) == sum(text.count("<!-- end -->") for text in pages.values())
    told = [name for name in named if name.endswith(SENTENCES)]
    assert Counter(named) == Counter([*told, *(table.name for table in load_tables())])
    assert len(named) > 8
    spliced = [splice(text, dict.fromkeys(named, "| new |")) for text in pages.values()]
    assert "".join(spliced).count("| new |") == len(named)


@pytest.mark.wide
@pytest.mark.parametrize("table", load_tables(), ids=lambda table: table.name)
def test_every_table_composes(table: Table | Lead) -> None:
    composer = Composer()
    for sweep in table.sweeps[:: 1 + len(table.sweeps) // 8]:
        first, *_ = composer.sweep(sweep).cells
        composer.run(first)
    composer.save()


LEADS = [each for each in load_tables() if isinstance(each, Lead)]
LEADING: dict[str, Any] = {
    "title": "Who\nleads",
    "common": ["model=tiny", "cluster=tiny", "seed=0,1"],
    "corner": "job",
    "rows": {"one": ["workload=chartqa"], "other": ["workload=coco"]},
    "leader": ["strategy=megatron"],
    "strategies": ["entrain", "dip"],
}


def lead_with(**changes: Any) -> Lead:
    lead = parse_table("some", LEADING | changes, "mine")
    assert isinstance(lead, Lead)
    return lead


def test_all_strategies_of_figures_but_the_leader_are_rivals() -> None:
    families = strategies_by_family()
    assert {*lead_with(strategies="published").strategies} == {*families["published"]}
    assert {"megatron", *lead_with(strategies="all").strategies} == {*chain(*families.values())}


def write_times(study: Study, sweep: SweepOverrides, times: Mapping[str, list[float | None]]) -> None:
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
        write_times(study, lead.of_leader(row), times)
        write_times(study, lead.of_rival(row, ""), times)
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
    write_times(study, lead.of_leader("one"), {"megatron": [1.0, None]})
    write_times(study, lead.of_rival("one", ""), {"entrain": [None, 4.0], "dip": [None, None]})
    text, _ = lead_markdown(lead, study)
    (row,) = rows_of(text)
    # At no seed have both a result.
    assert row[1:5] == ["Entrain", "4.000, 1 of 2 without result", "1.000, 1 of 2 without result", ""]
    assert "- one: Megatron fails at seed 1" in text
    assert "speedup of" not in text
