"""The report from made-up runs: values by section, escaping, links, the same bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.report import SECTIONS, Material, current_records, html, markdown, report_of
from entrain_bench.commands.publish import Pictures
from entrain_bench.figures._share import draw, speedups_of
from entrain_bench.records.records import Record, Results
from support.records import aged, runs

SLOW = [2.0, 2.2, 2.1]
FAST = [1.0, 1.0, 1.1]
NEAR = [1.01, 1.0, 1.1]
PICTURES = Pictures(Results(Path("results")))


def report(records: Sequence[Record], pictures: Pictures | None = None) -> Any:
    """The values of the report; pictures take most of the time."""
    return report_of(Material(Answer.of(records), "1.0", "results"), pictures)


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


def test_sections_come_in_order_and_only_if_there_is_anything_to_say() -> None:
    def anchors(page: str) -> list[str]:
        return re.findall(r'<h2 id="(\w+)">', page)

    usual = runs({"base": SLOW, "best": FAST})
    assert anchors(html(report(usual))) == ["decision", "answer", "environment", "rerun"]
    many = [*usual, *runs({"base": SLOW, "best": [*FAST[:2], None]}, workload="x")]
    many += runs({"base": SLOW, "best": FAST}, belief_error=0.5)
    assert anchors(html(report(many))) == [name for name in SECTIONS if name != "ranking"]


def test_other_settings_are_compared_apart() -> None:
    usual = [*runs({"base": SLOW, "best": FAST}), *runs({"base": SLOW, "best": FAST}, workload="chartqa")]
    values = report([*usual, *runs({"base": FAST, "best": SLOW}, belief_error=0.5)])
    assert len(values["answer"]) == 2
    (other,) = values["settings"]["cases"]
    assert other["fastest"] == ["base"]


def test_of_settings_with_as_much_to_compare_the_main_one_leaves_the_most_free() -> None:
    given = runs({"base": SLOW, "best": FAST}, layout={"tp": 2, "dp": None}, microbatch_size=4)
    free = runs({"base": FAST, "best": SLOW}, layout={"tp": None, "dp": None}, microbatch_size=None)
    assert report([*given, *free])["answer"][0]["fastest"] == ["base"]
    # More strategies go before freedom.
    more = runs({"base": SLOW, "best": FAST, "near": NEAR}, layout={"tp": 2, "dp": None}, microbatch_size=4)
    assert report([*more, *free])["answer"][0]["fastest"] == ["best"]
    tuned = [*runs({"base": SLOW, "best": SLOW}), *runs({"base": SLOW, "best": FAST}, planner_trials=8)]
    assert len(report(tuned)["answer"]) == 1, "the other is another setting"


def test_records_of_older_code_are_never_mixed_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrain_bench.answers.report.code_version", lambda *_: "code")
    now = runs({"base": SLOW})
    kept, notes = current_records([*now, *aged(runs({"base": FAST, "best": FAST}), "older")])
    assert kept == now
    assert notes == ["Left out: 6 runs of older code; the same commands run them again."]
    kept, notes = current_records(aged(now, "older"))
    assert len(kept) == 3
    assert notes == ["All 3 runs are of older code; the same commands run them again."]


def test_what_users_name_is_shown_and_never_markup() -> None:
    name = "<script>alert(1)</script>|`x`](javascript:y) **b** &amp;"
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
    page = report(records, PICTURES)
    text, twin = html(page), markdown(page)
    links, places = re.findall(r'href="([^"]*)"', text), re.findall(r' id="([^"]*)"', text)
    assert len(links) > 6
    assert all(link.startswith("#") and link[1:] in places for link in links)
    assert len({*places}) == len(places)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', text))
    assert "http" not in text
    assert {*re.findall(r"\]\(#([^)]*)\)", twin)} <= {*re.findall(r'<a id="([^"]*)">', twin)}


def test_the_first_lines_are_for_whoever_decides() -> None:
    trained = runs({"megatron": SLOW, "entrain": FAST, "near": NEAR})
    simulated = [replace(one, labels={**one.labels, "harness": "simulate"}) for one in trained]
    facts = dict(re.findall(r"^- \*\*([^*]+)\*\*: (.*)$", markdown(report(simulated)), re.M))
    assert [*facts] == ["Use", "Gain", "Why", "Not run", "Where it runs today", "Next step"]
    assert facts["Use"] == "entrain; near is as good."
    assert facts["Why"] == "An iteration takes 1.033 s instead of 2.100 s."
    assert facts["Not run"].startswith("20 of 23 strategies (braid, ")
    assert facts["Where it runs today"] == "In this suite alone: no other framework runs entrain unmodified."
    assert facts["Next step"] == "Freeze a plan and judge it on fresh seeds:"
    several = [*runs({"base": SLOW, "mine": FAST}), *runs({"base": FAST, "mine": SLOW}, "a")]
    several += runs({"base": SLOW, "mine": FAST}, "b")
    page = markdown(report(several))
    assert "- **Use**: mine, the fastest in 2 of 3 cases (a: base)." in page
    assert "- **Where it runs today**: mine is not of this suite; its author knows." in page
    lost = markdown(report(runs({"base": [None] * 3, "other": [None] * 3})))
    assert "- **Use**: No strategy has all its results." in lost
    assert "- **Next step**: Run more seeds; now seeds 0 to 2:" in lost


def test_markdown_fits_an_issue_and_mentions_nobody() -> None:
    name = "@someone #12"
    usual = runs({"base": SLOW, name: FAST})
    text = markdown(report(usual))
    # Code blocks mention nobody.
    assert not [line for line in text.splitlines() if "@someone" in line and not line.startswith("    ")]
    assert "@<!-- -->someone #<!-- -->12" in text
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>") > 1
    assert text.index("## Decision") < text.index("## Every case") < text.index("<details>")
    many = [one for batch in range(300) for one in runs({"base": SLOW, "best": FAST}, global_batch=batch)]
    long = markdown(report(many))
    assert len(long) < 65_536
    assert "To keep this short, only report.html has: " in long
    assert long.index("## Decision") < 100


@pytest.mark.parametrize("several", [False, True])
def test_the_picture_to_share_states_job_winner_interval_and_command(several: bool) -> None:
    records = runs({"base": SLOW, "best": FAST, "near": NEAR})
    records += runs({"base": SLOW, "best": FAST, "near": NEAR}, workload="chartqa") if several else []
    answer = Answer.of(records)
    figure = draw(answer, speedups_of(answer), "results")
    words = " ".join(text.get_text() for text in figure.texts)
    assert "best is the fastest" in words
    assert ("As good: near." in words) is not several
    assert re.search(r"\d\.\d\dx \(\d\.\d\d to \d\.\d\d\) over base; .*3 seeds", words)
    assert ("2 workloads, model m" if several else "workload coco, model m") in words
    workloads = "coco,chartqa" if several else "coco"
    assert f"entrain-bench --multirun strategy=base,best,near workload={workloads} seed=0,1,2" in words
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[0] == "best"
    assert {*names} == {"base", "best", "near"}
