"""The site: links, tables, diagrams, navigation, and that all of it builds strictly and offline."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import pandas as pd
import pytest
from selenium.webdriver.common.by import By

from entrain_bench.answers import strategy_facts as facts_module
from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.answers.strategy_facts import strategy_facts
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices
from entrain_bench.records.leaves import parameters_text
from sitegen.__main__ import build, server_of
from sitegen.check import problems
from sitegen.diagram import Schedule, alternative, svg
from sitegen.links import Site
from sitegen.pages import STRATEGY_INDEX, Section, broken_links, committed_pages, complete, halves, navigation
from sitegen.results import result_rows
from sitegen.tables import Cell, Column, Row, html_table
from support.browser import chromium, headless

# What Sphinx and its extensions say about themselves.
pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
ROOT = Path(__file__).parents[1]
PARTS = ("planner", "assigner", "scheduler")


def rewritten(text: str, source: str, place: str, root: Path) -> tuple[str, list[str], list[str]]:
    site = Site(root, {"docs/a.md": "a.md", "docs/sub/b.md": "sub/b.md", "docs/sub/README.md": "sub/index.md"})
    used, broken = list[str](), list[str]()
    return site.rewritten(text, source, place, used.append, broken.append), used, broken


def test_links_lead_to_pages_and_files_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("")
    text = (
        "[a](../a.md#part) ![p](../../x.yaml) [s](../sub) [o](https://o.org) [h](#here) `[c](c.md)`\n\n    [d](d.md)\n"
    )
    found, used, broken = rewritten(text, "docs/sub/b.md", "sub/b.md", tmp_path)
    assert found == text.replace("../../x.yaml", "../files/x.yaml").replace("(../sub)", "(index.md)")
    assert used == ["x.yaml"]
    assert broken == []


def test_images_that_state_their_width_are_links_too(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("")
    text = '<img src="../../x.png" alt="a b" width="450">\n\n`<img src="../../x.png">` <img src="data:,">\n'
    found, used, broken = rewritten(text, "docs/sub/b.md", "sub/b.md", tmp_path)
    assert found == text.replace("../../x.png", "../files/x.png", 1)
    assert (used, broken) == (["x.png"], [])


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    found, _, broken = rewritten("[n](none.md)", "docs/a.md", "a.md", tmp_path)
    assert found == "[n](none.md)"
    assert broken == ["docs/a.md: link to none.md, which does not exist"]


def test_a_table_has_its_values_to_choose_from_and_its_commands() -> None:
    row = Row("one", [Cell("a < b", link="x.html#y"), Cell("2.5 s", value=2.5)], ["run 'x'", "run y"])
    html = html_table("t", [Column("name", filtered=True), Column("time", numbers=True)], [row])
    assert '<option value="">all</option><option>a &lt; b</option></select>' in html
    assert '<tr id="one"><td><a href="x.html#y">a &lt; b</a></td><td data-value="2.5">2.5 s</td>' in html
    assert "<pre>run &#x27;x&#x27;\nrun y</pre>" in html
    assert html.startswith("````{raw} html\n")


def schedule(seconds: float = 2.0) -> Schedule:
    rows = [
        ("vision", 0, 0, 1, 0, "forward", 0.0, 0.5),
        ("llm", 1, 1, 2, 0, "forward", 0.5, 1.0),
        ("llm", 1, 1, 2, 0, "backward", 1.0, seconds),
    ]
    columns = ["module", "lane", "rank", "num_ranks", "parent", "pass", "start_s", "end_s"]
    actions = pd.DataFrame(rows, columns=columns).assign(replica=0, stage=0)
    return Schedule(actions, {"vision": "encoder", "llm": "llm"}, seconds, 0.25, "llm pp1; vision pp1")


def test_a_diagram_has_a_block_for_every_gpu_of_a_pass_and_the_same_bytes_twice() -> None:
    text = svg(schedule(), 4.0, 3.0)
    assert text == svg(schedule(), 4.0, 3.0)
    # One GPU, twice two, and the legend's four.
    assert text.count("<rect") == 1 + 2 * 2 + 4
    assert text.count("backward LLM, microbatch 0, 1.000 to 2.000 s") == 2
    assert text.count('class="gpu"') == 3


def test_a_diagram_is_said_in_words() -> None:
    words = "Iteration time 2.00 s (1.50x over Megatron), GPUs idle 25% of the time; layout: llm pp1; vision pp1."
    assert alternative(schedule(), 3.0) == words
    assert words in svg(schedule(), 4.0, 3.0)


def run(strategy: str, seed: int, seconds: float, **other: object) -> dict[str, object]:
    config = compose(f"strategy={strategy}")
    parts = {
        name: config.strategy[name]["_target_"].rpartition(".")[2] for name in ("planner", "assigner", "scheduler")
    }
    return {
        "strategy": strategy, "workload": config.workload["name"], "model": config.model["name"], "seed": seed,
        "cluster": "a40x64", "harness": "simulate", "status": "ok", "variant": "", "iteration_time_s": seconds,
        "bubble_ratio": 0.5, "peak_memory_bytes": 2**30, "global_batch": 512, "microbatch_size": 4, "iterations": 4,
        "layout_tp": 2, "layout_cp": 1, "layout_pp": pd.NA, "layout_dp": 4, "belief_error": 0.0,
        "strategy_parameters": parameters_text(config.strategy),
        "workload_parameters": parameters_text(config.workload), **parts, **other,
    }  # fmt: skip


def test_results_are_rows_of_unchanged_runs_with_their_commands() -> None:
    times = {"megatron": 4.0, "entrain": 2.0, "dip": 3.0}
    runs = [run(name, seed, seconds) for name, seconds in times.items() for seed in (0, 1)]
    changed = [run("fsdp", 0, 1.0, belief_error=0.3), run("fsdp", 0, 1.0, strategy_parameters="other")]
    rows = [*result_rows(pd.DataFrame(runs + changed), {"entrain": "Entrain"})]
    assert [(row.cells[5].text, row.cells[6].text, row.cells[7].text) for row in rows] == [
        ("Entrain", "2.000 ± 0.000", "2.00x (2.00 to 2.00)"),
        ("dip", "3.000 ± 0.000", "1.33x (1.33 to 1.33)"),
        ("megatron", "4.000 ± 0.000", "1.00x (1.00 to 1.00)"),
    ]
    assert rows[1].commands == ["entrain-bench --multirun strategy=dip 'seed=range(2)'"]
    assert rows[0].cells[5].link == "strategies/entrain.html"


def test_a_failed_run_is_counted() -> None:
    failed = {"status": "failed", "bubble_ratio": None, "peak_memory_bytes": None}
    runs = [run("megatron", 0, 4.0), run("entrain", 0, 2.0), run("dip", 0, 3.0), run("dip", 1, float("nan"), **failed)]
    rows = [*result_rows(pd.DataFrame(runs), {})]
    assert next(row.cells[6].text for row in rows if row.cells[5].text == "dip") == "3.000, 1 failed"


def test_every_strategy_has_facts_and_a_page() -> None:
    found = strategy_facts()
    assert sorted(each.name for each in found) == choices("strategy")
    for each in found:
        assert each.balances, each.name
        assert each.needs, each.name
        assert (ROOT / "docs" / "strategies" / each.page.partition("#")[0]).exists()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("braid:", "braids:", "braids: unknown"),
        ("  code:", "  cod:", "cod: unknown"),
        ("  balances: [", "  balances: x  # [", "balances=x: must be a list"),
    ],
)
def test_wrong_facts_are_named(
    old: str, new: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "experiments" / facts_module.FILE).read_text()
    (tmp_path / facts_module.FILE).write_text(text.replace(old, new, 1))
    (tmp_path / "strategy").symlink_to(ROOT / "experiments" / "strategy")
    monkeypatch.setattr(facts_module, "config_tree", lambda: tmp_path)
    with pytest.raises(UserError, match=problem):
        strategy_facts()


def test_pages_that_no_section_names_stand_in_the_last_one() -> None:
    sections = [
        Section("S", STRATEGY_INDEX, "", {}),
        Section("A", "a.md", "", {"docs/x.md": "X"}),
        Section("Z", "z.md", "", {}),
    ]
    places = dict.fromkeys(("README.md", "docs/x.md", "docs/new.md", "docs/claims/dip.md", "docs/strategies/e.md"), "")
    found = complete(sections, places | {section.place: "" for section in sections})
    assert [[*section.pages] for section in found] == [["docs/strategies/e.md"], ["docs/x.md"], ["docs/new.md"]]
    with pytest.raises(UserError, match=r"docs/none.md: must be a page of the site"):
        complete([Section("A", "a.md", "", {"docs/none.md": ""})], places)


def test_the_navigation_names_pages_that_are_there() -> None:
    sections, places = navigation(ROOT, committed_pages(ROOT), strategy_facts())
    assert {places[page] for section in sections for page in section.pages} >= {"recommend.md", "strategies/braid.md"}


def test_every_link_of_the_documents_leads_somewhere() -> None:
    pages = committed_pages(ROOT)
    assert broken_links(ROOT, pages, navigation(ROOT, pages, strategy_facts())[1]) == []


def test_the_readme_is_cut_after_its_first_section() -> None:
    home, start = halves("# T\n\nIntro.\n\n## Status\n\nGood.\n\n## Install\n\nDo.\n\n## More\n\nEnd.\n")
    assert home == "# T\n\nIntro.\n\n## Status\n\nGood.\n"
    assert start == "## Install\n\nDo.\n\n## More\n\nEnd.\n"


def test_broken_links_and_what_is_loaded_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top1"></h1><a href="b.html#x">b</a><a href="#top1">a</a><a href="https://x.org">x</a>'
    )
    (tmp_path / "b.html").write_text(
        '<a href="c.html">c</a><script src="https://cdn.org/x.js"></script><img src="data:,">'
    )
    assert problems(tmp_path) == [
        "a.html: b.html#x: no such anchor",
        "b.html: c.html: no such file",
        "b.html: loads https://cdn.org/x.js",
    ]


def test_the_site_is_served_on_this_machine_only(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("here")
    with server_of(tmp_path, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        Thread(target=server.handle_request).start()
        with urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=10) as answer:
            assert answer.read() == b"here"


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert build(ROOT, folder) == 0
    return folder / "html"


@pytest.mark.slow
def test_the_site_builds_strictly_with_a_diagram_and_commands(html: Path) -> None:
    for each in strategy_facts():
        page = (html / "strategies" / f"{each.name}.html").read_text()
        assert page.count('<svg class="schedule"') == 1
        assert f"strategy={each.name}" in page
    assert (html / "claims.html").read_text().count('<td class="command">') == len(load_claims())


@pytest.mark.slow
def test_a_reader_filters_and_sorts_in_a_browser(html: Path) -> None:
    programs = chromium()
    if programs is None:
        pytest.skip("no Chromium is installed")
    with headless(*programs) as driver:
        driver.get(f"{(html / 'claims.html').as_uri()}?paper=DIP")
        rows = driver.find_elements(By.CSS_SELECTOR, "#claims tbody tr")
        own = [row for row in rows if row.is_displayed()]
        assert {row.find_element(By.TAG_NAME, "td").text for row in own} == {"DIP"}
        assert driver.find_element(By.CSS_SELECTOR, "[data-count]").text == f"{len(own)} of {len(rows)} rows"
        driver.get((html / "results_table.html").as_uri())
        heading = driver.find_element(By.CSS_SELECTOR, "#results th:nth-child(7)")
        heading.click()
        cells = driver.find_elements(By.CSS_SELECTOR, "#results td:nth-child(7)")[:9]
        times = [float(cell.get_attribute("data-value") or "inf") for cell in cells]
        assert times == sorted(times)
        assert heading.get_attribute("aria-sort") == "ascending"
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
