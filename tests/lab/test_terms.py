"""Tries of a reviewer: random values of options, verdicts, and a planted value that gains."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from entrain_bench.config.compose import compose
from entrain_bench.config.targets import class_of
from entrain_bench.config.tree import choices
from entrain_bench.lab import terms
from entrain_bench.lab.terms import (
    Gain,
    Lack,
    Outcome,
    Terms,
    Try,
    Untried,
    Verdict,
    check_terms,
    drawn_options,
    judged,
    read_terms,
)
from entrain_bench.lab.terms_page import terms_markdown
from entrain_bench.records.records import Results
from entrain_bench.run.cells import Done
from entrain_bench.run.study import Study, SweepOverrides

JOB = ("model=tiny", "cluster=a40x16", "global_batch=32", "iterations=1", "seed=0", "layout.dp=2", "microbatch_size=2")
TINY = Terms(
    JOB,
    {"tiny": []},
    {"half the network": ["speed.network=0.5"]},
    ("tuning_budget=4",),
    "megatron,bridge_reorder,fsdp",
    draws=5,
    seeds=2,
)
STAGE = "memory=stage"


def test_the_definition_is_read_and_its_jobs_compose() -> None:
    defined = read_terms()
    assert len(defined.jobs) == 3
    for overrides in defined.jobs.values():
        compose(*defined.common, *overrides, *defined.budget)


def test_drawn_values_are_the_same_each_time_and_allowed() -> None:
    for name in choices("strategy"):
        strategy = compose(f"strategy={name}").strategy
        for number in range(3):
            options = drawn_options(strategy, Random(number))
            assert options == drawn_options(strategy, Random(number))
            changed = compose(f"strategy={name}", *options).strategy
            assert bool(options) == (changed != strategy)
            assert class_of(changed["assigner"]["_target_"])


def test_a_lead_survives_is_lost_or_cannot_be_told() -> None:
    before = {"a": 1.0, "b": 1.1}
    assert judged("x", "job", before, {"a": 1.0, "b": 1.2}).verdict is Verdict.SURVIVES
    lost = judged("x", "job", before, {"a": 1.0, "b": 0.9})
    assert (lost.verdict, lost.after, lost.lead) == (Verdict.LOST, "b", pytest.approx(-0.1))
    assert judged("x", "job", before, {"a": 1.0, "b": 0.995}).verdict is Verdict.TIED
    assert judged("x", "job", before, {"b": 0.9}).verdict is Verdict.UNDECIDED


def test_a_value_that_gains_is_listed_and_finished_runs_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    real = terms._ranked
    study = Study(Results(Path("results")))
    study.results.prepare()
    # The own value, another one without effect, one that is not allowed, an option that is unknown, and a repetition.
    draws = cycle(
        (f"strategy.scheduler.{text}",) for text in ("max_extra_forwards=null", STAGE, "memory=none", "wrong=1", STAGE)
    )
    monkeypatch.setattr(terms, "drawn_options", lambda *_: next(draws))

    def planted(study: Study, sweep: SweepOverrides) -> dict[str, float]:
        gains = "strategy=bridge_reorder" in sweep or "seed=0" in sweep  # megatron's is one seed's luck
        faster = 1.1 if gains and f"strategy.scheduler.{STAGE}" in sweep else 1.0
        return {name: time / faster for name, time in real(study, sweep).items()}

    monkeypatch.setattr(terms, "_ranked", planted)
    outcome = check_terms(TINY, study, 0, lambda _: None)
    assert [(one.strategy, one.gain) for one in outcome.gains] == [("bridge_reorder", pytest.approx(0.1))]
    assert (outcome.num_drawn, outcome.num_repeated, outcome.num_ran) == (10, 4, 2)
    untried = {(one.strategy, one.lack): one.reason for one in outcome.untried}
    assert len(untried) == len(outcome.untried) == 5
    assert "memory=none: unknown" in untried["megatron", Lack.FAILED]
    assert "wrong=1: unknown key" in untried["bridge_reorder", Lack.INVALID]
    assert untried["fsdp", Lack.UNFIT]
    assert [one.name for one in outcome.tries] == ["lpt against all", "four times the budget", "half the network"]
    again = list[Done]()
    assert check_terms(TINY, study, 0, again.append) == outcome
    ran = [done.record for done in again if done.seconds is not None]
    assert {record.status for record in ran if record} == {"failed"}


def test_the_page_opens_with_the_answer_and_says_what_was_not_tried() -> None:
    memory = Untried("tiny", "a", Lack.MEMORY, "stage 0 needs 90 GiB", ("strategy.assigner.passes=8",))
    outcome = Outcome(
        tries=[
            Try("half the network", "tiny", "a", "a", Verdict.SURVIVES, 0.2),
            Try("half the network", "large", "a", "b", Verdict.LOST, -0.1),
        ],
        gains=[
            Gain("tiny", "a", ("strategy.scheduler.eager=all",), 0.03),
            Gain("tiny", "b", ("strategy.scheduler.eager=none",), 0.05),
        ],
        num_drawn=40,
        num_repeated=7,
        num_ran=31,
        untried=[memory, replace(memory, reason="stage 0 needs 99 GiB"), Untried("tiny", "c", Lack.UNPLANNED)],
        not_drawn={"a": ("assigner.correction",)},
    )
    page = terms_markdown(TINY, outcome)
    answer = "1 of 2 leads survive (1 lost), and 2 of 31 random values that ran gain over 2%, at most +5.0% (b, tiny)."
    assert page.startswith(f"# Random options and other terms\n\n{answer}\n")
    assert page.index("`strategy.scheduler.eager=none` | +5.0% |") < page.index(
        "`strategy.scheduler.eager=all` | +3.0%"
    )
    untried = page[page.index("## Not tried") :]
    assert "`assigner.correction` of a" in untried
    assert "7 of 40 draws describe a run that was there already" in untried
    assert "2 draws and 1 strategies on a job have no result" in untried
    assert "| exceeds memory | a | 2 | tiny | `strategy.assigner.passes=8` | stage 0 needs 90 GiB |" in untried
    assert "| its plan was not kept | c | 1 | tiny |" in untried
