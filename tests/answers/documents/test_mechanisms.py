"""What mechanisms gain: pairs of variants, seed by seed, in a table and a section."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.documents import mechanisms
from entrain_bench.answers.documents.mechanisms import gains, mechanisms_section, read_mechanisms, sweeps
from entrain_bench.config.figures import rows_of
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study


def test_the_section_asks_for_the_runs_of_the_figure() -> None:
    rows = rows_of("mechanisms")
    assert sweeps() == [("figure=mechanisms", *texts) for texts in rows.values()]
    assert len(rows) == len(read_mechanisms().jobs) * len(read_mechanisms().variants)


def test_every_variant_belongs_to_a_mechanism() -> None:
    defined = read_mechanisms()
    used = {variant for each in defined.mechanisms.values() for variant in (*each.alone, *each.last)}
    assert used == {*defined.variants}


def test_a_gain_is_paired_by_seed_and_a_failure_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    defined = read_mechanisms()
    job = next(iter(defined.jobs))
    _, dealt = defined.mechanisms["deal total time"].alone

    def table(label: object, _: object) -> pd.DataFrame:
        # Three halves of the time without it at the seed that both have.
        fast = label == defined.label(job, dealt)
        times = {"seed": [0, 1], "iteration_time_s": [2.0 if fast else 3.0, 9.0]}
        return pd.DataFrame(times | {"status": ["ok", "failed" if fast else "ok"], "reason": ["", "memory"]})

    monkeypatch.setattr(mechanisms, "run_table", table)
    labels = {label: label for label in rows_of("mechanisms")}
    found = gains(labels, Results(Path("none")))  # type: ignore[arg-type]
    row = found.query("mechanism == 'deal total time' and switched == 'alone'").iloc[0]
    assert row["gain"] == pytest.approx(0.5)
    assert (row["num_seeds"], row["reason"], row["job"]) == (1, "memory", job)


@pytest.mark.wide
def test_without_runs_the_section_says_so(tmp_path: Path) -> None:
    text = mechanisms_section(Study(Results(tmp_path)))
    assert "n/a" in text
    assert "%" not in text.partition("| --- |")[2]
