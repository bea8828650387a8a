"""Times and peaks of papers' own systems: which claims they are of, and that runs of one setting are made once."""

from __future__ import annotations

import pytest

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer, Sweep
from entrain_bench.lab.ledger.entries import Outcome, outcomes_of
from entrain_bench.lab.ledger.papers import of_papers

CLAIMS = {claim.name: claim for claim in load_claims()}


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    # A time and a peak of one run, a range that an axis gives, a speedup.
    names = ("h_a2_01_step_h", "h_a2_01_mem_h", "entrain_seconds_synth", "dip_equal_peak")
    entries = [*of_papers([CLAIMS[name] for name in names], Composer())]
    assert entries[0].cases[0] is entries[1].cases[0]
    return outcomes_of(entries)


def test_absolute_numbers_of_one_run_are_rows(outcomes: list[Outcome]) -> None:
    step, peak = outcomes
    assert (step.row.step_time_s, step.row.peak_memory_gib) == (pytest.approx(7.57), None)
    assert peak.row.peak_memory_gib == pytest.approx(57.2e9 / 2**30, rel=1e-5)
    assert "H-a2-01-step-h" in step.row.where
    assert {outcome.row.source for outcome in outcomes} == {"papers"}


def test_they_are_predicted_through_the_runs_of_their_claims(outcomes: list[Outcome]) -> None:
    step, peak = outcomes
    assert step.ratio is not None
    assert 0.5 < step.ratio < 2
    assert step.memory_ratio is None
    assert peak.memory_ratio is not None
    assert step.seconds == peak.seconds


def test_a_run_that_the_suite_refuses_is_a_reason() -> None:
    (entry,) = of_papers([CLAIMS["h_a2_01_step_h"]], Refusing())
    assert entry.reason == "model=none: unknown"


class Refusing(Composer):
    """Composes nothing."""

    def sweep(self, overrides: object) -> Sweep:  # noqa: ARG002 - whatever is asked for
        raise UserError("model=none: unknown")
