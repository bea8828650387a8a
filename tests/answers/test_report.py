"""The report from made-up and from real runs: values by section, escaping, links, the same answer everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.report import current_records, html, markdown, report_of
from entrain_bench.cli import run_command
from entrain_bench.commands.publish import draw_standings
from entrain_bench.records.records import Record, Results
from support.records import aged, runs
from support.sweeps import pasted

SLOW = [2.0, 2.2, 2.1]
FAST = [1.0, 1.0, 1.1]
NEAR = [1.01, 1.0, 1.1]


def report(records: Sequence[Record], has_picture: bool = False) -> Any:
    """The values of the report; pictures take most of the time."""
    answer = Answer.of(records)
    return report_of(answer, "results", standings=draw_standings(answer) if has_picture else None)


def table(page: str, title: str) -> list[list[str]]:
    """The rows of the first table of a section in Markdown, the heading first."""
    lines = page.split(title)[-1].splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| "))
    rows = [line for line in lines[start:] if not line.startswith("| -")]
    count = next((place for place, line in enumerate(rows) if not line.startswith("| ")), len(rows))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows[:count]]


def test_a_row_names_the_winner_its_gain_the_reason_and_ties() -> None:
    records = [
        *runs({"base": SLOW, "best": FAST, "near": NEAR, "broken": [0.5, None, 0.5]}),
        *runs({"base": [*SLOW, 2.0], "other": FAST, "short": FAST[:1]}, workload="x"),
        *runs({"base": [None, None], "other": [1.0, 1.1]}, workload="y"),
        *runs({"base": FAST, "other": SLOW}, workload="z"),
    ]
    heading, *rows = table(markdown(report(records)), "## Every case")
    assert heading == ["workload", "model", "use", "speedup", "as good", "why", "without result", "seeds", "runs"]
    first, second, third, last = rows
    assert first[2] == "**best**"
    assert re.fullmatch(r"2\.03x \(\d\.\d\d to \d\.\d\d\) over base", first[3])
    assert first[4:8] == [
        "near",
        "2.100 to 1.033 s",
        "broken failed at 1 of 3 seeds",
        "0 to 2",
    ]
    assert second[2:] == ["**not decided: other or short**", "-", "-", "-", "none", "0 to 3", "[8](#runs-2)"]
    # Without the baseline's results nothing is made up.
    assert third[2:6] == ["**other**", "-", "no other", "-"]
    assert last[2:6] == ["**base**", "base itself", "no other", "-"]
    alone = table(markdown(report(runs({"base": SLOW}))), "## Every case")
    assert alone[1][2:5] == ["**base**", "nothing to compare with", "-"]


def test_records_of_older_code_are_never_mixed_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrain_bench.answers.report.code_version", lambda *_: "code")
    now = runs({"base": SLOW})
    kept, notes = current_records([*now, *aged(runs({"base": FAST, "best": FAST}), "older")])
    assert kept == now
    assert notes == ["Left out: 6 runs of other code; the same commands run them again."]
    kept, notes = current_records(aged(now, "older"))
    assert len(kept) == 3
    assert notes == ["All 3 runs are of other code; the same commands run them again."]


def test_what_users_name_is_shown_and_never_markup() -> None:
    name = "<script>alert(1)</script>|`x`](javascript:y) **b** &amp;\n\n<script>alert(2)</script>"
    page = report(runs({"base": SLOW, name: FAST}, workload=name))
    text = html(page)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    lines = markdown(page).splitlines()
    # Commands stand in indented blocks, which show everything unmodified.
    assert not [line for line in lines if "<script" in line and not line.startswith("    ")]
    table = [line for line in lines if line.startswith("| ")]
    (answer,) = (line for line in table if "over base" in line)
    assert len(re.findall(r"(?<!\\)\|", answer)) == len(re.findall(r"(?<!\\)\|", table[0]))


@pytest.mark.wide
def test_links_lead_to_places_on_the_page_which_needs_nothing_else() -> None:
    usual = runs({"base": SLOW, "best": [*FAST[:2], None]})
    records = [*usual, *runs({"base": SLOW, "best": FAST}, belief_error=0.5)]
    page = report(records, has_picture=True)
    text, twin = html(page), markdown(page)
    links, places = re.findall(r'href="([^"]*)"', text), re.findall(r' id="([^"]*)"', text)
    assert len(links) > 6
    assert all(link.startswith("#") and link[1:] in places for link in links)
    assert len({*places}) == len(places)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', text))
    assert "http" not in text
    assert {*re.findall(r"\]\(#([^)]*)\)", twin)} <= {*re.findall(r'<a id="([^"]*)">', twin)}


def test_markdown_is_folded_and_mentions_nobody() -> None:
    name = "@someone #12"
    usual = runs({"base": SLOW, name: FAST})
    text = markdown(report(usual))
    # Code blocks mention nobody.
    assert not [line for line in text.splitlines() if "@someone" in line and not line.startswith("    ")]
    assert "@<!-- -->someone #<!-- -->12" in text
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>") > 1
    assert text.index("## Decision") < text.index("## Every case") < text.index("<details>")


SMALL = ["model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1"]


def sweep(*overrides: str) -> None:
    assert run_command([*SMALL, "mlflow=false", "--multirun", *overrides]) == 0


@pytest.mark.wide
def test_a_quick_look_and_then_three_seeds_are_both_in_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep("strategy=megatron,entrain,disttrain", "seed=0")
    sweep("strategy=megatron,entrain", "seed=0,1,2")
    assert run_command(["report"]) == 0
    text = Path("results/report.md").read_text()
    values = Answer.of(Results(Path("results")).records()).to_dict()
    assert values["fewer_seeds"] == [{"strategies": ["disttrain"], "seeds": [0]}]
    assert {"braid", "omnibal"} < {*values["not_run"]}
    assert "| 0 to 2 | [7](#runs-1) |" in text
    commands = re.findall(r"^    (entrain-bench .*)$", text, re.M)
    keys = {cell.key for line in commands for cell in pasted(line)}
    assert keys == {record.key for record in Results(Path("results")).records()}
