"""Sentences, each once: templates over values that other tests check, notices; and that all renderers show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.console_table import summary
from entrain_bench.answers.posterior import ChanceSummary, Spread
from entrain_bench.answers.report import html, markdown, report_json, report_of
from entrain_bench.answers.sentences import headline_sentences, host_notices, notices, problems, sentences, short_answer
from entrain_bench.answers.statistics import Interval
from entrain_bench.answers.text import escape_markdown, load_template, one_line
from entrain_bench.records.records import Record
from entrain_bench.run.study import templates_of
from entrain_bench.specs.workload import Counts
from support.records import at_seeds, runs

GAIN = Interval(1.5, 1.25, 1.75, 3)
WON: Mapping[str, Any] = {
    "outcome": "DECIDED",
    "fastest": ["a"],
    "as_good": [],
    "cases": ["coco"],
    "num_strategies": [3],
    "num_variants": [3],
    "gains": [GAIN],
}


def say(macro: str, *values: Any) -> str:
    return one_line(getattr(load_template("sentences.jinja").module, macro)(*values))


@pytest.mark.parametrize(
    ("changed", "num_cases", "says"),
    [
        ({}, 1, "a is the fastest of 3 of 22 strategies (1.50x (1.25 to 1.75) over base)."),
        ({"gains": [], "as_good": ["b", "c"]}, 1, "a is the fastest of 3 of 22 strategies. As good: b and c."),
        ({"num_strategies": [1]}, 2, "a is the fastest of 3 variants on coco (1.50x (1.25 to 1.75) over base)."),
        (
            {"cases": ["coco", "ocr"], "gains": [GAIN, Interval(3.0, 2.0, 4.0, 3)], "num_variants": [3, 5]},
            2,
            "a is the fastest of 3 of 22 strategies (3 to 5 variants) in both cases (1.50x to 3.00x over base).",
        ),
        ({"cases": ["x"] * 9, "gains": []}, 9, "a is the fastest of 3 of 22 strategies in all 9 cases."),
        ({"cases": ["x"] * 9, "gains": []}, 11, "a is the fastest of 3 of 22 strategies in 9 of 11 cases."),
        ({"outcome": "NO_RESULT"}, 2, "No strategy has all its results on coco."),
        (
            {"outcome": "OPEN", "fastest": ["a", "b"]},
            1,
            "Not decided: a or b. They did not run at the same seeds.",
        ),
    ],
)  # fmt: skip
def test_the_winner(changed: Mapping[str, Any], num_cases: int, says: str) -> None:
    assert say("winner", WON | changed, num_cases, 22, "base") == says


def test_who_is_ahead_over_jobs() -> None:
    fastest = {"wins": {"Braid": 2, "LPT": 1}, "least": 1.0, "greatest": 1.0, "mean": 1.0, "num_jobs": 3, "num_ties": 3}
    published = {**fastest, "wins": {"DIP": 2, "MDP": 1}, "greatest": 1.3, "mean": 1.1}
    today = {**published, "wins": {"Megatron in Megatron-LM": 3}}
    values = {"num_jobs": 3, "num_tied": 2, "fastest": fastest, "published": published, "today": today}
    assert " ".join(headline_sentences(values)) == (
        "The fastest is Braid in 2 of 3 jobs, LPT in 1; in 2 jobs the lead is within the uncertainty of hardware "
        "speeds (a tie). The best published system, chosen per job (most often DIP), takes 1.10x the time of the "
        "fastest (1.00x to 1.30x). The best framework, tuned but with its own options only (Megatron in Megatron-LM), "
        "takes 1.10x (1.00x to 1.30x)."
    )
    assert headline_sentences({"num_jobs": 0, "num_tied": 0, "fastest": None, "published": None, "today": None}) == (
        "",
        "",
    )


def test_chances() -> None:
    lead = Spread(1.1, 0.984, 1.306)
    assert say("chance", "a", ChanceSummary(0.75, lead, 8, 1, 1, 0), "job") == (
        "Over 8 posterior draws of the hardware constants, a has P(fastest) 0.75. Its speedup over the runner-up "
        "is 0.98x to 1.31x (90% interval)."
    )
    assert say("chance", "a", ChanceSummary(0.75, lead, 8, 2, 2, 1), "job") == (
        "Over 8 posterior draws of the hardware constants, a has P(fastest) 0.75, mean over 2 jobs (at least 0.9 in 1)."
        " Its speedup over the runner-up is 0.98x to 1.31x (geometric mean; 90% interval)."
    )


def test_how_sure_the_gain_is() -> None:
    values = {"gain": GAIN, "baseline": "base", "num_contested": 1, "num_seeds": 3}
    assert say("gain", values) == "1.50x (1.25 to 1.75) over base; 3 seeds; 95% confidence interval"
    assert say("gain", values | {"num_contested": 2}) == (
        "1.50x (1.25 to 1.75) over base; geometric mean over 2 cases, 3 seeds; 95% confidence interval"
    )
    single = Interval(2.0, 2.0, 2.0, 1)
    assert say("gain", values | {"gain": single, "num_seeds": 1}) == (
        "2.00x over base; 1 seed; only one seed was run, so differences may be noise"
    )


def test_runs_without_a_result() -> None:
    answer = Answer.of(runs({"base": [2.0, 2.1, None], "other": [None, 1.0, None], "good": [1.0] * 3}))
    assert problems(answer) == ["failed: other and base, 3 of 6 runs (seeds 0, 2): out of luck"]


def test_what_one_must_know_to_trust_an_answer() -> None:
    values = Answer.of(runs({"base": [2.0, 2.0], "best": [1.0, 1.0]})).to_dict() | {
        "winners": [],
        "has_few_seeds": True,
        "not_run": ["x", "y"],
        "lost": ["strategy=a seed=1"],
        "num_planned": 5,
        "single_seed": ["s"],
        "not_significant": ["n"],
        "fewer_seeds": [{"strategies": ["a"], "seeds": [0]}, {"strategies": ["b", "c"], "seeds": [0, 1]}],
        "overall": {"best": GAIN},
    }
    paragraphs = load_template("sentences.jinja").module.all(values).split("\n\n")  # type: ignore[attr-defined]
    assert [one_line(text) for text in paragraphs if text.strip()] == [
        "Speedup over base, geometric mean over cases and seeds: best 1.50x (1.25 to 1.75).",
        "Compared at one seed only, where chance is not ruled out: s.",
        "Slower, though not significantly: n.",
        "With fewer than four seeds 95% intervals may be too narrow: rare long batches may be missing.",
        "Fewer seeds than others: a at seed 0; b and c at seeds 0, 1. Every two are compared at the seeds that both "
        "ran.",
        "Not run: x, y.",
        "1 of 5 planned runs left no record: strategy=a seed=1.",
    ]
    single = say("all", values | {"is_single_seed": True})
    assert "Only one seed was run, so differences may be noise. Slower" in single


FIXTURES = {
    "decided": runs({"base": [2.0, 2.2, 2.1], "best": [1.0, 1.0, 1.1], "near": [1.01, 1.0, 1.1], "odd": [3.0, None]}),
    "lost and close": at_seeds(runs({"base": [2.0, 2.2, 2.1], "best": [1.0, 1.0, 1.1], "near": [0.99] * 3}), "near", 0),
    "far": at_seeds(runs({"base": [2.0, 2.2, 2.1], "best": [1.0] * 3, "far": [4.0] * 3}), "far", 2),
    "one seed": runs({"base": [2.0], "best": [1.0]}),
    "several cases": [
        *runs({"base": [2.0, 2.1], "best": [1.0] * 2}),
        *runs({"base": [1.0] * 2, "best": [3.0] * 2}, "x"),
    ],
}


@pytest.mark.parametrize("records", FIXTURES.values(), ids=FIXTURES)
def test_one_answer_in_all_renderers(records: Sequence[Record]) -> None:
    from entrain_bench import notebook

    answer = Answer.of(records)
    told = sentences(answer)
    assert told
    report = report_of(answer, "results")
    view = notebook.show(records)
    shown = {
        "terminal": " ".join(line.plain for line in summary(records, 100)),
        "HTML": html(report),
        "JSON": " ".join(json.loads(report_json(answer, "results"))["sentences"]),
        "notebook": view.html,
        "notebook's text": view.text,
    }
    for where, text in shown.items():
        for sentence in told:
            assert sentence in text, where
    page = markdown(report)
    assert all(escape_markdown(sentence) in page for sentence in told)
    bold = [line.plain.split()[0] for line in summary(records, 100) if line.style == "bold"]
    best = [one.name for one in answer.results if one.best]
    assert sorted(bold) == sorted(best)


def test_outputs_depend_on_templates() -> None:
    names = {path.name for path in templates_of(["entrain_bench.answers.text", "entrain_bench.figures._style"])}
    assert {"sentences.jinja", "report.jinja", "recommendation.jinja", "page.html"} < names
    assert templates_of(["entrain_bench.figures._style"]) == []


def made(samples: Counts, batch: int = 512, workload: str = "mine") -> Record:
    labels = {"workload": workload, "model": "tiny"}
    return Record("0", "ok", "", labels, {"global_batch": batch}, "", samples=samples)


def listed(number: int, truncated: int = 0, dropped: int = 0) -> dict[str, float | Counts]:
    return {"listed": number, "truncated": truncated, "dropped": dropped}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (made({}), []),
        (made(listed(512)), []),
        (
            made(listed(300)),
            ["workload mine: 300 rows for a global batch of 512: every row is used 1.7 times an iteration on average"],
        ),
        (
            made(listed(600, 3, 2)),
            ["workload mine: of 602 rows 3 truncated and 2 dropped, longer than the context of model tiny"],
        ),
        (
            # Half of 512 are 256 samples of 64 rows; a quarter of them, of a component's component, 64 of 40.
            made({
                "all": {"share": 0.5, **listed(64, truncated=1)},
                "inner": {"share": 0.25, "some": {"share": 0.5, **listed(40)}, "others": {"share": 0.5, **listed(64)}},
            }),
            [
                "workload mine, component all: of 64 rows 1 truncated, longer than the context of model tiny",
                "workload mine, component all: 64 rows for 50% of a global batch of 512: every row is used "
                "4.0 times an iteration on average",
                "workload mine, component inner.some: 40 rows for 12.5% of a global batch of 512: every row is used "
                "1.6 times an iteration on average",
            ],
        ),
    ],
)  # fmt: skip
def test_what_is_said(record: Record, says: list[str]) -> None:
    assert notices([record, record]) == says


def test_assignment_that_takes_long_is_named() -> None:
    def timed(strategy: str, assignment_time_s: float) -> Record:
        metrics = {"iteration_time_s": 0.5, "assignment_time_s": assignment_time_s}
        return Record("0", "ok", "", {"strategy": strategy}, {}, "", metrics=metrics)

    records = [timed("slow", 0.05), timed("slow", 0.1), timed("quick", 0.02), timed("other", 0.03)]
    assert host_notices(records) == [
        "assignment on the host takes more than 5% of an iteration, and is not in its time: slow 20%, other 6%"
    ]
    assert host_notices(records[2:3]) == []


def test_the_short_answer_names_who_wins_most_jobs() -> None:
    coco, ocr = (runs({"base": [base], "a": [a], "b": [b]}, job) for job, base, a, b in JOBS)
    noise = " (one seed, so small differences may be noise)."
    gain = "with a speedup of 1.50x to 2.00x over base"
    assert (
        short_answer(Answer.of([*coco, *ocr]))
        == f"a is the fastest, or at most 5% slower, on 2 of 2 jobs, {gain}{noise}"
    )
    both = "a and b are the fastest, or at most 5% slower, on this job, with a speedup of 1.92x to 2.00x over base"
    assert short_answer(Answer.of(coco)) == both + noise
    assert short_answer(Answer.of(coco[:1])) == "Nothing to compare."


JOBS = (("coco", 2.0, 1.0, 1.04), ("ocr", 3.0, 2.0, 2.9))
