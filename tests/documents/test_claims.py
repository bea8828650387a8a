"""Claims: what their YAMLs must state, how numbers come out of runs, the verdict rule, and the generated documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from entrain_bench.documents import claims
from entrain_bench.documents.claim import Change, Claim, Setting, parse_claim
from entrain_bench.documents.claims import claim_row, claims_markdown, claims_table, load_claims, write_claims
from entrain_bench.documents.markdown import markdown_table
from entrain_bench.documents.results import results_markdown
from entrain_bench.documents.verdict import combined, measured, verdict
from entrain_bench.errors import UserError
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results, new_record
from entrain_bench.records.tables import compared
from entrain_bench.study import Output, Study, bring_up_to_date

TINY = (
    "model=tiny",
    "cluster=tiny",
    "global_batch=16",
    "microbatch_size=2",
    "layout.tp=1",
    "layout.dp=2",
    "iterations=1",
)
VALUES: dict[str, Any] = {
    "claim": "One is faster\nthan the other",
    "paper": "2605.27918",
    "where": "Table 3",
    "value": 2.0,
    "unit": "x",
    "paper_setting": "theirs",
    "measure": {"metric": "iteration_time_s"},
    "published": {
        "setting": "as theirs",
        "common": [*TINY, "workload=chartqa", "seed=0,1"],
        "of": ["strategy=megatron_rigid"],
        "to": ["strategy=entrain"],
    },
    "fair": {
        "setting": "as it should be",
        "common": [*TINY, "workload=chartqa", "seed=0,1"],
        "of": ["strategy=megatron"],
        "to": ["strategy=entrain"],
    },
    "why": "because",
}
SHARE = {key: VALUES["fair"][key] for key in ("setting", "common", "of")}


def claim_with(published: Any = None, fair: Any = None, **changes: Any) -> Claim:
    settings = {"published": VALUES["published"] | (published or {}), "fair": VALUES["fair"] | (fair or {})}
    return parse_claim("some", VALUES | settings | changes)


def runs(*rows: tuple[str, str, float]) -> pd.DataFrame:
    """Runs of a workload and a configuration, seed after seed."""
    table = pd.DataFrame(rows, columns=["workload", "configuration", "iteration_time_s"])
    return table.assign(model="m", seed=table.groupby(["workload", "configuration"]).cumcount(), status="ok")


def cases(*rows: list[float]) -> pd.DataFrame:
    """A case a row, a seed a column."""
    return pd.DataFrame([*rows])


def test_every_claim_is_complete_and_cites_its_paper() -> None:
    found = load_claims()
    assert len(found) >= 25
    assert all(claim.paper in ("2605.27918", "2408.04275", "2603.25120", "2504.14145", "2605.27678") for claim in found)
    assert all(len(each.words) > 30 for claim in found for each in (claim.published, claim.fair))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "s"}, "unit=s: must be one of x, %, GB, stages"),
        ({"fair": VALUES["fair"] | {"measure": {"metric": "time"}}}, "measure.metric=time: must be one of"),
        ({"fair": VALUES["fair"] | {"measure": {"by": "x"}}}, "measure: key=by: must be one of"),
        ({"unit": "GB"}, "published.to=.*: must be empty for GB"),
        ({"judged_by": "eye"}, "judged_by=eye: must be one of gain, level, limit"),
        ({"judged_by": "level", "value": None}, "judged_by=level: must be gain for an order and for a change"),
        ({"judged_by": "level", "unit": "%"}, "judged_by=level: must be gain for an order and for a change"),
        ({"value": 1.0}, "value=1.0: must be a gain"),
        ({"value": None, "unit": "%"}, "unit=%: must be x for an order"),
        ({"verdict": "reproduced"}, "key=verdict: must be one of"),
        ({"measure": {"metric": "time"}}, "measure.metric=time: must be one of iteration_time_s"),
        ({"measure": {"metric": "mfu", "over": "median"}}, "measure.over=median: must be one of mean"),
        ({"measure": {"metric": "mfu", "by": "x"}}, "measure: key=by: must be one of metric"),
        ({"measure": {}}, "measure: metric: missing"),
        ({"fair": SHARE | {"at": ["seed=1"]}}, "fair.against=.*: must be given with fair.at"),
        ({"fair": {"of": []}}, "fair: setting: missing"),
        ({"fair": SHARE | {"choices": {}}}, "fair: key=choices: must be one of"),
        ({"published": SHARE, "fair": SHARE}, "published.to=.*: must be given for a ratio"),
        ({"fair": SHARE}, "fair.to=.*: must be given in both settings or none"),
        ({"published": VALUES["published"] | {"choices": {"none": {}}}}, "none={}: must be overrides that make"),
        ({"assumption": {"text": "a"}}, "assumption: otherwise: missing"),
        (
            {"assumption": {"text": "a", "otherwise": "b", "of": ["c=1"], "of_setting": "ours"}},
            "assumption.of_setting=ours: unknown",
        ),
    ],
)
def test_a_claim_that_says_something_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_claim("some", VALUES | change)
    with pytest.raises(UserError, match="where: missing"):
        parse_claim("some", {key: value for key, value in VALUES.items() if key != "where"})


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
    found = measured(mean, [[of, to]])
    assert found.loc[("w", "m")].tolist() == [2.0, 2.0]
    assert found.loc[("v", "m")].tolist() == [1.0, 2.0]
    # Means of the two are 1.5 and 2, their geometric mean is 1.732.
    assert combined(mean, found).startswith("1.73x (")
    # Of a and b the second is greater on average, of c and d the first is less, whatever is at a single seed.
    extreme = claim_with(measure=measure | {"pick_of": "max", "pick_to": "min", "over": "max"})
    assert measured(extreme, [[of, to]]).loc[("w", "m")].tolist() == [9.0, 2.0]
    assert combined(extreme, measured(extreme, [[of, to]])).startswith("4.24x (")
    change = claim_with(unit="%", measure=measure | {"over": "min"})
    assert combined(change, measured(change, [[of, to]])).startswith("+41.4% (")
    values = VALUES | {"unit": "%", "measure": measure | {"over": "max"}, "published": SHARE, "fair": SHARE}
    share = parse_claim("some", values)
    assert combined(share, measured(share, [[of[of["seed"] == 0]]])) == "600.0%"
    with pytest.raises(UserError, match="no workload, model and seed in common"):
        measured(mean, [[of, to[to["workload"] == "u"]]])
    with pytest.raises(UserError, match=r"measure.metric=iteration_time_s: must be positive"):
        measured(mean, [[of, to.assign(iteration_time_s=-1.0)]])


def test_idle_time_is_the_idle_share_of_the_iteration() -> None:
    idle = claim_with(value=-80, unit="%", measure={"metric": "idle_time_s"})
    of, to = (runs(("w", "a", seconds)).assign(bubble_ratio=share) for seconds, share in ((10.0, 0.1), (20.0, 0.4)))
    # 1 s against 8 s.
    found = measured(idle, [[of, to]])
    assert found.loc[("w", "m")].tolist() == [0.125]
    assert verdict(idle, found) == "reproduced"


def test_a_metric_is_compared_in_two_situations_without_a_second_side() -> None:
    sides = [{key: side[key] for key in ("setting", "common", "of")} for side in (VALUES["published"], VALUES["fair"])]
    situations = {"at": ["model=m"], "against": ["model=n"]}
    two = parse_claim("some", VALUES | {"published": sides[0] | situations, "fair": sides[1] | situations})
    assert [len(pair) for pair in two.published.pairs] == [1, 1]
    found = measured(two, [[runs(("w", "a", 10.0))], [runs(("w", "a", 4.0)).assign(model="n")]])
    assert combined(two, found) == "2.50x"
    assert verdict(two, found) == "reproduced"


def test_two_settings_are_compared_by_the_ratio_of_their_ratios() -> None:
    two = claim_with(value=None, published={"at": ["seed=0"], "against": ["seed=1"]})
    assert two.published.pairs == [
        [(*two.published.common, situation, side) for side in ("strategy=megatron_rigid", "strategy=entrain")]
        for situation in ("seed=0", "seed=1")
    ]
    # 3 against 2 under the one; 4 against 2 and 1 against 1, together 1.5, under the other.
    at = [runs(("w", "a", 3.0)), runs(("w", "b", 2.0))]
    against = [runs(("v", "a", 4.0), ("u", "a", 1.0)), runs(("v", "b", 2.0), ("u", "b", 1.0))]
    found = measured(two, [at, against])
    assert found.to_numpy().tolist() == [[pytest.approx(1.0)]]
    assert (combined(two, found), verdict(two, found * 1.03)) == ("1.00x", "reproduced")
    assert verdict(two, found) == "not reproduced"


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
    assert (combined(order, found), verdict(order, found)) == (text, expected)


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
    assert verdict(order, found) == expected
    assert ", 1 unclear)" in combined(order, found)


@pytest.mark.parametrize(
    ("value", "unit", "measured_value", "expected"),
    [
        (1.40, "x", 1.40, "reproduced"),
        (1.40, "x", 1.33, "reproduced"),
        (1.40, "x", 3.0, "reproduced"),
        (1.40, "x", 1.31, "partly"),
        (1.40, "x", 1.14, "partly"),
        (1.40, "x", 1.12, "not reproduced"),
        (1.40, "x", 0.7, "not reproduced"),
        (-82.0, "%", -70.0, "reproduced"),
        (-82.0, "%", -40.0, "partly"),
        (-82.0, "%", 82.0, "not reproduced"),
        ([15.6, 76.2], "%", 13.0, "reproduced"),
        ([15.6, 76.2], "%", 12.0, "partly"),
        ([-8.0, -0.7], "%", -0.6, "reproduced"),
    ],
)
def test_the_verdict_is_the_share_of_the_papers_gain(
    value: float | list[float], unit: str, measured_value: float, expected: str
) -> None:
    ratio = measured_value if unit == "x" else 1 + measured_value / 100
    assert verdict(claim_with(value=value, unit=unit), cases([ratio])) == expected


@pytest.mark.parametrize(
    ("judged_by", "value", "ratio", "expected"),
    [
        # A paper's 0.97 says that nothing was gained: a great loss does not confirm it, nor does a gain.
        ("level", 0.97, 1.2, "reproduced"),
        ("level", 0.97, 0.78, "reproduced"),
        ("level", 0.97, 1.25, "partly"),
        ("level", 0.97, 0.5, "partly"),
        ("level", 0.97, 1.95, "not reproduced"),
        ("level", 0.97, 0.4, "not reproduced"),
        ("gain", 0.97, 0.4, "reproduced"),
        ("level", 1.0, 1.0, "reproduced"),
        ("level", [2.0, 4.0], 3.0, "reproduced"),
        ("level", [2.0, 4.0], 4.9, "reproduced"),
        ("level", [2.0, 4.0], 1.5, "partly"),
        ("limit", 2.0, 0.1, "reproduced"),
        ("limit", 2.0, 2.0, "reproduced"),
        ("limit", 2.0, 2.4, "partly"),
        ("limit", 2.0, 2.6, "not reproduced"),
    ],
)
def test_a_level_is_judged_by_its_distance(
    judged_by: str, value: float | list[float], ratio: float, expected: str
) -> None:
    assert verdict(claim_with(value=value, judged_by=judged_by), cases([ratio])) == expected


def test_memory_is_in_gb() -> None:
    settings = {"published": SHARE, "fair": SHARE}
    changes: dict[str, Any] = {"unit": "GB", "judged_by": "limit", "measure": {"metric": "peak_memory_bytes"}}
    claim = parse_claim("some", VALUES | settings | changes | {"value": 10.0})
    found = cases([12e9])
    assert claim.format(claim.value) == "10.0 GB"
    assert (combined(claim, found), verdict(claim, found)) == ("12.0 GB", "partly")
    assert verdict(claim, cases([9e9, 11e9])) == "undecided"


@pytest.mark.parametrize(
    ("counts", "text", "expected"),
    [
        ([4.0, 4.0], "4.0 stages (4.0 to 4.0 stages)", "reproduced"),
        ([5.0, 5.0], "5.0 stages (5.0 to 5.0 stages)", "partly"),
        ([3.0], "3.0 stages", "partly"),
        ([2.0], "2.0 stages", "not reproduced"),
        ([3.0, 4.0] * 4, "3.5 stages (3.1 to 3.9 stages)", "undecided"),
    ],
)
def test_stages_are_the_same_or_not(counts: list[float], text: str, expected: str) -> None:
    changes = {"published": SHARE, "fair": SHARE, "unit": "stages", "judged_by": "level"}
    claim = parse_claim("some", VALUES | changes | {"value": 4.0, "measure": {"metric": "encoder_stages"}})
    assert (combined(claim, cases(counts)), verdict(claim, cases(counts))) == (text, expected)


def test_stages_are_those_of_the_encoders(tmp_path: Path) -> None:
    (cell,) = Study(Results(tmp_path)).cells("model=tiny_av", "cluster=tiny", "workload=synthetic_av")
    names = [name for name, module in cell.config.model["modules"].items() if module["role"] == "encoder"]
    layout = "; ".join(f"{name} tp1 cp1 pp3 dp1 layers 2/2/2" for name in names) + "; llm tp1 cp1 pp5 dp1"
    assert claims._encoder_stages(cell, layout) == 3.0
    assert claims._encoder_stages(cell, "nan") != claims._encoder_stages(cell, "nan"), "not a number"


def test_a_setting_may_measure_otherwise() -> None:
    claim = claim_with(fair={"measure": {"metric": "core_time_s", "pick_of": "min"}})
    assert (claim.measure.metric, claim.measure.pick_of) == ("iteration_time_s", "mean")
    fair = claim.under(claim.fair)
    assert (fair.measure.metric, fair.measure.pick_of, fair.measure.over) == ("core_time_s", "min", "mean")
    assert claim.under(claim.published) == claim


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
    assert (combined(claim, cases(ratios)), verdict(claim, cases(ratios))) == (text, expected)


def test_a_change_takes_the_place_of_overrides_of_the_same_key() -> None:
    setting = Setting("", ("a=1", "b=2"), ("strategy=x", "c=3"), ("strategy=y",), ("d=1",), ("d=2",))
    assert setting.changed(Change(common=("a=5", "c=6", "e=7"))) == Setting(
        "", ("b=2", "a=5", "c=6", "e=7"), ("strategy=x",), ("strategy=y",), ("d=1",), ("d=2",)
    )
    # What one side changes of all runs, the other keeps.
    assert setting.changed(Change(to=("b=9", "strategy=z"))) == Setting(
        "", ("a=1",), ("b=2", "strategy=x", "c=3"), ("b=9", "strategy=z"), ("d=1",), ("d=2",)
    )
    with pytest.raises(UserError, match="change=d: must be a key other than those of at and against"):
        setting.changed(Change(common=("d=8",)))
    alone = Setting("", ("a=1",), ("b=2",))
    assert alone.changed(Change(of=("a=3",))) == Setting("", (), ("b=2", "a=3"))


def record_times(study: Study, setting: Setting, seconds: Callable[[Cell], float]) -> None:
    """Records with the time of each run; of those whose time is 0 a failure."""
    for sweep in setting.sweeps:
        for cell in study.cells(*sweep):
            record = new_record(cell, "ok" if seconds(cell) else "failed", "told so")
            object.__setattr__(record, "metrics", {"iteration_time_s": seconds(cell)})
            study.results.write(record, None)


def strategy_of(cell: Cell) -> str:
    return str(cell.config.strategy["name"])


def test_seeds_without_a_result_are_left_out_and_counted(tmp_path: Path) -> None:
    common = {"common": [*TINY, "workload=chartqa", "seed=0,1,2"]}
    claim, study = claim_with(common, common), Study(Results(tmp_path))
    record_times(
        study,
        claim.fair,
        lambda cell: 1.5 if strategy_of(cell) == "entrain" else 0.0 if cell.config.seed == 1 else 3.0,
    )
    row = claim_row(claim, study)
    assert row["fair_value"] == "2.00x (2.00 to 2.00x); 1 of 6 runs have no result (seeds left out: 1)"
    assert row["fair_verdict"] == "reproduced"
    assert row["published_verdict"] == f"{claims.NOT_MEASURED}: 3 of 3 runs have no result: not run"


def test_other_choices_and_the_assumption_are_measured_and_told(tmp_path: Path) -> None:
    choices = {"small": {"common": ["global_batch=32"]}, "large": {"to": ["strategy=dip"]}}
    claim = claim_with(
        {"choices": choices},
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
    assert row["published_verdict"] == "reproduced; under other choices not reproduced"
    assert (row["fair_value"], row["fair_verdict"]) == ("1.00x (1.00 to 1.00x)", "not reproduced")
    assert row["assumption"] == "rigid; otherwise, tuned"
    assert (row["otherwise_value"], row["otherwise_verdict"]) == ("1.00x (1.00 to 1.00x)", "not reproduced")
    assert row["other_choices"] == (
        "small: 2.50x (2.50 to 2.50x) (reproduced); large: 1.25x (1.25 to 1.25x) (not reproduced)"
    )
    text = claims_markdown([row])
    assert "| rigid; otherwise, tuned: 1.00x (1.00 to 1.00x) (not reproduced) |" in text
    assert "*Other choices*: small: 2.50x" in text
    # Nothing can be judged without the paper's number.
    assert claim_row(replace(claim, no_source=True), study)["fair_verdict"] == "no source"


def test_a_claim_is_run_measured_judged_and_written(tmp_path: Path) -> None:
    claim, study = claim_with(), Study(Results(tmp_path))
    sweeps = [sweep for setting in claim.settings for sweep in setting.sweeps]
    output = Output("claims", sweeps, lambda study: write_claims([claim], study))
    assert [problem for _, problem in bring_up_to_date([output], study, 0, lambda *_: None)] == [""]
    records = study.results.records()
    assert len(records) == 6
    times = {
        name: [record.metrics["iteration_time_s"] for record in records if record.labels["strategy"] == name]
        for name in ("megatron", "entrain")
    }
    ratios = [slow / fast for slow, fast in zip(times["megatron"], times["entrain"], strict=True)]
    row = claim_row(claim, study)
    assert row["fair_value"].startswith(f"{(ratios[0] * ratios[1]) ** 0.5:.2f}x (")
    assert row["fair_verdict"] == verdict(claim, cases(ratios))
    assert claims_table([row])["fair_verdict"].tolist() == [row["fair_verdict"]]
    text = (tmp_path / "claims.md").read_text()
    assert text == claims_markdown([row])
    assert "| [One is faster than the other](#some) | arXiv:2605.27918, Table 3 | 2.00x |" in text
    # Three strategies, of which both settings run one alike.
    assert text.count("seed=0,1") == 3
    assert (tmp_path / "claims.csv").read_text().startswith("name,claim,paper")


def test_a_claim_whose_cells_have_no_result_is_not_measured_and_says_why(tmp_path: Path) -> None:
    broken = claim_with(fair={"common": [*VALUES["fair"]["common"], "layout.pp=100"]})
    problem = write_claims([broken], Study(Results(tmp_path)))
    assert f"some (fair): {claims.NOT_MEASURED}: 2 of 2 runs have no result: not run" in problem.split("; ")
    assert claims.NOT_MEASURED in (tmp_path / "claims.md").read_text()


def test_markdown_tables_align_and_escape() -> None:
    assert markdown_table(["a", "b"], [["1|2", "x\ny"]], right=["b"]) == "| a | b |\n| --- | ---: |\n| 1\\|2 | x y |\n"


def of_strategy(name: str, *times: float, **changes: Any) -> list[dict[str, Any]]:
    """Runs of a strategy, a seed a time; one that is 0 failed."""
    made = [
        {"iteration_time_s": time, "gap_to_lower_bound": 0.5 - 0.2 * seed} if time else {"status": "failed"}
        for seed, time in enumerate(times)
    ]
    case = {"strategy": name, "model": "tiny", "workload": "coco", "status": "ok", "reason": "told so"} | changes
    return [case | {"seed": seed} | run for seed, run in enumerate(made)]


def test_results_show_means_intervals_gaps_the_best_and_what_failed() -> None:
    data = pd.DataFrame(
        [
            *of_strategy("first", 1.0, 2.0),
            *of_strategy("second", 1.25, 1.25),
            *of_strategy("third", 1.0, 0.0),
            *of_strategy("fourth", 9.0, status="skipped"),
            *of_strategy("fifth", 2.5, 2.5),
        ]
    )
    half = 12.706205 * 0.5
    assert results_markdown(data).splitlines() == [
        "| model, workload | First | Second | Third | Fourth | Fifth |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| Tiny Coco | **1.500 ± {half:.3f}** (40%) | **1.250 ± 0.000** (40%) | 1.000 (50%), 1 of 2 failed | skipped |"
        " 2.500 ± 0.000 (40%) |",
        "",
        "- Third fails at seed 1 on Tiny Coco: told so",
        "- Fourth is skipped at seed 0 on Tiny Coco: told so",
    ]


def test_the_fastest_are_all_that_seeds_cannot_tell_from_the_best() -> None:
    noise = [0.0, 0.3, -0.3, 0.1, -0.1]
    data = pd.DataFrame(
        [
            *of_strategy("slower", *(2.2 + e for e in noise)),
            *of_strategy("best", *(2.0 + e for e in noise)),
            *of_strategy("equal", *(2.05 - e for e in noise)),
            *of_strategy("fails", 1.0, 1.0, 1.0, 1.0, 0.0),
            *of_strategy("alone", 0.0, workload="other"),
        ]
    )
    # Runs in another order are paired all the same.
    for rows in (data, data[::-1]):
        best = {case: found.best for case, found in compared(rows, ["model", "workload"]).items()}
        assert best == {("tiny", "coco"): ["best", "equal"], ("tiny", "other"): []}
