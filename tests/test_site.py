"""The site: facts on strategies, errors that name page and strategy, and the pages that ``make docs`` built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from entrain_bench.answers.labels import strategy_facts
from entrain_bench.base.errors import UserError
from entrain_bench.config.tree import choices
from entrain_bench.records.records import Results
from sitegen import strategies
from sitegen.pages import web_address

ROOT = Path(__file__).parents[1]
HTML = ROOT / "build" / "docs" / "html"


def test_every_strategy_has_facts_and_a_page() -> None:
    found = strategy_facts()
    assert sorted(each.name for each in found) == choices("strategy")
    for each in found:
        assert each.balances, each.name
        assert each.needs, each.name
        assert (ROOT / "docs" / "strategies" / each.page.partition("#")[0]).exists()


@pytest.mark.wide
def test_a_strategy_that_cannot_run_is_named_with_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "SHARDED", ())
    with pytest.raises(UserError, match=r"docs/strategies/fsdp.md: strategy=fsdp: .*layout.dp=2"):
        strategies.simulate(["fsdp"], Results(tmp_path))


@pytest.mark.parametrize(
    ("origin", "web"),
    [
        ("https://host.org/owner/name.git", "https://host.org/owner/name"),
        ("git@host.org:owner/name.git", "https://host.org/owner/name"),
        ("ssh://git@host.org/owner/name", "https://host.org/owner/name"),
        ("/folder/name", ""),
    ],
)
def test_a_clone_from_the_web_links_its_repository(origin: str, web: str) -> None:
    assert web_address(origin) == web


@pytest.mark.site
def test_the_site_has_schedules_and_commands_and_loads_nothing() -> None:
    for each in strategy_facts():
        page = (HTML / "docs" / "strategies" / f"{each.name}.html").read_text()
        assert f"{each.name}.svg" in page
        assert f"strategy={each.name}" in page
    loaded = re.compile(r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//|<link[^>]* href="(?:https?:)?//')
    assert not [page for page in HTML.rglob("*.html") if loaded.search(page.read_text())]


@pytest.mark.site
def test_the_first_screen_has_install_and_picture_and_tables_are_sorted_by_a_click() -> None:
    # It imports MLflow, which the quick tests do without.
    from support.browser import chromium, headless

    programs = chromium()
    assert programs is not None, "chromium and chromedriver must be on PATH"
    with headless(*programs) as driver:

        def bottom(selector: str) -> float:
            text = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
            return float(driver.execute_script(text, selector))

        driver.set_window_size(1280, 1000)
        driver.get(f"{HTML.as_uri()}/index.html")
        assert 0 < bottom("h1") < bottom("div.highlight") < bottom(".buttons") < bottom(".front img") <= 1000
        assert len(driver.find_elements("css selector", ".buttons a")) == 3
        assert len(driver.find_elements("css selector", ".sd-card")) == 6
        driver.get(f"{HTML.as_uri()}/docs/claims.html")
        driver.implicitly_wait(30)
        driver.find_element("css selector", "table.dataTable thead th").click()
        cells = driver.find_elements("css selector", "table.dataTable:first-of-type tbody tr td:first-child")
        names = [cell.text.lower() for cell in cells if cell.is_displayed()]
        assert names == sorted(names)
        assert names[0] == "all"
        driver.get(f"{HTML.as_uri()}/docs/command_line.html")
        wide = (
            "return [...document.querySelectorAll('pre')].filter(box => box.scrollWidth > box.clientWidth + 1).length"
        )
        assert driver.execute_script(wide) == 0
