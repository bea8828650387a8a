"""The page from made-up runs: who wins by how much, what failed, escaping, links, the same bytes."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest

from entrain_bench.answers.report.build import page_of
from entrain_bench.answers.report.page import Page, Table
from entrain_bench.answers.report.render import html, markdown
from entrain_bench.answers.report.words import TIMES
from entrain_bench.commands.pictures import ReportPictures
from support.report import material, runs

SLOW, FAST, NEAR = [2.0, 2.2, 2.1], [1.0, 1.0, 1.1], [1.01, 1.0, 1.1]
# 4.303 standard errors for two degrees of freedom.
T_QUANTILE = 4.302653


def worded(*tables: pd.DataFrame) -> Page:
    """The page without its pictures, which take most of the time."""
    return page_of(material(*tables))


def section(page: Page, anchor: str) -> Table:
    """The first table of a section."""
    (found,) = (each for each in page.sections if each.anchor == anchor)
    return next(block for block in found.blocks if isinstance(block, Table))


def cells(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.heading, (cell.text for cell in row), strict=True)) for row in table.rows]


def test_the_answer_names_the_winner_its_gain_and_who_is_as_good() -> None:
    page = worded(runs({"base": SLOW, "best": FAST, "near": NEAR, "poor": [3.0, 3.1, 3.2]}))
    (row,) = cells(section(page, "answer"))
    logs = [math.log(slow / fast) for slow, fast in zip(SLOW, FAST, strict=True)]
    mean = sum(logs) / 3
    half = T_QUANTILE * math.sqrt(sum((each - mean) ** 2 for each in logs) / 2 / 3)
    low, middle, high = (math.exp(mean + end) for end in (-half, 0.0, half))
    assert row["use"] == "Best"
    assert row["speed-up"] == f"{middle:.2f}{TIMES} ({low:.2f} to {high:.2f}) over Base"
    assert row["as good"] == "Near"
    assert "over Base; not significantly slower: Near)." in markdown(page)
    assert row["without result"] == "none"
    # A quarter of 2.1 s and of 1.033 s, and the rest.
    assert row["why"] == "idle 0.525 to 0.258 s, busy 1.575 to 0.775 s"
    for text in (html(page), markdown(page)):
        assert f"{middle:.2f}{TIMES} ({low:.2f} to {high:.2f}) over Base" in text
        assert text.index("Which strategy to use") < text.index("Where the time goes") < text.index("Environment")


def test_a_strategy_without_all_results_is_not_recommended_and_named() -> None:
    page = worded(runs({"base": SLOW, "broken": [0.5, None, 0.5], "good": FAST}))
    (row,) = cells(section(page, "answer"))
    assert (row["use"], row["without result"]) == ("Good", "Broken fails at 1 of 3 seeds")
    assert "Broken fails at seed 1 on Tiny Coco: told so" in markdown(page)


def test_seeds_that_few_strategies_have_are_left_out_and_lacking_ones_are_named() -> None:
    page = worded(runs({"base": [*SLOW, 2.0], "other": FAST, "short": FAST[:1]}))
    (row,) = cells(section(page, "answer"))
    assert row["without result"] == "Short has not run at 2 of 3 seeds"
    assert row["runs"] == "9"


def test_without_the_baselines_results_nothing_is_made_up() -> None:
    page = worded(runs({"base": [None, None], "other": [1.0, 1.1]}))
    (row,) = cells(section(page, "answer"))
    assert (row["use"], row["speed-up"], row["why"]) == ("Other", "Base fails", "-")


def test_one_seed_has_no_interval_and_one_strategy_nothing_to_compare_with() -> None:
    page = worded(runs({"base": [2.0], "best": [1.0]}))
    assert cells(section(page, "answer"))[0]["speed-up"] == f"2.00{TIMES} over Base"
    assert "With one seed nothing is known" in markdown(page)
    alone = worded(runs({"base": SLOW}))
    assert cells(section(alone, "answer"))[0]["speed-up"] == "nothing to compare with"


@pytest.mark.wide
def test_strategies_are_ranked_over_workloads_by_the_geometric_mean() -> None:
    first = runs({"base": [2.0, 2.0], "best": [1.0, 1.0], "lacks": [1.0, 1.0]})
    second = runs({"base": [8.0, 8.0], "best": [1.0, 1.0], "lacks": [1.0, None]}, workload="chartqa")
    table = section(worded(first, second), "ranking")
    best, base = cells(table)
    # The geometric mean of 2 and 8, the same at both seeds.
    assert best["speed-up"] == f"4.00{TIMES} (4.00 to 4.00)"
    assert best["least to greatest"] == f"2.00 to 8.00{TIMES}"
    assert (best["strategy"], best["fastest or as good"], base["strategy"]) == ("Best", "2 of 2", "Base")
    assert "Without a mean: Lacks." in markdown(worded(first, second))


def test_other_settings_are_compared_apart_and_with_the_main_one() -> None:
    usual = runs({"base": SLOW, "best": FAST}), runs({"base": SLOW, "best": FAST}, workload="chartqa")
    page = worded(*usual, runs({"base": FAST, "best": SLOW}, belief_error="0.5"))
    (other,) = cells(section(page, "settings"))
    assert (other["setting"], other["use"], other["speed-up"]) == ("belief_error=0.5", "Base", "Base itself")
    (firm,) = cells(section(page, "robustness"))
    assert (firm["changed"], firm["held"]) == ("belief_error=0.5", "0 of 1")
    assert firm["rank correlation"] == "-1.00 (-1.00 to -1.00)"
    assert len(cells(section(page, "answer"))) == 2


def test_of_a_strategy_the_parameters_with_most_runs_count() -> None:
    usual = runs({"base": SLOW, "best": FAST}, strategy_parameters="planner.a=1")
    tuned = runs({"best": [0.1]}, strategy_parameters="planner.a=2")
    page = worded(usual, tuned)
    assert cells(section(page, "answer"))[0]["use"] == "Best"
    assert "Left out: 1 run with other parameters" in markdown(page)
    both = worded(usual, runs({"best": SLOW}, strategy_parameters="planner.a=2"))
    assert cells(section(both, "answer"))[0]["use"] == "Best (a=1)"


def test_of_the_same_run_by_other_code_the_newest_counts() -> None:
    old, new = runs({"base": SLOW, "best": SLOW}), runs({"best": FAST})
    page = worded(old, new)
    assert cells(section(page, "answer"))[0]["use"] == "Best"
    assert "Left out: 3 runs of older code" in markdown(page)


def test_what_users_name_is_shown_and_never_markup() -> None:
    name = "<script>alert(1)</script>|`x`](javascript:y) **b** &amp;"
    page = worded(runs({"base": SLOW, name: FAST}, workload=name))
    text = html(page)
    assert "<script" not in text
    assert "&lt;script&gt;" in text.lower()
    lines = markdown(page).splitlines()
    # Commands stand in indented blocks, which show everything as it is.
    assert not [line for line in lines if "<script" in line.lower() and not line.startswith("    ")]
    table = [line for line in lines if line.startswith("| ")]
    (answer,) = (line for line in table if line.startswith("| Tiny |") and "1." in line and "over Base" in line)
    assert len(re.findall(r"(?<!\\)\|", answer)) == len(re.findall(r"(?<!\\)\|", table[0]))


@pytest.mark.wide
def test_the_same_data_gives_the_same_bytes_in_whatever_order() -> None:
    tables = runs({"base": SLOW, "best": FAST}), runs({"base": SLOW, "best": FAST}, belief_error="0.5")
    first, again = (page_of(material(*tables), ReportPictures()) for _ in range(2))
    assert (html(first), markdown(first)) == (html(again), markdown(again))
    turned = worded(*(table.iloc[::-1] for table in tables[::-1]))
    assert markdown(turned) == markdown(worded(*tables))


def claims() -> pd.DataFrame:
    one = {
        "name": "one",
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
        "runs": "a=1,2 b=x / a=1 b=y",
    }
    return pd.DataFrame([one])


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
    page = page_of(material(runs({"base": SLOW}), claims=claims(), fidelity=measured()), ReportPictures())
    (claim,) = cells(section(page, "claims"))
    assert [claim[name] for name in ("claim", "paper", "as published", "fair", "verdict, fair")] == [
        "One is faster",
        "2.00x",
        "1.90x; 1.10x under other choices",
        "1.50x",
        "partly",
    ]
    assert claim["what decides"] == "the baseline is rigid; otherwise, tuned: 1.20x (not reproduced)"
    assert "as published: 1 reproduced; fair: 1 partly." in markdown(page)
    (row,) = cells(section(page, "fidelity"))
    assert (row["programs"], row["iteration error"], row["speed-up error"]) == ("2", "5.0%", "10.0%")
    assert (row["orders missed"], row["rank correlation"]) == ("0 of 1", "1.00")
    assert "    make fidelity\n" in markdown(page)
    assert "    entrain-bench --multirun a=1 b=y\n" in markdown(page)


@pytest.mark.wide
def test_links_lead_to_places_on_the_page_which_needs_nothing_else() -> None:
    tables = runs({"base": SLOW, "best": [*FAST[:2], None]}), runs({"base": SLOW, "best": FAST}, belief_error="0.5")
    page = page_of(material(*tables, claims=claims(), fidelity=measured()), ReportPictures())
    text, twin = html(page), markdown(page)
    links, places = re.findall(r'href="([^"]*)"', text), re.findall(r' id="([^"]*)"', text)
    assert len(links) > 10
    assert all(link.startswith("#") and link[1:] in places for link in links)
    assert len({*places}) == len(places)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)"', text))
    assert "http" not in text
    assert {*re.findall(r"\]\(#([^)]*)\)", twin)} <= {*re.findall(r'<a id="([^"]*)">', twin)}
    assert "entrain-bench --multirun a=1,2 b=x" in text


def test_numbers_have_the_command_of_their_runs() -> None:
    page = worded(runs({"base": SLOW, "best": FAST}))
    (found,) = section(page, "answer").rows
    anchor = found[-1].link
    after = markdown(page).split(f'<a id="{anchor}"></a>')[1]
    assert "    entrain-bench --multirun strategy=base,best workload=coco model=tiny seed=0,1,2\n" in after
