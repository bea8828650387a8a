"""Errors of the ledger by hand, and ``calibration.md``: errors of sources left out come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from entrain_bench.answers.labels import MODEL_ERROR, ModelError
from entrain_bench.lab.ledger import page as pages
from entrain_bench.lab.ledger.fit import Ledger, fit_ledger
from entrain_bench.lab.ledger.page import ERROR, make_page, make_tables, model_error, write_calibration
from entrain_bench.lab.ledger.predict import Entry, Outcome
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study
from support.ledger import CONSTANTS, made_up_ledger, stated_row


def outcome(low: float, high: float, fits: str = "ok", source: str = "mine", **changes: str) -> dict[str, Any]:
    """The line of a row that is predicted like that."""

    class Known(Entry):
        def outcome(self, _: object) -> Outcome:
            return Outcome((low, high), (30.0, 40.0), fits)

    row = stated_row(source, **{"step_time_s": "10", **changes})
    return Known(row, (None,), fitted=True).line(None)  # type: ignore[arg-type]


def left_out(reason: str, source: str = "mine") -> dict[str, Any]:
    return Entry(stated_row(source), reason=reason).line(None)  # type: ignore[arg-type]


def tables(*lines: dict[str, Any]) -> dict[str, list[list[str]]]:
    return {title: table.to_numpy().tolist() for title, table in make_tables(pd.DataFrame(lines), {"a": "Mr A"})}


@pytest.mark.parametrize(("low", "high", "ratio"), [(8, 9, 0.9), (8, 12, 1.0), (11, 12, 1.1), (10, 10, 1.0)])
def test_a_range_is_right_inside_and_its_error_is_to_the_nearest_end(low: float, high: float, ratio: float) -> None:
    assert pd.DataFrame([outcome(low, high)])["ratio"].tolist() == pytest.approx([ratio])


def test_errors_are_medians_and_the_share_within_a_tenth() -> None:
    exact = tables(outcome(9, 9), outcome(8, 8), outcome(10, 10), outcome(13, 13))
    assert exact["Sources"][-1][:7] == ["all", "4", "4", "0.950", "15.0%", "50%", "0%"]
    grouped = tables(*(outcome(9, 9, tp=tp) for tp in ("8", "2", "16", "2")))
    assert [row[:3] for row in grouped["By TP"]] == [["2", "2", "0.900"], ["8", "1", "0.900"], ["16", "1", "0.900"]]
    wide = tables(outcome(8, 12), outcome(8, 10), outcome(8, 8))
    assert wide["Sources"][-1][6] == "25%"
    frame = pd.DataFrame([outcome(8, 12.5), outcome(8, 8)])
    assert model_error(frame) == ModelError(median=0.1, close=0.5, num_times=2)


def test_rows_that_set_a_constant_are_in_no_other_error() -> None:
    rates = outcome(10, 10, source="a") | {"sets": "rate of X"}
    shown = tables(rates, rates, outcome(8, 8, source="a"), outcome(9, 9, tp="2"), outcome(9, 9, tp="8"))
    assert [row[:4] for row in shown["Sources"]] == [
        ["Mr A: rate of X fitted to these", "2", "2", "1.000"],
        ["Mr A", "1", "1", "0.800"],
        ["mine", "2", "2", "0.900"],
        ["all", "3", "3", "0.900"],
    ]
    assert sum(int(row[1]) for row in shown["By TP"]) == 3


def test_runs_that_fit_and_that_do_not_are_counted_by_what_is_decided() -> None:
    runs = [
        *(outcome(1, 1, "ok") for _ in range(3)),
        outcome(1, 1, "oom"),
        outcome(1, 1, "oom", outcome="oom"),
        outcome(1, 1, "ok", outcome="oom"),
        outcome(1, 1, "open", outcome="oom"),
    ]
    assert tables(*runs)["Sources"][-1][7] == "4 of 6, 1 open"


def test_the_order_of_layouts_is_kendalls_tau_and_what_the_predicted_best_loses() -> None:
    times = {"1": (10, 2), "2": (11, 1), "3": (12, 3), "4": (13, 4), "5": (14, 5)}
    runs = [
        outcome(predicted, predicted, pp=pp, step_time_s=str(published)) for pp, (published, predicted) in times.items()
    ]
    ((name, *numbers),) = tables(*runs, outcome(1, 1, seq_len="8192"))["Order of layouts"]
    assert name == "LLaMA-1 13B, 2048 tokens, 64 GPUs, sequence parallelism on"
    # Of ten pairs nine are in order.
    assert numbers == ["5", "40%", "0.80", "10.0%"]


def test_equal_predictions_have_no_order_and_the_first_of_them_is_the_best() -> None:
    runs = [outcome(3, 3 * 1.7, pp=str(count), step_time_s=str(count * 1.1)) for count in range(1, 6)]
    ((_, *numbers),) = tables(*runs)["Order of layouts"]
    assert numbers == ["5", "400%", "0.00", "0.0%"]


def test_sources_and_reasons_count_every_row() -> None:
    shown = tables(outcome(9, 9, source="a", peak_memory_gib="50"), *(left_out(why, "b") for why in ("x", "y", "y")))
    first, second, _ = shown["Sources"]
    assert (first[:2], first[-1]) == (["Mr A", "1"], "20%")
    assert second[:3] == ["b", "3", "0"]
    assert shown["Rows left out"] == [["y", "2"], ["x", "1"]]


def test_a_line_says_what_was_published_predicted_and_left_out() -> None:
    one, other = pd.DataFrame([outcome(8, 9, peak_memory_gib="35"), left_out("because")]).to_dict("records")
    assert (one["published_s"], one["predicted_s"], one["ratio"]) == pytest.approx((10, 9, 0.9))
    assert (one["published_gib"], one["predicted_gib"]) == (35, 35)
    assert (one["outcome"], one["predicted_outcome"], one["status"]) == ("ok", "ok", "predicted")
    assert (other["status"], other["reason"]) == ("left out", "because")
    assert pd.isna(other["predicted_s"])


@pytest.fixture(scope="module")
def made() -> tuple[Ledger, str, ModelError]:
    """A ledger, its page, and its model error."""
    rows = made_up_ledger(1.0, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "fit_ledger", lambda rows: fit_ledger(rows, CONSTANTS))
        return rows, *make_page(rows)


def test_errors_of_sources_left_out_come_first(made: tuple[Ledger, str, ModelError]) -> None:
    _, text, error = made
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert text.index(f"**{error.sentence}**") < text.index(titles[0])
    assert titles[0] == "## Sources"
    assert titles.index("## Sources with the committed constants") > titles.index("## Sources")
    assert text.startswith("# Calibration")
    assert "| device.sustained_fraction |" in text
    # The committed constants are not those that made the times; the fitted ones are.
    fitted, committed = (text.split(title)[1].split("\n## ")[0] for title in ("## Sources\n", "committed constants\n"))
    assert "| 100% |" in fitted
    assert "| 0% |" in committed


def test_what_figures_say_is_checked(
    made: tuple[Ledger, str, ModelError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, page, error = made
    monkeypatch.setattr(pages, "complete_ledger", lambda *_: rows)
    monkeypatch.setattr(pages, "make_page", lambda _: (page, error))
    assert write_calibration(Study(Results(tmp_path))).startswith("answers/labels.py: MODEL_ERROR must be ModelError(")
    assert (tmp_path / "calibration.md").read_text() == page
    assert (tmp_path / ERROR).read_text() == f"{error.sentence}\n"
    monkeypatch.setattr(pages, "MODEL_ERROR", error)
    assert not write_calibration(Study(Results(tmp_path)))


def test_the_readme_states_the_error_that_figures_state() -> None:
    assert f"-->{MODEL_ERROR.sentence}<!--" in (Path(__file__).parents[3] / "README.md").read_text()
