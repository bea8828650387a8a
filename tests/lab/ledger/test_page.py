"""``calibration.md``: errors of sources left out first, and the sentence that figures repeat."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.figures._style import MODEL_ERROR
from entrain_bench.lab.ledger import page as pages
from entrain_bench.lab.ledger.jobs import load_book
from entrain_bench.lab.ledger.page import ERROR, make_frame, make_page, model_error, write_calibration
from entrain_bench.lab.ledger.study import Ledger, fit_ledger
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study
from support.ledger import CONSTANTS, made_up_ledger


@pytest.fixture(scope="module")
def made() -> tuple[Ledger, str, str]:
    """A ledger, its page, and its model error."""
    rows = made_up_ledger(1.0, 1.0)
    fitted = fit_ledger(rows, CONSTANTS)
    left_out = make_frame(fitted.left_out(rows))
    return rows, make_page(rows, fitted, left_out, load_book(), Composer()), model_error(left_out)


def test_errors_of_sources_left_out_come_first(made: tuple[Ledger, str, str]) -> None:
    _, text, line = made
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert text.index(f"**M{line[1:]}**") < text.index(titles[0])
    assert titles[0] == "## Sources"
    assert titles.index("## Sources with the committed constants") > titles.index("## Sources")
    assert "| device.sustained_fraction |" in text
    # The committed constants are not those that made the times; the fitted ones are.
    fitted, committed = (text.split(title)[1].split("\n## ")[0] for title in ("## Sources\n", "committed constants\n"))
    assert "| 100% |" in fitted
    assert "| 0% |" in committed


@pytest.mark.parametrize(("said", "problem"), [(True, ""), (False, "figures/_style.py: MODEL_ERROR must be 'model")])
def test_what_figures_say_is_checked(
    made: tuple[Ledger, str, str], said: bool, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _, line = made
    monkeypatch.setattr(pages, "committed_ledger", lambda *_: rows)
    monkeypatch.setattr(pages, "fit_ledger", lambda rows: fit_ledger(rows, CONSTANTS))
    if said:
        monkeypatch.setattr(pages, "MODEL_ERROR", line)
    assert write_calibration(Study(Results(tmp_path))).startswith(problem)
    assert (tmp_path / "calibration.md").read_text().startswith("# Calibration")
    assert (tmp_path / ERROR).read_text() == f"M{line[1:]}.\n"


def test_the_readme_states_the_error_that_figures_state() -> None:
    assert f"\nM{MODEL_ERROR[1:]}.\n" in (Path(__file__).parents[3] / "README.md").read_text()
