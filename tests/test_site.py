"""The site: facts on strategies, and that all of it builds strictly and offline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from entrain_bench.answers.labels import strategy_facts
from entrain_bench.config.tree import choices
from sitegen.__main__ import build

# What Sphinx and its extensions say about themselves.
pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
ROOT = Path(__file__).parents[1]


def test_every_strategy_has_facts_and_a_page() -> None:
    found = strategy_facts()
    assert sorted(each.name for each in found) == choices("strategy")
    for each in found:
        assert each.balances, each.name
        assert each.needs, each.name
        assert (ROOT / "docs" / "strategies" / each.page.partition("#")[0]).exists()


@pytest.mark.site
@pytest.mark.timeout(1200)
def test_the_site_builds_strictly_with_schedules_and_commands_and_loads_nothing(tmp_path: Path) -> None:
    assert build(ROOT, tmp_path) == 0
    html = tmp_path / "html"
    for each in strategy_facts():
        page = (html / "docs" / "strategies" / f"{each.name}.html").read_text()
        assert f"{each.name}.svg" in page
        assert f"strategy={each.name}" in page
    loaded = re.compile(r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//|<link[^>]* href="(?:https?:)?//')
    assert not [page for page in html.rglob("*.html") if loaded.search(page.read_text())]
