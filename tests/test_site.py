"""The site: tables, facts, and that all of it builds strictly and offline."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.answers.labels import strategy_facts
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import choices
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import new_record
from sitegen.__main__ import build
from sitegen.tables import html_table, results_table
from support.browser import chromium, headless

# What Sphinx and its extensions say about themselves.
pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
ROOT = Path(__file__).parents[1]


def test_a_table_has_its_cells_its_commands_and_what_is_filtered() -> None:
    cells = pd.DataFrame([{"name": '<a href="x.html">a &lt; b</a>', "time": "2.5 s"}])
    html = html_table("t", cells, ["run 'x'\nrun y"], ["name"])
    assert "data-filters='name'" in html
    assert '<td><a href="x.html">a &lt; b</a></td>' in html
    assert "<pre>run &#x27;x&#x27;&#10;run y</pre>" in html
    assert html.startswith("````{raw} html\n")


def run(strategy: str, seed: int, seconds: float, **other: object) -> dict[str, object]:
    cell = Cell.composed((f"strategy={strategy}", f"seed={seed}"), Composer())
    metrics = {"iteration_time_s": seconds, "bubble_ratio": 0.5, "peak_memory_bytes": 2**30}
    return {**replace(new_record(cell, "ok"), metrics=metrics).row, "variant": "", **other}


def table_of(runs: list[dict[str, object]], folder: Path) -> pd.DataFrame:
    pd.DataFrame(runs).to_parquet(folder / "table.parquet")
    return results_table(folder / "table.parquet")


def test_results_are_rows_of_unchanged_runs_with_their_commands(tmp_path: Path) -> None:
    times = {"megatron": 4.0, "entrain": 2.0, "dip": 3.0}
    runs = [run(name, seed, seconds) for name, seconds in times.items() for seed in (0, 1)]
    changed = [run("fsdp", 0, 1.0, belief_error=0.3), run("fsdp", 0, 1.0, strategy_parameters="other")]
    table = table_of(runs + changed, tmp_path)
    columns = ["strategy", "seconds per iteration", "speedup over Megatron"]
    assert table[columns].to_numpy().tolist() == [
        ["entrain", "2.000 ± 0.000", "2.00x (2.00 to 2.00)"],
        ["dip", "3.000 ± 0.000", "1.33x (1.33 to 1.33)"],
        ["megatron", "4.000 ± 0.000", "1.00x (1.00 to 1.00)"],
    ]
    assert table["command"][1] == "entrain-bench --multirun strategy=dip 'seed=range(2)'"


def test_a_failed_run_is_counted(tmp_path: Path) -> None:
    failed = {"status": "failed", "bubble_ratio": None, "peak_memory_bytes": None}
    runs = [run("megatron", 0, 4.0), run("entrain", 0, 2.0), run("dip", 0, 3.0), run("dip", 1, float("nan"), **failed)]
    table = table_of(runs, tmp_path).set_index("strategy")
    assert table["seconds per iteration"]["dip"] == "3.000, 1 failed"


def test_every_strategy_has_facts_and_a_page() -> None:
    found = strategy_facts()
    assert sorted(each.name for each in found) == choices("strategy")
    for each in found:
        assert each.balances, each.name
        assert each.needs, each.name
        assert (ROOT / "docs" / "strategies" / each.page.partition("#")[0]).exists()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert build(ROOT, folder) == 0
    return folder / "html"


@pytest.mark.site
@pytest.mark.timeout(1200)
def test_the_site_builds_strictly_with_schedules_and_commands_and_loads_nothing(html: Path) -> None:
    for each in strategy_facts():
        page = (html / "docs" / "strategies" / f"{each.name}.html").read_text()
        assert f"{each.name}.svg" in page
        assert f"strategy={each.name}" in page
    assert (html / "docs" / "claims_table.html").read_text().count("<summary>show</summary>") == len(load_claims())
    loaded = re.compile(r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//|<link[^>]* href="(?:https?:)?//')
    assert not [page for page in html.rglob("*.html") if loaded.search(page.read_text())]


@pytest.mark.site
def test_a_reader_filters_and_sorts_in_a_browser(html: Path) -> None:
    programs = chromium()
    if programs is None:
        pytest.skip("no Chromium is installed")
    with headless(*programs) as driver:
        driver.get((html / "docs" / "claims_table.html").as_uri())
        Select(driver.find_element(By.CSS_SELECTOR, ".table-controls select")).select_by_visible_text("DIP")
        rows = driver.find_elements(By.CSS_SELECTOR, "#claims tbody tr")
        shown = [row for row in rows if row.is_displayed()]
        assert {row.find_element(By.TAG_NAME, "td").text for row in shown} == {"DIP"}
        assert driver.find_element(By.CSS_SELECTOR, ".count").text == f"{len(shown)} of {len(rows)} rows"
        driver.get((html / "docs" / "results_table.html").as_uri())
        heading = driver.find_element(By.CSS_SELECTOR, "#results th:nth-child(7)")
        heading.click()
        cells = driver.find_elements(By.CSS_SELECTOR, "#results td:nth-child(7)")[:9]
        times = [float(cell.text.partition(" ")[0]) for cell in cells]
        assert times == sorted(times)
        assert heading.get_attribute("aria-sort") == "ascending"
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
