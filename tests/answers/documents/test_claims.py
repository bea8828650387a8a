"""Claims measured, judged and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.answers.documents.claims import (
    claim_row,
    claim_text,
    claims_pages,
    read_claims,
    write_claims,
)
from entrain_bench.answers.documents.sides import ClaimSetting
from entrain_bench.answers.documents.verdict import Finding, Verdict, judge_claim
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results, new_record
from entrain_bench.run.study import Output, Study, bring_up_to_date
from support.claims import ALONE, TINY, VALUES, cases, claim_with, verdict_on


def record_times(
    study: Study,
    setting: ClaimSetting,
    seconds: Callable[[Cell], float],
    memory: float = 1e6,
    settled: bool = False,
) -> None:
    """Records with the time and memory of each run; of those whose time is 0 a failure."""
    for sweep in setting.sweeps:
        for cell in study.cells(*sweep):
            record = new_record(cell, "ok" if seconds(cell) else "failed", "told so", settled=settled)
            if seconds(cell):
                metrics = {"iteration_time_s": seconds(cell), "peak_memory_bytes": memory}
                object.__setattr__(record, "metrics", metrics)
            study.results.write(record, None)


def strategy_of(cell: Cell) -> str:
    return str(cell.config.strategy["name"])


def test_seeds_without_a_result_are_left_out_and_counted(tmp_path: Path) -> None:
    claim, study = claim_with(common=[*TINY, "workload=chartqa", "seed=0,1,2"]), Study(Results(tmp_path))
    assert claim.fair is not None
    record_times(
        study,
        claim.fair,
        lambda cell: 1.5 if strategy_of(cell) == "entrain" else 0.0 if cell.config.seed == 1 else 3.0,
    )
    judged = judge_claim(claim, study)
    assert judged.fair == Finding(
        verdict=Verdict.REPRODUCED, number=2.0, low=2.0, high=2.0, num_runs=6, num_lost=1, lost_seeds=(1,)
    )
    row = claim_row(judged)
    assert row["fair_value"] == "2.00x (2.00 to 2.00x); 1 of 6 runs have no result (seeds left out: 1)"
    assert judged.published.verdict == Verdict.NOT_MEASURED
    assert row["published_verdict"] == "not measured: 3 of 3 runs have no result: not run"


@pytest.mark.wide
def test_other_choices_and_the_assumption_are_measured_and_told(tmp_path: Path) -> None:
    choices = {"small": {"common": ["global_batch=32"]}, "large": {"to": ["strategy=dip"]}}
    claim = claim_with(
        choices=choices,
        assumption={"text": "rigid", "otherwise": "tuned", "of": ["strategy=megatron"], "to": ["strategy=dflop"]},
    )
    study = Study(Results(tmp_path))
    seconds = {"megatron_rigid": 3.0, "megatron": 1.5, "entrain": 1.5, "dip": 2.4, "dflop": 1.5}

    def time(cell: Cell) -> float:
        return seconds[strategy_of(cell)] * (1.25 if cell.config.global_batch == 32 and "rigid" in str(cell) else 1)

    for setting in claim.settings:
        record_times(study, setting, time)
    judged = judge_claim(claim, study)
    row = claim_row(judged)
    assert row["published_value"] == "2.00x (2.00 to 2.00x); 1.25 to 2.50x under other choices"
    assert row["published_verdict"] == "reproduced; under other choices exceeds or not reproduced"
    assert (row["fair_value"], row["fair_verdict"]) == ("1.00x (1.00 to 1.00x)", "not reproduced")
    assert row["assumption"] == "rigid; otherwise, tuned"
    assert (row["otherwise_value"], row["otherwise_verdict"]) == ("1.00x (1.00 to 1.00x)", "not reproduced")
    assert row["other_choices"] == (
        "small: 2.50x (2.50 to 2.50x) (exceeds); large: 1.25x (1.25 to 1.25x) (not reproduced)"
    )
    text = claim_text(judged)
    assert "  What decides: rigid; otherwise, tuned: 1.00x (1.00 to 1.00x) (not reproduced)." in text
    assert "  Other choices: small: 2.50x" in text
    # The first page leaves out what other choices gave, but not that the verdict depends on them.
    line = (
        "| 2.00x (2.00 to 2.00x) | reproduced; under other choices exceeds or not reproduced | 1.00x (1.00 to 1.00x) |"
    )
    assert line in claims_pages([judged])["claims.md"]
    # Nothing can be judged without the paper's number.
    assert judge_claim(replace(claim, no_source=True), study).published.verdict == Verdict.NO_SOURCE


def test_a_program_that_the_published_device_cannot_hold_is_another_setting(tmp_path: Path) -> None:
    larger = "cluster.device.memory_bytes=1099511627776"
    claim = claim_with(common=[VALUES["common"], larger], fair=None)
    study = Study(Results(tmp_path))
    record_times(study, claim.published, lambda cell: 3.0 if "rigid" in strategy_of(cell) else 1.5, memory=1e12)
    judged = judge_claim(claim, study)
    assert (judged.published.verdict, judged.published.number) == (Verdict.OTHER_SETTING, 2.0)
    assert judged.published.need_bytes == 1e12
    row = claim_row(judged)
    assert row["published_value"] == "2.00x (2.00 to 2.00x)"
    assert row["published_verdict"].startswith("setting not reproduced: needs 931 of ")
    assert (row["fair_value"], row["fair_verdict"]) == ("", "")
    # A level of memory is judged itself.
    peak = claim_with(**ALONE, unit="GB", value=1000.0, measure="peak_memory_bytes", common=[VALUES["common"], larger])
    record_times(study, peak.published, lambda _: 1.0, memory=1e12)
    assert judge_claim(peak, study).published.verdict == Verdict.REPRODUCED


@pytest.mark.parametrize(("settled", "verdict"), [(True, Verdict.OTHER_SETTING), (False, Verdict.NOT_MEASURED)])
def test_a_run_that_does_not_fit_memory_is_another_setting(settled: bool, verdict: Verdict, tmp_path: Path) -> None:
    claim, study = claim_with(fair=None), Study(Results(tmp_path))
    record_times(study, claim.published, lambda _: 0.0, settled=settled)
    assert judge_claim(claim, study).published == Finding(verdict=verdict, reason="4 of 4 runs have no result: told so")


def test_findings_of_other_runs_do_not_count(tmp_path: Path) -> None:
    claim, study = claim_with(), Study(Results(tmp_path))
    write_claims([claim], study)
    (judged,) = read_claims([claim], tmp_path / "claims.json")
    assert "not run" in judged.published.reason, "of these runs, which have no result"
    (judged,) = read_claims([claim_with(of=["strategy=disttrain"])], tmp_path / "claims.json")
    assert judged.published == judged.fair == Finding(verdict=Verdict.NOT_MEASURED, reason="run make claims")
    assert judged.otherwise is None, "nothing was toggled"


@pytest.mark.wide
def test_a_claim_is_run_measured_judged_and_written(tmp_path: Path) -> None:
    claim, study = claim_with(), Study(Results(tmp_path))
    output = Output("claims", claim.sweeps, lambda study: write_claims([claim], study))
    assert [problem for _, problem in bring_up_to_date([output], study, 0, lambda *_: None)] == [""]
    records = study.results.records()
    assert len(records) == 8
    times = {
        name: [
            record.metrics["iteration_time_s"]
            for record in records
            if record.labels["strategy"] == name and record.config["microbatch_size"] is None
        ]
        for name in ("megatron", "entrain")
    }
    ratios = [slow / fast for slow, fast in zip(times["megatron"], times["entrain"], strict=True)]
    judged = judge_claim(claim, study)
    row = claim_row(judged)
    assert row["fair_value"].startswith(f"{(ratios[0] * ratios[1]) ** 0.5:.2f}x (")
    assert row["fair_verdict"] == verdict_on(claim, cases(ratios))
    text = (tmp_path / "claims.md").read_text()
    assert text == claims_pages([judged])["claims.md"]
    assert text.startswith("# 1 claim: as published 1 ")
    assert "| [One is faster than the other](claims/paper.md#some) | Table 3 | 2.00x |" in text
    page = (tmp_path / "claims" / "paper.md").read_text()
    assert "## some\n\n- *Claim*: One is faster than the other: 2.00x (arXiv:2605.27918, Table 3)\n" in page
    assert page.count("seed=0,1") == 4
    assert (tmp_path / "claims.csv").read_text().startswith("name,group,claim,paper")
    assert read_claims([claim], tmp_path / "claims.json") == [judged]


def test_the_committed_pages_are_those_of_the_committed_findings() -> None:
    root = Path(__file__).parents[3]
    judged = read_claims(load_claims(), root / "results" / "reference" / "claims.json")
    assert not [one for one in judged if one.published.verdict == Verdict.NOT_MEASURED]
    pages = claims_pages(judged)
    counted = pages.pop("tables/claims_counts.md")
    for path, text in pages.items():
        assert (root / "docs" / path).read_text() == text
    table = pd.read_csv(root / "results" / "reference" / "claims.csv", dtype=str, keep_default_na=False)
    assert table.to_dict("records") == [claim_row(one) for one in judged]
    assert f"<!-- table: claims_counts -->\n\n{counted}" in (root / "README.md").read_text()
