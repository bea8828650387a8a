"""Errors of the ledger: numbers worked out by hand, and what is written of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import erf, exp, log, sqrt
from statistics import fmean

import pandas as pd
import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.figures._style import styled
from entrain_bench.lab.ledger.book import load_book
from entrain_bench.lab.ledger.entries import Entry, Outcome, Range, entries_of, outcomes_of
from entrain_bench.lab.ledger.figure import draw
from entrain_bench.lab.ledger.predict import Case, Cases, Prediction
from entrain_bench.lab.ledger.report import frame_of, tables_of
from entrain_bench.lab.ledger.rows import row_of
from entrain_bench.lab.ledger.summary import BY, Errors, Fits, by, of_sources, orders, reasons, repeat_noise
from support.ledger import STATED

BOOK = load_book()


def outcome(low: float, high: float, fits: str = "ok", source: str = "mine", **changes: str) -> Outcome:
    row = row_of(source, 2, {**STATED, "step_time_s": "10", **changes})
    return Outcome(row, "", Range(low, high), Range(30.0, 40.0), fits)


@pytest.mark.parametrize(("low", "high", "ratio"), [(8, 9, 0.9), (8, 12, 1.0), (11, 12, 1.1), (10, 10, 1.0)])
def test_a_range_is_right_inside_and_its_error_is_to_the_nearest_end(low: float, high: float, ratio: float) -> None:
    assert outcome(low, high).ratio == pytest.approx(ratio)


def test_errors_are_medians_and_the_share_within_a_tenth() -> None:
    found = Errors.of([outcome(9, 9), outcome(8, 8), outcome(10, 10), outcome(13, 13)])
    assert found is not None
    assert (found.rows, found.ratio, found.error, found.near) == pytest.approx((4, 0.95, 0.15, 0.5))
    assert found.width == 0
    wide = Errors.of([outcome(8, 12), outcome(8, 10), outcome(8, 8)])
    assert wide is not None
    assert wide.width == pytest.approx(0.25)
    assert Errors.of([Outcome(outcome(1, 1).row, "because")]) is None


def test_runs_that_fit_and_that_do_not_are_counted_by_what_is_decided() -> None:
    found = Fits.of(
        [
            *(outcome(1, 1, "ok") for _ in range(3)),
            outcome(1, 1, "oom"),
            outcome(1, 1, "oom", outcome="oom"),
            outcome(1, 1, "ok", outcome="oom"),
            outcome(1, 1, "open", outcome="oom"),
        ]
    )
    assert found == Fits(right=4, wrongly_ok=1, wrongly_oom=1, open=1)
    assert found.share == pytest.approx(4 / 6)


def test_groups_are_in_the_order_of_their_numbers() -> None:
    found = by([outcome(9, 9, tp=tp) for tp in ("8", "2", "16", "2")], BY["TP"])
    assert [(name, errors.rows) for name, errors in found] == [("2", 2), ("8", 1), ("16", 1)]


def test_the_order_of_layouts_is_kendalls_tau_and_what_the_predicted_best_loses() -> None:
    times = {"1": (10, 2), "2": (11, 1), "3": (12, 3), "4": (13, 4), "5": (14, 5)}
    runs = [
        outcome(predicted, predicted, pp=pp, step_time_s=str(published)) for pp, (published, predicted) in times.items()
    ]
    (order,) = orders([*runs, outcome(1, 1, seq_len="8192")])
    # Of ten pairs nine are in order.
    assert (order.layouts, order.tau, order.regret, order.spread) == pytest.approx((5, 0.8, 0.1, 0.4))
    assert (order.attainable, order.others) == (None, None)


def test_what_tau_is_attainable_follows_from_repeated_runs_and_other_kernels() -> None:
    """Hand-worked: two runs that differ by 2% have a noise of 2% / sqrt(2)."""
    kernels = {"FlashAttention 2": (10, 11, 12, 13, 14), "FlashAttention 1.0.8": (10, 11, 12, 14, 13)}
    runs = [
        outcome(1, 1, pp=str(pp), dp="1", step_time_s=str(time), attention_kernel=kernel)
        for kernel, times in kernels.items()
        for pp, time in enumerate(times, 1)
    ]
    again = [
        outcome(1, 1, tp="1", seq_len="64", sequence_parallel=each, step_time_s=str(10 * exp(0.02 * (each == "true"))))
        for each in ("true", "false")
    ]
    noise = repeat_noise([*runs, *again])
    assert noise == {"mine": pytest.approx(0.02 / sqrt(2))}
    first, second = orders([*runs, *again])
    pairs = [abs(log(one / other)) for one, other in combinations(range(10, 15), 2)]
    expected = fmean(erf(pair / (2 * noise["mine"])) for pair in pairs)
    assert first.attainable == second.attainable == pytest.approx(expected)
    assert first.others == second.others == pytest.approx(0.8)
    # A tau of 1 needs times that do not repeat, or differ by much more than noise.
    assert 0.9 < expected < 1.0


def test_sources_and_reasons_count_every_row() -> None:
    left_out = [Outcome(outcome(1, 1, source="b").row, reason) for reason in ("one", "two", "two")]
    outcomes = [outcome(9, 9, source="a", peak_memory_gib="50"), *left_out]
    first, second = of_sources(outcomes, BOOK)
    assert (first.name, first.rows) == ("a", 1)
    assert first.peak_error == pytest.approx(0.2)
    assert (second.name, second.rows, second.errors) == ("b", 3, None)
    assert reasons(outcomes) == [("two", 2), ("one", 1)]


def test_a_line_says_what_was_published_predicted_and_left_out() -> None:
    frame = frame_of([outcome(8, 9, peak_memory_gib="35"), Outcome(outcome(1, 1).row, "because")])
    one, other = frame.to_dict("records")
    assert (one["published_s"], one["predicted_s"], one["ratio"]) == pytest.approx((10, 9, 0.9))
    assert (one["published_gib"], one["predicted_gib"]) == (35, 35)
    assert (one["outcome"], one["predicted_outcome"], one["status"]) == ("ok", "ok", "predicted")
    assert (other["status"], other["reason"]) == ("left out", "because")
    assert pd.isna(other["predicted_s"])


def test_tables_have_a_row_a_source_and_one_of_all() -> None:
    titles = {title: rows for title, _, rows in tables_of([outcome(9, 9), outcome(8, 8, tp="4")], BOOK)}
    assert [row[0] for row in titles["Sources"]] == ["mine", "all"]
    assert [row[:3] for row in titles["By TP"]] == [["2", "1", "0.900"], ["4", "1", "0.800"]]


def test_the_figure_states_the_share_that_is_near() -> None:
    with styled():
        _, table, message = draw(frame_of([outcome(9.5, 9.5), outcome(8, 8), outcome(10, 10)]), {"mine": "Mine"})
        assert message == "67% of 3 published times are within 10% of their predicted range."
        assert len(table) == 3
        assert "reason" in draw(frame_of([Outcome(outcome(1, 1).row, "x")]), {})[1]


def test_of_a_run_that_fitted_only_what_fits_is_a_candidate() -> None:
    found = iter([Prediction(9.0, 50.0, True), Prediction(20.0, 90.0, False)] * 2)
    entry = Entry(outcome(1, 1).row, (None, None))  # type: ignore[arg-type]
    assert entry.outcome(lambda _: next(found)).seconds == Range(9.0, 9.0)
    lost = Entry(replace(entry.row, outcome="oom"), entry.cases).outcome(lambda _: next(found))
    assert (lost.seconds, lost.fits) == (Range(9.0, 20.0), "open")


def test_rows_of_equal_jobs_are_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Case]()

    def predict(case: Case, _: object = None) -> Prediction:
        asked.append(case)
        return Prediction(1.0, 1.0, True)

    monkeypatch.setattr(Case, "predict", predict)
    row = row_of("mine", 2, {**STATED, "grad_dtype": "bf16"})
    entries = [*entries_of([row, replace(row, line=3), replace(row, line=4, tp=4, dp=4)], BOOK, Cases(Composer()))]
    assert len(outcomes_of(entries)) == 3
    assert len(asked) == 2
