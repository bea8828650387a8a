"""The page from made-up runs: who wins by how much, what failed, escaping, links, the same bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from entrain_bench.answers.answer import Answer, known_strategies
from entrain_bench.answers.report.build import page_of
from entrain_bench.answers.report.decision import ONLY_HERE
from entrain_bench.answers.report.page import Fact, Facts, Page, Table, html, markdown
from entrain_bench.answers.report.read import Material, current_records
from entrain_bench.base.errors import UserError
from entrain_bench.commands.publish import Pictures
from entrain_bench.figures._share import draw, share_png, speedups_of
from entrain_bench.records.records import Record, Results
from entrain_bench.records.time_shares import TIME_SHARES
from support.records import aged, at_seeds, runs

SLOW, FAST, NEAR = [2.0, 2.2, 2.1], [1.0, 1.0, 1.1], [1.01, 1.0, 1.1]
PICTURES = Pictures(Results(Path("results")))


def material(records: Sequence[Record], **others: Any) -> Material:
    return Material(Answer.of(records), "1.0", "results", **others)


def worded(records: Sequence[Record]) -> Page:
    """The page without its pictures, which take most of the time."""
    return page_of(material(records))


def section(page: Page, anchor: str) -> Table:
    """The first table of a section."""
    (found,) = (each for each in page.sections if each.anchor == anchor)
    return next(block for block in found.blocks if isinstance(block, Table))


def cells(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.heading, (cell.text for cell in row), strict=True)) for row in table.rows]


def test_the_answer_names_the_winner_its_gain_and_who_is_as_good() -> None:
    page = worded(runs({"base": SLOW, "best": FAST, "near": NEAR, "poor": [3.0, 3.1, 3.2]}))
    (row,) = cells(section(page, "answer"))
    assert (row["use"], row["as good"], row["without result"]) == ("best", "near", "none")
    assert re.fullmatch(r"2\.03x \(\d\.\d\d to \d\.\d\d\) over base", row["speedup"])
    # A quarter of 2.1 s and of 1.033 s, and the rest.
    assert row["why"] == "idle 0.525 to 0.258 s, busy 1.575 to 0.775 s"
    for text in (html(page), markdown(page)):
        assert f"best is the fastest of 4 of 26 strategies ({row['speedup']}). As good: near." in text
        assert text.index("Which balancing strategy") < text.index("Where the time goes") < text.index("Environment")


def test_a_strategy_without_all_results_is_not_recommended_and_named() -> None:
    page = worded(runs({"base": SLOW, "broken": [0.5, None, 0.5], "good": FAST}))
    (row,) = cells(section(page, "answer"))
    assert (row["use"], row["without result"]) == ("good", "broken failed at 1 of 3 seeds")
    assert "failed: broken, 1 of 3 runs (seed 1): out of luck" in markdown(page)


def test_seeds_that_few_strategies_have_are_compared_and_named() -> None:
    page = worded(runs({"base": [*SLOW, 2.0], "other": FAST, "short": FAST[:1]}))
    (row,) = cells(section(page, "answer"))
    assert (row["use"], row["seeds"], row["runs"]) == ("not decided: other or short", "0 to 3", "8")
    assert "Fewer seeds than others: other at seeds 0 to 2; short at seed 0." in markdown(page)


def test_without_the_baselines_results_nothing_is_made_up() -> None:
    page = worded(runs({"base": [None, None], "other": [1.0, 1.1]}))
    (row,) = cells(section(page, "answer"))
    assert (row["use"], row["speedup"], row["why"]) == ("other", "-", "-")


def test_one_seed_has_no_interval_and_one_strategy_nothing_to_compare_with() -> None:
    page = worded(runs({"base": [2.0], "best": [1.0]}))
    assert cells(section(page, "answer"))[0]["speedup"] == "2.00x over base"
    assert "Only one seed was run, so differences may be noise." in markdown(page)
    alone = worded(runs({"base": SLOW}))
    assert cells(section(alone, "answer"))[0]["speedup"] == "nothing to compare with"


def test_strategies_are_ranked_over_workloads_by_the_geometric_mean() -> None:
    first = runs({"base": [2.0, 2.0], "best": [1.0, 1.0], "lacks": [1.0, 1.0]})
    second = runs({"base": [8.0, 8.0], "best": [1.0, 1.0], "lacks": [1.0, None]}, workload="chartqa")
    page = worded([*first, *second])
    best, base = cells(section(page, "ranking"))
    # The geometric mean of 2 and 8, the same at both seeds.
    assert best["speedup"] == "4.00x (4.00 to 4.00)"
    assert best["least to greatest"] == "2.00x to 8.00x"
    assert (best["strategy"], best["fastest or as good"], base["strategy"]) == ("best", "2 of 2", "base")
    assert "Without a mean, for lack of results: lacks." in markdown(page)


def test_other_settings_are_compared_apart_and_with_the_main_one() -> None:
    usual = runs({"base": SLOW, "best": FAST}), runs({"base": SLOW, "best": FAST}, workload="chartqa")
    changed = runs({"base": FAST, "best": SLOW}, belief_error=0.5)
    page = worded([*(each for some in usual for each in some), *changed])
    (other,) = cells(section(page, "settings"))
    assert (other["use"], other["speedup"]) == ("base", "base itself")
    (firm,) = cells(section(page, "robustness"))
    assert (firm["changed"], firm["held"]) == ("belief_error=0.5", "0 of 1")
    assert firm["rank correlation"] == "-1.00 (-1.00 to -1.00)"
    assert len(cells(section(page, "answer"))) == 2


def test_of_settings_with_as_much_to_compare_the_main_one_leaves_the_most_free() -> None:
    given = runs({"base": SLOW, "best": FAST}, layout={"tp": 2, "dp": None}, microbatch_size=4)
    free = runs({"base": FAST, "best": SLOW}, layout={"tp": None, "dp": None}, microbatch_size=None)
    assert cells(section(worded([*given, *free]), "answer"))[0]["use"] == "base"
    # More strategies go before freedom.
    more = runs({"base": SLOW, "best": FAST, "near": NEAR}, layout={"tp": 2, "dp": None}, microbatch_size=4)
    assert cells(section(worded([*more, *free]), "answer"))[0]["use"] == "best"


def test_variants_of_a_strategy_are_told_apart_and_none_is_left_out() -> None:
    tuned = [*runs({"base": SLOW, "best": SLOW}), *runs({"base": SLOW, "best": FAST}, planner_trials=8)]
    assert len(cells(section(worded(tuned), "answer"))) == 1, "the other is another setting"


def test_records_of_older_code_are_never_mixed_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrain_bench.answers.report.read.code_version", lambda *_: "code")
    now = runs({"base": SLOW})
    kept, notes = current_records([*now, *aged(runs({"base": FAST, "best": FAST}), "older")])
    assert kept == now
    assert notes == ["Left out: 6 runs of older code; the same commands run them again."]
    kept, notes = current_records(aged(now, "older"))
    assert len(kept) == 3
    assert notes == ["All 3 runs are of older code; the same commands run them again."]


def test_what_users_name_is_shown_and_never_markup() -> None:
    name = "<script>alert(1)</script>|`x`](javascript:y) **b** &amp;"
    page = worded(runs({"base": SLOW, name: FAST}, workload=name))
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
def test_the_same_runs_give_the_same_bytes() -> None:
    records = [*runs({"base": SLOW, "best": FAST}), *runs({"base": SLOW, "best": FAST}, belief_error=0.5)]
    first, again = (page_of(material(records), PICTURES) for _ in range(2))
    assert (html(first), markdown(first)) == (html(again), markdown(again))


def claims() -> pd.DataFrame:
    one = {
        "name": "one",
        "group": "",
        "claim": "One is faster",
        "paper": "2605.27918",
        "where": "Table 3",
        "paper_value": "2.00x",
        "published_value": "1.90x; 1.10x under other choices",
        "published_verdict": "reproduced; under other choices not reproduced",
        "fair_value": "1.50x",
        "fair_verdict": "partly",
        "assumption": "the baseline is rigid; otherwise, tuned",
        "otherwise_value": "1.20x",
        "otherwise_verdict": "not reproduced",
        "published": "reproduced",
        "fair": "partly",
    }
    # Claims of a group count, and have no row; a claim without a fair setting has no fair verdict.
    return pd.DataFrame([one, one | {"name": "two", "group": "many", "fair_verdict": "", "fair": ""}])


def measured() -> pd.DataFrame:
    """Two programs of two ranks, predicted 10% too long and exactly."""
    errors = dict.fromkeys(("core_error", "replay_error", "action_error", "action_bias", "memory_error"), 0.0)
    bubbles = {"predicted_bubble": 0.2, "measured_bubble": 0.2}
    rows = []
    for strategy, measured_s, predicted_s in (("megatron", 2.0, 2.2), ("entrain", 1.0, 1.0)):
        case = {"prediction": "emulated", "num_ranks": 2, "workload": "coco", "seed": 0, "strategy": strategy}
        times = {"measured_s": measured_s, "predicted_s": predicted_s, "repetitions_s": f"[{measured_s}]"}
        rows.append(case | times | errors | bubbles | {"iteration_error": predicted_s / measured_s - 1, "noise": 0.0})
    return pd.DataFrame(rows)


def test_claims_and_fidelity_are_told_with_their_commands() -> None:
    page = page_of(material(runs({"base": SLOW}), claims=claims(), fidelity=measured()), PICTURES)
    (claim,) = cells(section(page, "claims"))
    assert [claim[name] for name in ("claim", "paper", "fair", "verdict, fair")] == [
        "One is faster",
        "2.00x",
        "1.50x",
        "partly",
    ]
    assert claim["what decides"] == "the baseline is rigid; otherwise, tuned: 1.20x (not reproduced)"
    assert "as published: 2 reproduced; fair: 1 partly." in markdown(page)
    (row,) = cells(section(page, "fidelity"))
    assert (row["programs"], row["iteration error"], row["speedup error"]) == ("2", "5.0%", "10.0%")
    assert "    make fidelity\n" in markdown(page)
    assert "    entrain-bench figures claims\n" in markdown(page)


@pytest.mark.wide
def test_links_lead_to_places_on_the_page_which_needs_nothing_else() -> None:
    usual = runs({"base": SLOW, "best": [*FAST[:2], None]})
    records = [*usual, *runs({"base": SLOW, "best": FAST}, belief_error=0.5)]
    page = page_of(material(records, claims=claims(), fidelity=measured()), PICTURES)
    text, twin = html(page), markdown(page)
    links, places = re.findall(r'href="([^"]*)"', text), re.findall(r' id="([^"]*)"', text)
    assert len(links) > 10
    assert all(link.startswith("#") and link[1:] in places for link in links)
    assert len({*places}) == len(places)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', text))
    assert "http" not in text
    assert {*re.findall(r"\]\(#([^)]*)\)", twin)} <= {*re.findall(r'<a id="([^"]*)">', twin)}


def test_numbers_have_the_command_of_their_runs() -> None:
    page = worded(at_seeds(runs({"base": SLOW, "best": FAST}), "best", 0, 1))
    (found,) = section(page, "answer").rows
    after = markdown(page).split(f'<a id="{found[-1].link}"></a>')[1]
    assert "    entrain-bench --multirun strategy=base workload=coco seed=0,1,2\n" in after
    assert "    entrain-bench --multirun strategy=best workload=coco seed=0,1\n" in after


def decided(records: Sequence[Record]) -> dict[str, Fact]:
    """The first lines, by name."""
    first = worded(records).sections[0].blocks[0]
    assert isinstance(first, Facts)
    return {fact.name: fact for fact in first.facts}


def test_the_first_lines_are_for_whoever_decides() -> None:
    trained = runs({"megatron": SLOW, "entrain": FAST, "near": NEAR})
    found = decided([replace(one, labels={**one.labels, "harness": "simulate"}) for one in trained])
    assert [*found] == ["Use", "Gain", "Why", "Not run", "Where it runs today", "Next step"]
    assert found["Use"].text == "entrain; near is as good."
    assert found["Gain"].text.startswith("2.03x (1.70 to 2.43) over megatron; 3 seeds; 95% interval not reliable")
    saved = "It saves 0.800 s (busy) and 0.267 s (idle)."
    assert found["Why"].text == f"An iteration takes 1.033 s instead of 2.100 s. {saved}"
    assert found["Not run"].text.startswith("20 of 23 strategies (braid, ")
    assert found["Where it runs today"].text == ONLY_HERE.format(name="entrain")
    assert found["Next step"].command == "entrain-bench recommend workload=coco"
    assert decided(trained)["Next step"].command.startswith("entrain-bench --multirun strategy=entrain workload=coco")


def test_nothing_is_said_of_strategies_that_did_not_run_if_all_ran() -> None:
    records = runs({"megatron": SLOW, **dict.fromkeys(known_strategies([]), NEAR), "entrain": FAST})
    found = decided(records)
    assert found["Use"].text.startswith("entrain")
    assert "Not run" not in found or not found["Not run"].text


def test_the_reason_names_the_classes_of_time_that_shrink() -> None:
    shares = {name: dict.fromkeys(TIME_SHARES, 0.0) for name in ("base", "best")}
    shares["base"] |= {"time_work_share": 0.5, "time_pipeline_share": 0.4, "time_comm_share": 0.1}
    shares["best"] |= {"time_work_share": 1.0}
    records = [
        replace(one, metrics={**one.metrics, **shares[str(one.labels["strategy"])]})
        for one in runs({"base": [2.0] * 3, "best": [1.0] * 3})
    ]
    # Work takes one second of both.
    saves = "It saves 0.800 s (pipeline fill and drain) and 0.200 s (communication)."
    assert decided(records)["Why"].text.endswith(saves)


def test_what_is_not_decided_is_run_at_more_seeds() -> None:
    found = decided(runs({"megatron": SLOW[:1], "entrain": FAST[:1]}))
    assert found["Gain"].text == "2.00x over megatron; 1 seed; only one seed was run, so differences may be noise."
    command = "entrain-bench --multirun strategy=entrain,megatron workload=coco seed=0,1,2,3,4"
    assert found["Next step"] == Fact("Next step", "Run more seeds; now seed 0:", command)
    lost = decided(runs({"base": [None] * 3, "other": [None] * 3}))
    assert lost["Use"].text == "No strategy has all its results."
    assert lost["Not run"].text.endswith("Of 6 runs 6 failed (seeds 0 to 2).")


def test_exceptions_are_named_and_ones_own_strategy_is_not_looked_up() -> None:
    records = [
        *runs({"base": SLOW, "mine": FAST}),
        *runs({"base": SLOW, "mine": FAST}, workload="chartqa"),
        *runs({"base": FAST, "mine": SLOW}, workload="ocr"),
    ]
    found = decided(records)
    assert found["Use"].text == "mine, the fastest in 2 of 3 cases (ocr: base)."
    assert "geometric mean over 3 cases" in found["Gain"].text
    assert found["Where it runs today"].text == "mine is not of this suite; its author knows."


def test_markdown_fits_an_issue_and_mentions_nobody() -> None:
    name = "@someone #12"
    usual = runs({"base": SLOW, name: FAST})
    text = markdown(worded(usual))
    # Code blocks mention nobody.
    assert not [line for line in text.splitlines() if "@someone" in line and not line.startswith("    ")]
    assert "@<!-- -->someone #<!-- -->12" in text
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>") > 1
    assert text.index("## Decision") < text.index("## Every case") < text.index("<details>")
    many = [one for batch in range(300) for one in runs({"base": SLOW, "best": FAST}, global_batch=batch)]
    long = markdown(worded(many))
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


def test_nothing_to_compare_is_no_picture() -> None:
    with pytest.raises(UserError, match="share=true: needs results of at least two strategies"):
        share_png(Answer.of(runs({"base": SLOW})), "results")
