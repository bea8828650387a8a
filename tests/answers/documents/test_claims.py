"""Claims: what their YAMLs must state, how settings change, and the generated document."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.documents import claims
from entrain_bench.answers.documents.claim import Measure, cited, parse_claim
from entrain_bench.answers.documents.claim_pages import (
    agreement_text,
    claim_commands,
    claim_text,
    claims_markdown,
    claims_pages,
    claims_text,
    counts,
    counts_markdown,
)
from entrain_bench.answers.documents.claims import (
    claim_row,
    claims_table,
    load_claims,
    read_rows,
    write_claims,
)
from entrain_bench.answers.documents.sides import ClaimSide
from entrain_bench.answers.documents.verdict import verdict
from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results, new_record
from entrain_bench.run.study import Output, Study, bring_up_to_date
from support.claims import SHARE, TINY, VALUES, cases, claim_with


def test_every_claim_is_complete_and_cites_its_paper() -> None:
    found = load_claims()
    assert len(found) >= 25
    assert all(cited(claim.paper).startswith(("arXiv:", "GitHub ")) for claim in found)
    assert all(len(each.words) > 30 for claim in found for each in (claim.published, claim.fair) if each)
    assert all(claim.cells for claim in found), "of this repository every claim names its cells"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "h"}, "unit=h: must be one of x, %, GB, s, ms, stages"),
        ({"fair": VALUES["fair"] | {"measure": {"metric": "time"}}}, "measure.metric=time: must be one of"),
        ({"fair": VALUES["fair"] | {"measure": {"by": "x"}}}, "measure: key=by: must be one of"),
        ({"unit": "GB"}, "published.to=.*: must be empty for GB"),
        ({"judged_by": "eye"}, "judged_by=eye: must be one of gain, level, limit"),
        ({"judged_by": "level", "value": None}, "judged_by=level: must be gain for an order"),
        ({"value": 1.0}, r"value=\[1.0\]: must be a gain"),
        ({"value": None, "unit": "%"}, "unit=%: must be x for an order"),
        ({"verdict": "reproduced"}, "key=verdict: must be one of"),
        ({"measure": {"metric": "time"}}, "measure.metric=time: must be one of iteration_time_s"),
        ({"measure": {"metric": "mfu", "over": "median"}}, "measure.over=median: must be one of mean"),
        ({"measure": {"metric": "mfu", "by": "x"}}, "measure: key=by: must be one of metric"),
        ({"measure": {}}, "measure: metric: missing"),
        ({"published": SHARE | {"at": ["seed=1"]}}, "published.against=.*: must be given with published.at"),
        ({"fair": SHARE | {"choices": {}}}, "fair: key=choices: must be one of"),
        ({"published": SHARE, "fair": None}, "published.to=.*: must be given for a ratio"),
        ({"fair": {"common": ["layout.tp=2"]}}, "fair.common=layout.tp=2: must be of the job"),
        ({"cells": ["DIP-T5-memory-tim"]}, "cells=DIP-T5-memory-tim: unknown .did you mean DIP-T5-memory-time"),
        ({"choices": {"none": {}}}, "none={}: must be overrides that make"),
        ({"assumption": {"text": "a"}}, "assumption: otherwise: missing"),
    ],
)
def test_a_claim_that_says_something_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_claim("some", VALUES | change)
    with pytest.raises(UserError, match="where: missing"):
        parse_claim("some", {key: value for key, value in VALUES.items() if key != "where"})


def test_a_change_takes_the_place_of_overrides_of_the_same_key() -> None:
    setting = ClaimSide("", ("a=1", "b=2"), ("strategy=x", "c=3"), ("strategy=y",), ("d=1",), ("d=2",))
    assert setting.changed({"common": ("a=5", "c=6", "e=7")}) == ClaimSide(
        "", ("b=2", "a=5", "c=6", "e=7"), ("strategy=x",), ("strategy=y",), ("d=1",), ("d=2",)
    )
    # What one side changes of all runs, the other keeps.
    assert setting.changed({"to": ("b=9", "strategy=z")}) == ClaimSide(
        "", ("a=1",), ("b=2", "strategy=x", "c=3"), ("b=9", "strategy=z"), ("d=1",), ("d=2",)
    )
    with pytest.raises(UserError, match="change=d: must be a key other than those of at and against"):
        setting.changed({"common": ("d=8",)})
    alone = ClaimSide("", ("a=1",), ("b=2",))
    assert alone.changed({"of": ("a=3",)}) == ClaimSide("", (), ("b=2", "a=3"))


def record_times(
    study: Study,
    setting: ClaimSide,
    seconds: Callable[[Cell], float],
    memory: float = 1e6,
    reason: str = "told so",
) -> None:
    """Records with the time and memory of each run; of those whose time is 0 a failure."""
    for sweep in setting.sweeps:
        for cell in study.cells(*sweep):
            record = new_record(cell, "ok" if seconds(cell) else "failed", reason)
            if seconds(cell):
                metrics = {"iteration_time_s": seconds(cell), "peak_memory_bytes": memory}
                object.__setattr__(record, "metrics", metrics)
            study.results.write(record, None)


def strategy_of(cell: Cell) -> str:
    return str(cell.config.strategy["name"])


def test_seeds_without_a_result_are_left_out_and_counted(tmp_path: Path) -> None:
    common = {"common": [*TINY, "workload=chartqa", "seed=0,1,2"]}
    claim, study = claim_with(common, {}), Study(Results(tmp_path))
    assert claim.fair is not None
    record_times(
        study,
        claim.fair,
        lambda cell: 1.5 if strategy_of(cell) == "entrain" else 0.0 if cell.config.seed == 1 else 3.0,
    )
    row = claim_row(claim, study)
    assert row["fair_value"] == "2.00x (2.00 to 2.00x); 1 of 6 runs have no result (seeds left out: 1)"
    assert row["fair_verdict"] == "reproduced"
    assert row["published_verdict"] == f"{claims.NOT_MEASURED}: 3 of 3 runs have no result: not run"


def test_where_plans_are_swept_a_plan_counts_as_a_seed(tmp_path: Path) -> None:
    swept = [*TINY, "workload=chartqa", "planning_seed=0,1,2"]
    claim, study = claim_with({"common": swept}, {}), Study(Results(tmp_path))
    assert claim.fair is not None
    record_times(
        study, claim.fair, lambda cell: 1.0 if strategy_of(cell) == "entrain" else 1.9 + 0.1 * cell.config.planning_seed
    )
    # Of the logarithms of 1.9, 2.0 and 2.1: 0.6923 +- 4.303 (Student's t, two degrees of freedom) x 0.0501 / sqrt(3).
    assert claim_row(claim, study)["fair_value"] == "2.00x (1.76 to 2.26x)"


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
    row = claim_row(claim, study)
    assert row["published_value"] == "2.00x (2.00 to 2.00x); 1.25 to 2.50x under other choices"
    assert row["published_verdict"] == "reproduced; under other choices exceeds or not reproduced"
    assert (row["fair_value"], row["fair_verdict"]) == ("1.00x (1.00 to 1.00x)", "not reproduced")
    assert row["assumption"] == "rigid; otherwise, tuned"
    assert (row["otherwise_value"], row["otherwise_verdict"]) == ("1.00x (1.00 to 1.00x)", "not reproduced")
    assert row["other_choices"] == (
        "small: 2.50x (2.50 to 2.50x) (exceeds); large: 1.25x (1.25 to 1.25x) (not reproduced)"
    )
    text = claim_text(claim, row)
    assert "  What decides: rigid; otherwise, tuned: 1.00x (1.00 to 1.00x) (not reproduced)." in text
    assert "  Other choices: small: 2.50x" in text
    # The first page leaves out what other choices gave, but not that the verdict depends on them.
    line = (
        "| 2.00x (2.00 to 2.00x) | reproduced; under other choices exceeds or not reproduced | 1.00x (1.00 to 1.00x) |"
    )
    assert line in claims_markdown([claim], [row])
    # Nothing can be judged without the paper's number.
    assert claim_row(replace(claim, no_source=True), study)["fair_verdict"] == "no source"


def test_a_program_that_the_published_device_cannot_hold_is_another_setting(tmp_path: Path) -> None:
    larger = "cluster.device.memory_bytes=1099511627776"
    claim = claim_with({"common": [*VALUES["published"]["common"], larger]}, fair=False)
    study = Study(Results(tmp_path))
    record_times(study, claim.published, lambda cell: 3.0 if "rigid" in strategy_of(cell) else 1.5, memory=1e12)
    row = claim_row(claim, study)
    assert row["published_value"] == "2.00x (2.00 to 2.00x)"
    assert row["published_verdict"].startswith("setting not reproduced: needs 931 of ")
    assert (row["fair_value"], row["fair_verdict"]) == ("", "")
    # A level of memory is judged itself.
    peak = replace(claim, value=(1000.0,), unit="GB", measure=Measure("peak_memory_bytes"), judged_by="level")
    peak = replace(peak, published=replace(claim.published, to=()))
    assert claim_row(peak, study)["published_verdict"] == "reproduced"


def test_a_run_that_fails_for_memory_is_another_setting(tmp_path: Path) -> None:
    claim, study = claim_with(fair=False), Study(Results(tmp_path))
    record_times(
        study, claim.published, lambda _: 0.0, reason="memory: rank 0 needs 93.1 GiB at ...; the budget is 71.3"
    )
    assert claim_row(claim, study)["published_verdict"].startswith("setting not reproduced: 4 of 4 runs")


def test_a_row_of_other_runs_is_not_shown(tmp_path: Path) -> None:
    claim, study = claim_with(), Study(Results(tmp_path))
    write_claims([claim], study)
    (row,) = read_rows([claim], tmp_path / "claims.csv")
    assert "not run" in row["published_verdict"], "of these runs, which have no result"
    (row,) = read_rows([claim_with({"of": ["strategy=disttrain"]})], tmp_path / "claims.csv")
    assert row["published_verdict"] == row["fair_verdict"] == "not measured: run make claims"
    assert row["otherwise_verdict"] == "", "nothing was toggled"


@pytest.mark.wide
def test_choices_without_a_result_are_counted(tmp_path: Path) -> None:
    choices = {"small": {"common": ["global_batch=32"]}, "large": {"common": ["global_batch=128"]}}
    claim, study = claim_with(choices=choices), Study(Results(tmp_path))

    def record(failing: tuple[int, ...]) -> str:
        for setting in claim.settings:
            record_times(study, setting, lambda cell: 0.0 if cell.config.global_batch in failing else 1.5)
        row = claim_row(claim, study)
        assert row["other_choices"].count("nothing (not measured: ") == len(failing)
        return row["published_value"].partition("; ")[2]

    assert record(()) == "1.00 to 1.00x under other choices"
    assert record((128,)) == "1.00x under other choices (1 of 2 without result)"
    assert record((32, 128)) == "nothing under other choices (2 of 2 without result)"


@pytest.mark.wide
def test_a_claim_is_run_measured_judged_and_written(tmp_path: Path) -> None:
    claim, study = claim_with(), Study(Results(tmp_path))
    sweeps = [sweep for setting in claim.settings for sweep in setting.sweeps]
    output = Output("claims", sweeps, lambda study: write_claims([claim], study))
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
    row = claim_row(claim, study)
    assert row["fair_value"].startswith(f"{(ratios[0] * ratios[1]) ** 0.5:.2f}x (")
    assert row["fair_verdict"] == verdict(claim, cases(ratios))
    assert claims_table([row])["fair_verdict"].tolist() == [row["fair_verdict"]]
    text = (tmp_path / "claims.md").read_text()
    assert text == claims_markdown([claim], [row])
    assert text.startswith("# 1 claim: as published 1 ")
    assert "| [One is faster than the other](claims/paper.md#some) | Table 3 | 2.00x |" in text
    page = (tmp_path / "claims" / "paper.md").read_text()
    assert "## some\n\n- *Claim*: One is faster than the other: 2.00x (arXiv:2605.27918, Table 3)\n" in page
    assert page.count("seed=0,1") == 4
    assert (tmp_path / "claims.csv").read_text().startswith("name,group,claim,paper")
    assert read_rows([claim], tmp_path / "claims.csv") == [row]


@pytest.mark.wide
def test_a_pasted_command_runs_the_cells_of_its_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = "workload.text={kind: lognormal, median: 20, sigma: 0.25, min: 1, max: 40}"
    claim = claim_with({"common": [*TINY, "workload=synthetic", short, "seed=0,1"], "of": ["strategy=megatron_rigid"]})
    label, command = claim_commands(claim)[0]
    assert label == "as published"
    assert run_command([*shlex.split(command)[1:], "mlflow=false"]) == 0
    keys = {cell.key for cell in Study(Results(Path("results"))).cells(*claim.published.sweeps[0])}
    assert {record.key for record in Results(Path("results")).records()} == keys


def test_commands_of_their_claims_name_their_folder() -> None:
    (_, command), *_ = claim_commands(replace(claim_with(), config_dir="a folder"))
    assert command.startswith("entrain-bench --multirun ")
    assert command.endswith(" --config-dir 'a folder'")


def test_cases_of_a_matrix_share_a_row_and_a_section() -> None:
    claims = [replace(claim_with(), name=f"case_{number}", group="many", title="Many cases") for number in range(3)]
    rows = [
        {**dict.fromkeys(("published_value", "fair_value", "assumption", "other_choices", "why"), ""), **words}
        for words in (
            {
                **{key: str(getattr(claim, key)) for key in ("name", "claim", "paper", "where", "paper_setting")},
                "paper_value": "2.00x",
                "published_verdict": verdict,
                "fair_verdict": "partly",
                "published_setting": "theirs",
                "fair_setting": "ours",
            }
            for claim, verdict in zip(claims, ("reproduced", "exceeds", "reproduced"), strict=True)
        )
    ]
    index = claims_markdown(claims, rows)
    assert index.startswith("# 3 claims: as published 2 reproduced, 1 exceeds; fair 3 partly\n")
    assert "| [Many cases (3 cells)](claims/paper.md#many) |" in index
    assert "| 2 reproduced, 1 exceeds |  | 3 partly |" in index
    (page,) = claims_pages(claims, rows).values()
    assert page.count("\n## ") == 1
    assert all(f"| case_{number} |" in page for number in range(3))


def test_counts_come_first_and_know_every_verdict() -> None:
    verdicts = ["reproduced; under other choices partly", "no source", "not measured: 3 of 3 failed", "reproduced"]
    rows = [{"published_verdict": each, "fair_verdict": "partly"} for each in verdicts]
    assert counts(rows) == "4 claims: as published 2 reproduced, 1 no source, 1 not measured; fair 4 partly"
    found = [claim_with({}) for _ in rows]
    assert counts_markdown(found, rows) == (
        "4 claims of 1 paper. As published: 2 reproduced, 0 exceeds, 0 not reproduced, 2 in between or undecided. "
        "Comparisons of speed under equal tuning: 0 reproduced, 0 exceeds, 0 not reproduced, 4 in between or undecided."
        "\n"
    )


def test_the_committed_pages_are_those_of_the_committed_numbers() -> None:
    docs, found = Path(__file__).parents[3] / "docs", load_claims()
    rows = read_rows(found, docs.parent / "results" / "reference" / "claims.csv")
    committed = (docs / "claims.md").read_text()
    assert committed == claims_markdown(found, rows)
    assert committed.splitlines()[0] == f"# {counts(rows)}"
    assert len(committed.split()) <= 8000
    assert (
        f"<!-- table: claims_counts -->\n\n{counts_markdown(found, rows)}\n" in (docs.parent / "README.md").read_text()
    )
    for path, text in claims_pages(found, rows).items():
        assert (docs / path).read_text() == text
    shown = claims_text(found, rows)
    assert shown.splitlines()[-2:] == [counts(rows), agreement_text(found)]
    assert agreement_text(found).startswith("0 mismatches between ")
    assert all(f"  {claim.name} " in shown for claim in found)


def test_a_claim_whose_cells_have_no_result_is_not_measured_and_says_why(tmp_path: Path) -> None:
    broken = claim_with({"common": [*VALUES["published"]["common"], "layout.pp=100"]})
    problem = write_claims([broken], Study(Results(tmp_path)))
    assert f"some (published): {claims.NOT_MEASURED}: 2 of 2 runs have no result: not run" in problem.split("; ")
    assert claims.NOT_MEASURED in (tmp_path / "claims.md").read_text()


def test_sources_without_an_arxiv_number_have_their_own_name() -> None:
    assert cited("2605.27918") == "arXiv:2605.27918"
    assert cited("GitHub NVIDIA/Megatron-LM") == "GitHub NVIDIA/Megatron-LM"
