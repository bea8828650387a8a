"""Tries of a reviewer: random values of options, verdicts, and a planted value that gains."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from entrain_bench.config.compose import compose
from entrain_bench.config.targets import class_of
from entrain_bench.config.tree import choices
from entrain_bench.lab import terms
from entrain_bench.lab.terms import Terms, Verdict, check_terms, drawn_options, judged, read_terms, terms_markdown
from entrain_bench.records.records import Results
from entrain_bench.run.cells import Done
from entrain_bench.run.study import Study, SweepOverrides

JOB = ("model=tiny", "cluster=a40x16", "global_batch=32", "iterations=1", "seed=0", "layout.dp=2", "microbatch_size=2")
TINY = Terms(
    JOB,
    {"tiny": []},
    {"half the network": ["speed.network=0.5"]},
    ("tuning_budget=4",),
    "megatron,bridge_reorder",
    draws=4,
)


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
    # The same values as ever, on the layout that was tuned: no gain, but for the planted one.
    monkeypatch.setattr(terms, "drawn_options", lambda *_: ("strategy.scheduler.eager=none",))

    def planted(study: Study, sweep: SweepOverrides) -> dict[str, float]:
        faster = 1.1 if "strategy=bridge_reorder" in sweep and "strategy.scheduler.eager=none" in sweep else 1.0
        return {name: time / faster for name, time in real(study, sweep).items()}

    monkeypatch.setattr(terms, "_ranked", planted)
    outcome = check_terms(TINY, study, 0, lambda _: None)
    assert [(one.strategy, one.gain) for one in outcome.gains] == [("bridge_reorder", pytest.approx(0.1))]
    assert (outcome.num_ran, outcome.num_failed) == (2, 0)
    assert [one.name for one in outcome.tries] == ["lpt against all", "four times the budget", "half the network"]
    page = terms_markdown(TINY, outcome)
    assert "| tiny | bridge_reorder | `strategy.scheduler.eager=none` | +10.0% |" in page
    again = list[Done]()
    assert check_terms(TINY, study, 0, again.append) == outcome
    assert all(done.seconds is None for done in again)
