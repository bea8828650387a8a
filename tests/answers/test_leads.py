"""A lead is over the fastest of all others, above or below 1; every renderer names the same winner and numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.comparison import compare
from entrain_bench.answers.documents.results import lead_sentences
from entrain_bench.answers.leads import lead_of, lead_sentence, winners_sentence
from entrain_bench.answers.report.build import page_of
from entrain_bench.answers.report.page import markdown
from entrain_bench.answers.report.read import Material
from entrain_bench.answers.sentences import sentences
from entrain_bench.records.records import Record
from support.records import record

# Seconds by strategy, of three seeds: ours is ahead on one trace and behind on the other.
AHEAD = {"megatron": [4.0, 4.4, 4.2], "rival": [2.0, 2.2, 2.1], "mine": [1.0, 1.1, 1.05]}
BEHIND = {"megatron": [4.0, 4.4, 4.2], "rival": [1.0, 1.1, 1.05], "mine": [1.25, 1.375, 1.3125]}
FAMILIES = {"megatron": "out_of_the_box", "rival": "published", "mine": "ours"}
LEAD = "has a speedup of 0.80x to 2.00x over the fastest other strategy, 1.26x in the geometric mean."


def records_of(**traces: dict[str, list[float]]) -> list[Record]:
    return [
        record(name, seconds, seed, trace, own={"display_order": place, "family": FAMILIES[name]})
        for trace, times in traces.items()
        for place, (name, each) in enumerate(times.items())
        for seed, seconds in enumerate(each)
    ]


def frame_of(records: Sequence[Record]) -> pd.DataFrame:
    rows = [each.row() | {"strategy_family": FAMILIES[str(each.labels["strategy"])]} for each in records]
    return pd.DataFrame(rows)


def test_the_pair_is_the_leader_and_the_fastest_other_at_shared_seeds() -> None:
    found = {"mine": {0: 1.0, 1: 2.0}, "slow": {0: 3.0, 1: 3.0}, "near": {0: 2.0, 1: 1.0}, "broken": {0: 0.1, 1: None}}
    lead = lead_of(found, "mine")
    assert lead
    assert lead.rival == "near"
    assert lead.own.gains == {0: 2.0, 1: 0.5}
    assert lead.own.speedup
    assert lead.own.speedup.mean == pytest.approx(1.0)
    assert lead_of({"mine": {0: 1.0}}, "mine") is None


def test_winners_are_counted_and_what_is_open_is_said() -> None:
    labels = {"a": "A", "b": "B"}
    won, lost = compare({"a": {0: 1.0}, "b": {0: 2.0}}, {}), compare({"a": {0: 2.0}, "b": {0: 1.0}}, {})
    # At no common seed.
    undecided = compare({"a": {0: 1.0}, "b": {1: 1.0}}, {})
    assert winners_sentence([won], labels) == "A is the fastest."
    assert winners_sentence([won, lost, won], labels) == "A is the fastest in 2 of 3 jobs, B in 1."
    assert winners_sentence([won, undecided], labels) == "A is the fastest in 1 of 2 jobs; 1 job not decided."
    assert winners_sentence([undecided], labels) == ""


def test_rows_without_a_pair_or_with_failures_are_said() -> None:
    whole, part, none = (
        lead_of({"a": times, "b": {0: 2.0, 1: 2.0}}, "a")
        for times in ({0: 1.0, 1: 1.0}, {0: 4.0, 1: None}, {0: None, 1: None})
    )
    assert lead_sentence([whole], "A") == "A has a speedup of 2.00x (2.00 to 2.00) over the fastest other strategy."
    assert lead_sentence([whole, part, none], "A") == (
        "A has a speedup of 0.50x to 2.00x over the fastest other strategy in 2 of 3 jobs, 1.00x in the geometric mean."
        " It has no result at some seed of 2 jobs."
    )
    assert lead_sentence([none, None], "A") == ""


def test_every_renderer_names_the_same_winners_and_the_same_lead() -> None:
    records = records_of(chartqa=AHEAD, coco=BEHIND)
    answer = Answer.of(records)
    assert lead_sentences(frame_of(records)) == ["Mine is the fastest in 1 of 2 jobs, Rival in 1.", f"Mine {LEAD}"]
    told = sentences(answer)
    assert f"mine {LEAD}" in told
    winners = [text for text in told if " is the fastest of 3 " in text]
    assert [(text.split()[0], "on chartqa" in text, "on coco" in text) for text in winners] == [
        ("mine", True, False),
        ("rival", False, True),
    ]
    page = markdown(page_of(Material(answer, "1.0", "results")))
    assert f"mine {LEAD}" in page
    assert all(winner in page for winner in winners)
