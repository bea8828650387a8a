"""``calibration.md``: errors of sources left out first, and the sentence that figures repeat."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.figures._style import MODEL_ERROR
from entrain_bench.lab.ledger import page as pages
from entrain_bench.lab.ledger.book import load_book
from entrain_bench.lab.ledger.entries import Outcome
from entrain_bench.lab.ledger.page import ERROR, model_error, page, write_calibration
from entrain_bench.lab.ledger.study import Ledger, study_of
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study
from support.ledger import CONSTANTS, made_up_ledger


@pytest.fixture(scope="module")
def made() -> tuple[Ledger, str, list[Outcome]]:
    rows = made_up_ledger(1.0, 1.0)
    fitted = study_of(rows, CONSTANTS)
    left_out = fitted.left_out(rows)
    return rows, page(rows, fitted, left_out, load_book(), Composer()), left_out


def test_errors_of_sources_left_out_come_first(made: tuple[Ledger, str, list[Outcome]]) -> None:
    _, text, left_out = made
    line = model_error(left_out)
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
    made: tuple[Ledger, str, list[Outcome]],
    said: bool,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, _, left_out = made
    monkeypatch.setattr(pages, "ledger_of", lambda *_: rows)
    monkeypatch.setattr(pages, "study_of", lambda rows: study_of(rows, CONSTANTS))
    if said:
        monkeypatch.setattr(pages, "MODEL_ERROR", model_error(left_out))
    assert write_calibration(Study(Results(tmp_path))).startswith(problem)
    assert (tmp_path / "calibration.md").read_text().startswith("# Calibration")
    assert (tmp_path / ERROR).read_text() == f"M{model_error(left_out)[1:]}.\n"


def test_the_readme_states_the_error_that_figures_state() -> None:
    assert f"\nM{MODEL_ERROR[1:]}.\n" in (Path(__file__).parents[3] / "README.md").read_text()
