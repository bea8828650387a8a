"""Sweeps in words: names carry what was swept, and the answer says who is fastest, by how much, and what failed."""

from typing import Any

import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.tracking.entries import CONFIGURATION_TAG, MAIN, MAX_DETAILED, clean, entries_of
from entrain_bench.answers.tracking.words import describe_sweep, description, shortened, summary_markdown, sweep_name
from entrain_bench.commands.outputs import drawn_from, experiments_of, outputs
from entrain_bench.records.records import Record, Results
from support.records import record


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "defaults"),
        (["results_dir=/x", "mlflow=false", "mlflow_uri=http://h", "hydra/launcher=joblib"], "defaults"),
        (["figure=robustness", "results_dir=/x"], "robustness"),
        (["figure=robustness", "seed=0"], "figure=robustness seed=0"),
        (["strategy=a,b", "seed=0,1"], "strategy=a,b seed=0,1"),
    ],
)
def test_a_sweep_is_called_after_its_figure_or_its_overrides(overrides: list[str], name: str) -> None:
    assert sweep_name(overrides) == name


def test_long_names_differ_where_the_sweeps_do() -> None:
    long = [f"strategy={'x' * 400}"]
    names = {sweep_name([*long, "seed=0"]), sweep_name([*long, "seed=1"])}
    assert len(names) == 2
    assert max(map(len, names)) < 200


def test_names_carry_what_was_swept_and_nothing_else() -> None:
    records = [
        record("first", 1.0, workload=workload, own={"trials": trials}, global_batch=batch, iterations=4)
        for workload in ("text", "video")
        for trials in (0, 8)
        for batch in (16, 32)
    ]
    names = [point.name for point in Answer.of(records).points()]
    assert len(set(names)) == len(names)
    assert {"first trials=0 text global_batch=16 seed 0", "first trials=8 video global_batch=32 seed 0"} <= {*names}


def test_a_part_is_named_by_its_class() -> None:
    parts = [record("first", 1.0, own={"planner": {"_target_": f"some.module.{name}"}}) for name in ("Old", "New")]
    assert [point.name for point in Answer.of(parts).points()] == [
        "first planner=New seed 0",
        "first planner=Old seed 0",
    ]


def test_speedups_are_of_the_same_job_and_seed() -> None:
    times = {("first", "text", 0): 4.0, ("first", "text", 1): 6.0, ("first", "video", 0): 9.0}
    times |= {("second", "text", 0): 2.0, ("second", "text", 1): 1.0, ("third", "video", 0): 18.0}
    records = [record(strategy, time_s, seed, workload) for (strategy, workload, seed), time_s in times.items()]
    found = Answer.of(records)
    assert found.baseline == "first"
    gains = {point.record.key: point.gain for point in found.points()}
    assert [gains[record.key] for record in records] == [1.0, 1.0, 1.0, 2.0, 6.0, 0.5]
    assert found.fastest == "second"
    assert {*found.overall} == {"first"}, "the others lack a case"
    both = Answer.of([one for one in records if one.labels["workload"] == "text"])
    assert {name: each.speedup.mean for name, each in both.overall.items()} == pytest.approx(
        {"second": 12**0.5, "first": 1.0}
    )


@pytest.mark.parametrize(
    "records",
    [
        [record("second", 1.0), record("second", 1.0, seed=1)],
        [record("first", 1.0, own={"trials": trials}) for trials in (0, 8)],
    ],
)
def test_a_single_strategy_is_not_compared_with_itself(records: list[Record]) -> None:
    found = Answer.of(records)
    assert not found.baseline
    assert not found.overall
    assert all(point.gain is None for point in found.points())


def test_variants_are_compared_with_the_baseline_of_the_same_parameters() -> None:
    times = {("first", 0): 8.0, ("first", 8): 6.0, ("second", 0): 4.0, ("second", 8): 1.0}
    records = [record(name, time_s, own={"trials": trials}) for (name, trials), time_s in times.items()]
    gains = {point.name: point.gain for point in Answer.of(records).points()}
    assert gains["second trials=0 seed 0"] == 2.0
    assert gains["second trials=8 seed 0"] == 6.0


def test_a_large_sweep_states_once_what_its_runs_share(tmp_path: Any) -> None:
    few = [record(name, 2.0, seed) for name in ("first", "second") for seed in range(MAX_DETAILED // 2)]
    parent, *detailed = entries_of(Results(tmp_path), few, "few")
    assert not parent.params
    assert all({"model", "seed"} <= entry.params.keys() and CONFIGURATION_TAG in entry.tags for entry in detailed)
    parent, *runs = entries_of(Results(tmp_path), [*few, record("second", 2.0, MAX_DETAILED)], "many")
    assert {"model": "m", "workload": "text"}.items() <= parent.params.items()
    slim = {run.key: run for run in runs}
    for entry in detailed:
        run = slim[entry.key]
        assert {*run.params} == {"strategy", "seed"}
        assert not {*run.tags} & {*parent.tags, CONFIGURATION_TAG}
        # Nothing of the texts is lost, and nothing is stated twice.
        texts = {name: text for name, text in entry.params.items() if not name.endswith("_parameters")}
        assert {**parent.params, **run.params} == texts
        assert {*run.metrics} <= {*MAIN, *(name for name in entry.metrics if name.startswith("answer/"))}


def test_the_summary_answers() -> None:
    records = [record("first", 4.0, seed) for seed in range(3)] + [record("second", 2.0, seed) for seed in range(3)]
    records += [record("third", 1.0), record("third", None, seed=1), record("third", 1.0, seed=2)]
    text = summary_markdown("mine", Answer.of(records), "results")
    assert (
        "3 strategies (first, second and third), workload text, model m, cluster c, harness h, 3 seeds (0, 1 and 2)"
    ) in text
    assert "8 runs ok" in text
    assert text.startswith("second is the fastest of 3 of 25 strategies (2.00x (2.00 to 2.00) over first).")
    assert "third cannot win, for it has no result at seed 1; its speedup over the fastest is 2.00x at 2 other" in text
    assert "| all | 4.000 | **2.000** | 1.000 (2 of 3 seeds) |" in text
    assert "- failed: third, 1 of 3 runs (seed 1): out of luck" in text
    assert "- `entrain-bench --multirun strategy=first,second,third workload=text seed=0,1,2`" in text


def test_a_description_is_a_sentence_and_a_table() -> None:
    records = [
        record(name, time_s, seed, workload=f"w{place}")
        for place in range(12)
        for name, time_s in (("first", 4.0), ("second", 2.0), ("third", 1.9))
        for seed in range(2)
    ]
    text = description(Answer.of(records))
    said, table = text.split("\n\n")[0], text.count("\n| w")
    assert said.startswith("third is the fastest of 3 of 25 strategies in all 12 cases (2.11x to 2.11x over first).")
    assert len(said) < 250
    assert table == 8
    assert "\n4 more cases in table.csv.\n" in text
    assert "\nSpeedup over first, " in text
    assert "Run again" not in text


def test_words_stay_few_however_many_runs_there_are() -> None:
    records = [record("first", None, seed, workload=f"w{seed}") for seed in range(300)]
    assert len(describe_sweep(records)) < 300
    assert "and 295 more" in summary_markdown("mine", Answer.of(records), "results")


def test_names_are_what_mlflow_takes() -> None:
    assert clean("speedup/first trials=8, [a]") == "speedup/first trials_8_ _a_"


def test_outputs_of_one_sweep_share_its_experiment_and_their_figures(tmp_path: Any) -> None:
    made = outputs(["iteration_time", "robustness", "results", "claims"])
    experiments = [[*experiments_of(output)] for output in made]
    # A document of two figures is in the experiment of each; sweeps that no figure has are in its own.
    shared = ["iteration_time", "entrain_setting", "results"]
    assert experiments == [["iteration_time"], ["robustness"], shared, ["claims"]]
    assert experiments_of(made[2])["entrain_setting"] == [("figure=entrain_setting",)]
    results = Results(tmp_path)
    for output in made:
        for path in output.committed:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
    assert {file.stem for file in drawn_from(made[:3], "iteration_time", results)} == {"iteration_time", "results"}
    assert {file.stem for file in drawn_from(made[:3], "entrain_setting", results)} == {"results"}


def test_names_for_files_stay_short_and_apart() -> None:
    long = "assigner_" * 60
    names = [shortened(f"{long}{end}") for end in "ab"]
    assert max(map(len, names)) < 200
    assert names[0] != names[1]
    assert shortened("entrain") == "entrain"
