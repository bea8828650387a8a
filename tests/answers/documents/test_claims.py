"""Claims measured, judged and written: how numbers come out of runs, and the rule that judges them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pandas as pd
import pytest
from myst_parser.slugs import github_slugify

from entrain_bench.answers.documents.claim import Claim, ClaimSetting, load_claims
from entrain_bench.answers.documents.claims import claim_row, claim_text, claims_pages, read_claims, write_claims
from entrain_bench.answers.documents.tables import PLACE, splice
from entrain_bench.answers.documents.verdict import Finding, JudgedClaim, Verdict, judge_claim, measured
from entrain_bench.answers.text import slug
from entrain_bench.base.errors import UserError
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results, new_record
from entrain_bench.run.study import Output, Study, bring_up_to_date
from support.claims import ALONE, TINY, VALUES, cases, claim_with, runs, text_on, verdict_on


def numbers(claim: Claim, pairs: list[list[pd.DataFrame]]) -> pd.DataFrame:
    return measured(claim, claim.published.measure, pairs)


def test_seeds_are_paired_configurations_picked_and_cases_combined() -> None:
    of = runs(
        *(("w", name, value) for name, value in [("a", 3.0), ("a", 8.0), ("b", 9.0), ("b", 4.0)]), ("v", "a", 6.0)
    )
    of = pd.concat([of, runs(("v", "a", 0.0), ("v", "a", 6.0))[1:]])
    to = runs(
        *(("w", name, value) for name, value in [("c", 1.0), ("c", 2.0), ("d", 5.0), ("d", 4.0)]),
        *(("v", "c", value) for value in (6.0, 3.0)),
        ("u", "c", 1.0),
    )
    # Workload w: 6 against 3 at both seeds; workload v: 6 against 6, then against 3.
    measure = VALUES["measure"]
    mean = claim_with()
    found = numbers(mean, [[of, to]])
    assert found.loc[("w", "m")].tolist() == [2.0, 2.0]
    assert found.loc[("v", "m")].tolist() == [1.0, 2.0]
    # Means of the two are 1.5 and 2, their geometric mean is 1.732.
    assert text_on(mean, found).startswith("1.73x (")
    # Of a and b the second is greater on average, of c and d the first is less, whatever is at a single seed.
    extreme = claim_with(measure=measure | {"pick_of": "max", "pick_to": "min", "over": "max"})
    assert numbers(extreme, [[of, to]]).loc[("w", "m")].tolist() == [9.0, 2.0]
    assert text_on(extreme, numbers(extreme, [[of, to]])).startswith("4.24x (")
    change = claim_with(unit="%", measure=measure | {"over": "min"})
    assert text_on(change, numbers(change, [[of, to]])).startswith("+41.4% (")
    share = claim_with(**ALONE, unit="%", measure=measure | {"over": "max"})
    assert text_on(share, numbers(share, [[of[of["seed"] == 0]]])) == "600.0%"
    with pytest.raises(UserError, match="no workload, model and seed in common"):
        numbers(mean, [[of, to[to["workload"] == "u"]]])
    with pytest.raises(UserError, match=r"measure.metric=iteration_time_s: must be positive"):
        numbers(mean, [[of, to.assign(iteration_time_s=-1.0)]])


def test_a_metric_is_compared_in_two_situations_without_a_second_side() -> None:
    two = claim_with(**ALONE, at=["model=m"], against={"at": ["model=n"]})
    assert [len(pair) for pair in two.published.pairs] == [1, 1]
    assert "fair" not in two.settings, "there is no baseline to tune"
    found = numbers(two, [[runs(("w", "a", 10.0))], [runs(("w", "a", 4.0)).assign(model="n")]])
    assert text_on(two, found) == "2.50x"
    assert verdict_on(two, found) == "exceeds"


@pytest.mark.parametrize(
    ("ratios", "text", "expected"),
    [
        ([1.2, 1.03], "1.03 to 1.20x (2 of 2)", "reproduced"),
        ([0.5, 1.5, 0.9], "0.50 to 1.50x (1 of 3)", "partly"),
        ([0.5, 1.01, 0.9, 1.2], "0.50 to 1.20x (1 of 4)", "not reproduced"),
    ],
)
def test_an_order_is_judged_by_the_cases_in_which_it_holds(ratios: list[float], text: str, expected: str) -> None:
    order = claim_with(value=None)
    assert order.format(order.value) == "> 1"
    found = cases(*([ratio] for ratio in ratios))
    assert (text_on(order, found), verdict_on(order, found)) == (text, expected)


@pytest.mark.parametrize(
    ("sure", "expected"),
    [
        # One case of three is unclear: all may hold, or two.
        ([1.2, 1.2], "undecided"),
        # A third holds either way.
        ([1.2, 0.9], "partly"),
        # None may hold, or one.
        ([0.9, 0.9], "undecided"),
        ([0.9, 0.9, 0.9], "not reproduced"),
    ],
)
def test_an_order_is_undecided_if_it_depends_on_cases_that_are(sure: list[float], expected: str) -> None:
    order = claim_with(value=None)
    found = cases(*([ratio, ratio * 1.001] for ratio in sure), [0.9, 1.3])
    assert verdict_on(order, found) == expected
    assert ", 1 unclear)" in text_on(order, found)


@pytest.mark.parametrize(
    ("value", "unit", "measured_value", "expected"),
    [
        (1.40, "x", 1.40, "reproduced"),
        (1.40, "x", 1.49, "reproduced"),
        # Far more than the paper's gain is no reproduction of it.
        (1.40, "x", 1.51, "exceeds"),
        # Where the paper gains nothing, nothing is to be gained.
        (1.01, "x", 1.02, "reproduced"),
        (1.01, "x", 0.97, "partly"),
        (1.01, "x", 1.2, "not reproduced"),
        (1.40, "x", 1.31, "partly"),
        (1.40, "x", 1.12, "not reproduced"),
        (-82.0, "%", -70.0, "reproduced"),
        ([15.6, 76.2], "%", 95.0, "reproduced"),
        ([15.6, 76.2], "%", 96.0, "exceeds"),
        ([-8.0, -5.0], "%", -11.0, "exceeds"),
    ],
)
def test_the_verdict_is_the_share_of_the_papers_gain(
    value: float | list[float], unit: str, measured_value: float, expected: str
) -> None:
    ratio = measured_value if unit == "x" else 1 + measured_value / 100
    assert verdict_on(claim_with(value=value, unit=unit), cases([ratio])) == expected


@pytest.mark.parametrize(
    ("kind", "value", "ratio", "expected"),
    [
        # A paper's 0.97 says that nothing was gained: a great loss does not confirm it, nor does a gain.
        ("level", 0.97, 1.2, "reproduced"),
        ("level", 0.97, 1.25, "partly"),
        ("level", 0.97, 1.95, "not reproduced"),
        ("gain", 0.97, 0.4, "exceeds"),
        ("level", 1.0, 1.0, "reproduced"),
        ("level", [2.0, 4.0], 3.0, "reproduced"),
        ("level", [2.0, 4.0], 1.5, "partly"),
        ("limit", 2.0, 2.0, "reproduced"),
        ("limit", 2.0, 2.4, "partly"),
        ("limit", 2.0, 2.6, "not reproduced"),
    ],
)
def test_a_level_is_judged_by_its_distance(kind: str, value: float | list[float], ratio: float, expected: str) -> None:
    assert verdict_on(claim_with(value=value, kind=kind), cases([ratio])) == expected


def test_seconds_and_milliseconds_are_levels() -> None:
    claim = claim_with(**ALONE, unit="ms", value=7570.0)
    assert (claim.kind, text_on(claim, cases([7.0]))) == ("level", "7000.0 ms")
    assert verdict_on(claim, cases([9.4])) == "reproduced"
    assert verdict_on(claim, cases([9.6])) == "partly"
    assert verdict_on(claim, cases([6.1])) == "reproduced"
    assert verdict_on(claim, cases([6.0])) == "partly"
    std = claim_with(**ALONE, unit="ms", value=20.0, measure="llm_forward_std_ms")
    assert text_on(std, cases([21.0])) == "21.0 ms"


@pytest.mark.parametrize(
    ("ratios", "text", "expected"),
    [
        # 2.262 standard errors for ten seeds; 80% of the gain is 1.32, a third 1.133.
        ([1.39, 1.41] * 5, "1.40x (1.39 to 1.41x)", "reproduced"),
        ([1.25, 1.35] * 5, "1.30x (1.26 to 1.34x)", "undecided"),
        ([1.24, 1.26] * 5, "1.25x (1.24 to 1.26x)", "partly"),
        ([1.1, 1.2] * 5, "1.15x (1.11 to 1.19x)", "undecided"),
        ([0.85, 1.15] * 5, "0.99x (0.88 to 1.11x)", "not reproduced"),
    ],
)
def test_a_verdict_does_not_flip_within_the_interval(ratios: list[float], text: str, expected: str) -> None:
    claim = claim_with(value=1.40)
    assert (text_on(claim, cases(ratios)), verdict_on(claim, cases(ratios))) == (text, expected)


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
    assert "fair" in claim.settings
    record_times(
        study,
        claim.settings["fair"],
        lambda cell: 1.5 if strategy_of(cell) == "entrain" else 0.0 if cell.config.seed == 1 else 3.0,
    )
    judged = judge_claim(claim, study)
    assert judged.findings["fair"] == Finding(
        verdict=Verdict.REPRODUCED, number=2.0, low=2.0, high=2.0, num_runs=6, num_lost=1, lost_seeds=(1,)
    )
    row = claim_row(judged)
    assert row["fair_value"] == "2.00x (2.00 to 2.00x); 1 of 6 runs have no result (seeds left out: 1)"
    assert judged.findings["published"].verdict == Verdict.NOT_MEASURED
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

    for setting in claim.settings.values():
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
    assert "  Deciding assumption: rigid; otherwise, tuned: 1.00x (1.00 to 1.00x) (not reproduced)." in text
    assert "  Other choices: small: 2.50x" in text
    # The first page leaves out what other choices gave, but not that the verdict depends on them.
    line = (
        "| 2.00x (2.00 to 2.00x) | reproduced; under other choices exceeds or not reproduced | 1.00x (1.00 to 1.00x) |"
    )
    assert line in claims_pages([judged])["claims.md"]
    # Nothing can be judged without the paper's number.
    assert judge_claim(replace(claim, no_source=True), study).findings["published"].verdict == Verdict.NO_SOURCE


def test_a_program_that_the_published_device_cannot_hold_is_another_setting(tmp_path: Path) -> None:
    larger = "cluster.device.memory_bytes=1099511627776"
    claim = claim_with(common=[VALUES["common"], larger], fair=None)
    study = Study(Results(tmp_path))
    record_times(study, claim.published, lambda cell: 3.0 if "rigid" in strategy_of(cell) else 1.5, memory=1e12)
    judged = judge_claim(claim, study)
    assert (judged.findings["published"].verdict, judged.findings["published"].number) == (Verdict.OTHER_SETTING, 2.0)
    assert judged.findings["published"].need_bytes == 1e12
    row = claim_row(judged)
    assert row["published_value"] == "2.00x (2.00 to 2.00x)"
    assert row["published_verdict"].startswith("setting differs: needs 931 of ")
    assert (row["fair_value"], row["fair_verdict"]) == ("", "")
    # A level of memory is judged itself.
    peak = claim_with(**ALONE, unit="GB", value=1000.0, measure="peak_memory_bytes", common=[VALUES["common"], larger])
    record_times(study, peak.published, lambda _: 1.0, memory=1e12)
    assert judge_claim(peak, study).findings["published"].verdict == Verdict.REPRODUCED


@pytest.mark.parametrize(("settled", "verdict"), [(True, Verdict.OTHER_SETTING), (False, Verdict.NOT_MEASURED)])
def test_a_run_that_does_not_fit_memory_is_another_setting(settled: bool, verdict: Verdict, tmp_path: Path) -> None:
    claim, study = claim_with(fair=None), Study(Results(tmp_path))
    record_times(study, claim.published, lambda _: 0.0, settled=settled)
    assert judge_claim(claim, study).findings["published"] == Finding(
        verdict=verdict, reason="4 of 4 runs have no result: told so"
    )


def test_findings_of_other_runs_do_not_count(tmp_path: Path) -> None:
    claim, study = claim_with(), Study(Results(tmp_path))
    write_claims([claim], study)
    (judged,) = read_claims([claim], tmp_path / "claims.json")
    assert "not run" in judged.findings["published"].reason, "of these runs, which have no result"
    (judged,) = read_claims([claim_with(of=["strategy=disttrain"])], tmp_path / "claims.json")
    assert (
        judged.findings["published"]
        == judged.findings["fair"]
        == Finding(verdict=Verdict.NOT_MEASURED, reason="run make claims")
    )
    assert {*judged.findings} == {"published", "fair"}, "nothing was toggled"


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
    assert text.startswith("# Claims\n\nUnder equal tuning, ")
    assert "| [One is faster than the other](claims/paper.md#one-is-faster-than-the-other) | Table 3 | 2.00x |" in text
    page = (tmp_path / "claims" / "paper.md").read_text()
    assert "## One is faster than the other\n\nPaper: 2.00x; here, as published: " in page
    assert "\n- *Claim*: One is faster than the other: 2.00x (arXiv:2605.27918, Table 3)\n" in page
    assert page.count("seed=0,1") == 4
    assert read_claims([claim], tmp_path / "claims.json") == [judged]


def test_headlines_have_what_holds_under_equal_tuning() -> None:
    speedup = replace(claim_with(), file="entrain", headline="gain", title="Gain")
    mfu = replace(claim_with(**ALONE, unit="%", value=50.0), name="mfu", file="disttrain", headline="MFU", title="MFU")
    other = replace(speedup, name="other", headline="", group="pair", title="Two")
    elsewhere = replace(speedup, name="last", file="elsewhere", headline="gain")
    kept, lost = Finding(verdict=Verdict.EXCEEDS, number=2.5), Finding(verdict=Verdict.NOT_REPRODUCED, number=0.9)
    unclear, nothing = Finding(verdict=Verdict.UNDECIDED, number=1.5), Finding(verdict=Verdict.OTHER_SETTING)
    judged = [
        JudgedClaim(mfu, {"published": nothing}),
        JudgedClaim(speedup, {"published": kept, "fair": lost}),
        JudgedClaim(other, {"published": kept, "fair": kept}),
        JudgedClaim(elsewhere, {"published": kept, "fair": unclear}),
    ]
    pages = claims_pages(judged)
    assert (
        pages["tables/claims_hold.md"]
        == "Under equal tuning, of 3 published speedups 1 hold, 1 do not, 1 are undecided.\n"
    )
    # Entrain's paper is first, and a paper that the suite did not begin with is on its own page only.
    assert pages["tables/headline_claims.md"].splitlines()[2:] == [
        "| [Some](../../docs/claims/entrain.md#gain): gain | 2.00x | 2.50x, exceeds | 0.90x, not reproduced |",
        "| [Some](../../docs/claims/disttrain.md#mfu): MFU | 50.0% | setting differs | not a speedup |",
    ]
    row = "| [Some](claims/elsewhere.md#gain): gain | 2.00x | 2.50x, exceeds | 1.50x, undecided |"
    assert row in pages["claims.md"]
    assert "| all | 4 | 0 | 3 | 0 | 0 | 1 | 1 of 3 |" in pages["claims.md"]
    assert "| levels, limits | 1 | 0 | 0 | 0 | 0 | 1 | - |" in pages["claims.md"]


def test_the_committed_pages_are_those_of_the_committed_findings() -> None:
    root = Path(__file__).parents[3]
    judged = read_claims(load_claims(), root / "results" / "reference" / "claims.json")
    assert not [one for one in judged if one.findings["published"].verdict == Verdict.NOT_MEASURED]
    pages = claims_pages(judged)
    first = {name: pages.pop(f"tables/{name}.md") for name in ("claims_hold", "headline_claims")}
    for path, text in pages.items():
        assert (root / "docs" / path).read_text() == text
    readme = (root / "README.md").read_text()
    assert all(f"<!-- table: {name} -->" in readme for name in first)
    others = {name: body for _, name, body, _ in PLACE.findall(readme)}
    assert splice(readme, others | first, "") == readme


def test_headings_of_a_page_differ_and_have_the_anchors_that_its_links_name() -> None:
    for file, claims in groupby(load_claims(), key=attrgetter("file")):
        groups = {claim.group or claim.name: claim.heading for claim in claims}
        anchors = {name: slug(heading) for name, heading in groups.items()}
        assert len({*anchors.values()}) == len(groups), file
        # MyST makes the anchors of the site as GitHub does.
        assert anchors == {name: github_slugify(heading) for name, heading in groups.items()}
        assert max(map(len, groups.values())) <= 110, "a heading, not a sentence"
