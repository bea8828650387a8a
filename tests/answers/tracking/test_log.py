"""MLflow shows what the records hold, once, with sweeps nested under a parent that answers."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from mlflow import MlflowClient
from mlflow.entities import Experiment, Run

from entrain_bench.answers.tracking.entries import KEY_TAG, NOTE_TAG, PARENT_TAG, SERIES, SWEEP, VIEW, parameters
from entrain_bench.answers.tracking.local import store_uri
from entrain_bench.answers.tracking.log import SINGLE_RUNS, log_records
from entrain_bench.cli import run_command
from entrain_bench.commands.ui import links
from entrain_bench.records.records import LABELS, METRICS, Record, Results
from entrain_bench.records.time_shares import TIME_SHARES

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.dp=1", "iterations=2"]
# Artifacts of every parent.
TEXTS = {"answer.html", "answer.json", "summary.md", "table.csv"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A store with one run, which tests add others to: creating one takes seconds. Any folder name will do."""
    folder = tmp_path_factory.mktemp("store") / "50% of a#b?"
    assert run_command([*SMALL, f"results_dir='{folder}'"]) == 0
    assert (folder / "mlflow.db").exists()
    return Results(folder)


def some_record(results: Results, **changes: Any) -> Record:
    """A record like that of the store's run."""
    record = next(iter(results.records()))
    labels = {name: changes.pop(name) for name in ("strategy", "seed") if name in changes}
    config: Mapping[str, Any] = record.config
    if "strategy" in labels:
        order = {"megatron": 0, "entrain": 1}.get(labels["strategy"])
        config = {**config, "strategy": {**config["strategy"], "name": labels["strategy"], "display_order": order}}
    config = {**config, "seed": labels.get("seed", config["seed"])}
    time_s = changes.pop("time_s", record.metrics["iteration_time_s"])
    metrics = {**record.metrics, "iteration_time_s": time_s}
    return replace(record, **{"metrics": metrics, "config": config, "labels": {**record.labels, **labels}, **changes})


def contest(results: Results, prefix: str) -> list[Record]:
    """Two strategies at two seeds: one is twice as fast as the baseline at the first, eight times at the second."""
    times = {("megatron", 0): 4.0, ("megatron", 1): 8.0, ("entrain", 0): 2.0, ("entrain", 1): 1.0}
    return [
        some_record(results, key=f"{prefix}{strategy}{seed}", strategy=strategy, seed=seed, time_s=time_s)
        for (strategy, seed), time_s in times.items()
    ]


def experiment_of(results: Results, name: str) -> Experiment:
    experiment = MlflowClient(tracking_uri=store_uri(results)).get_experiment_by_name(name)
    assert experiment is not None
    return experiment


def runs_of(results: Results, name: str) -> dict[str, Run]:
    """Runs of an experiment by their keys, which are all different."""
    client = MlflowClient(tracking_uri=store_uri(results))
    runs: Sequence[Run] = client.search_runs([experiment_of(results, name).experiment_id])
    found = {run.data.tags[KEY_TAG]: run for run in runs}
    assert len(found) == len(runs)
    return found


def artifacts_of(results: Results, run: Run) -> set[str]:
    """Paths of a run's artifacts, found as the server does."""
    address = urlparse(run.info.artifact_uri)
    assert address.scheme == "mlflow-artifacts"
    folder = results.root / "mlflow-artifacts" / address.path.lstrip("/")
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.wide
def test_each_record_is_one_run_nested_under_its_sweep_with_all_it_holds(tmp_path: Path) -> None:
    swept = ["strategy=megatron,entrain", "seed=0,1"]
    sweep = [*SMALL, f"results_dir={tmp_path}", "--multirun", *swept]
    assert run_command(sweep) == 0
    assert run_command(sweep) == 0
    assert run_command([*SMALL, f"results_dir={tmp_path}", "seed=7"]) == 0
    results = Results(tmp_path)
    runs = runs_of(results, " ".join([*SMALL, *swept]))
    parent = runs.pop(SWEEP)
    single = runs_of(results, SINGLE_RUNS)
    assert len(runs) == 4
    assert len(single) == 1
    assert set(runs) | set(single) == {record.key for record in results.records()}
    assert {run.info.status for run in (parent, *runs.values())} == {"FINISHED"}
    assert {run.data.tags[PARENT_TAG] for run in runs.values()} == {parent.info.run_id}
    assert {run.info.run_name for run in runs.values()} == {
        f"{strategy} seed {seed}" for strategy in ("megatron", "entrain") for seed in (0, 1)
    }
    pictures = {"iteration_time.png", "ranks/megatron.png", "ranks/entrain.png"}
    assert artifacts_of(results, parent) == {*TEXTS, *pictures}
    for key, run in (runs | single).items():
        record = json.loads(results.record_path(key).read_text())
        headline = {name: value for name, value in run.data.metrics.items() if not name.startswith(SERIES)}
        assert len(headline.keys() - TIME_SHARES) <= 20
        assert headline.items() >= {name: record["metrics"][name] for name in METRICS}.items()
        assert {f"{SERIES}/{name}" for row in record["iterations"] for name in row} == set(run.data.metrics) - set(
            headline
        )
        assert 20 <= len(run.data.params) <= 30
        assert run.data.params["workload"] == record["labels"]["workload"]
        assert "dp=1, pp=planner's choice" in run.data.params["requested"]
        assert run.data.params["chosen.llm"] == record["layout"]["llm"]
        assert not [name for name in run.data.params if "_target_" in name or "label" in name]
        assert run.data.tags["status"] == record["status"]
        assert run.data.tags["code_version"] == record["code_version"]
        assert run.data.tags["host"] == record["host"]
        assert run.data.tags["executor"] == "simulate"
        assert run.data.tags["cost_source"] in ("derived", "fitted")
        assert run.data.tags["current"] == "yes"
        traces = {"chrome_trace.json"} if key in single else set()
        assert artifacts_of(results, run) == {"record.json", *traces}


def test_a_sweep_says_who_is_fastest_and_by_how_much(store: Results, tmp_path: Path) -> None:
    figure = tmp_path / "contest.png"
    figure.write_bytes(b"drawn")
    assert log_records(store, contest(store, "a"), "contest", files=[figure]) == 4
    runs = runs_of(store, "contest")
    parent = runs.pop(SWEEP)
    assert parent.data.metrics["speedup/entrain"] == pytest.approx(4.0), "geometric mean of 2 and 8"
    assert parent.data.metrics["best_speedup"] == pytest.approx(4.0)
    assert parent.data.tags["best_strategy"] == "entrain"
    assert parent.data.tags["baseline"] == "megatron"
    assert "2 strategies (megatron and entrain)" in parent.data.tags["sweep"]
    assert artifacts_of(store, parent) == {*TEXTS, "figures/contest.png"}
    speedups = {run.info.run_name: run.data.metrics["answer/speedup_over_megatron"] for run in runs.values()}
    expected = {"megatron seed 0": 1.0, "megatron seed 1": 1.0, "entrain seed 0": 2.0, "entrain seed 1": 8.0}
    assert speedups == pytest.approx(expected)
    experiment = experiment_of(store, "contest")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{VIEW}"])
    assert view["selectedColumns"][:2] == ["metrics.`iteration_time_s`", "metrics.`answer/speedup_over_megatron`"]
    assert experiment.tags[NOTE_TAG] == parent.data.tags[NOTE_TAG]
    assert "entrain is the fastest of 2 of 22 strategies (4.00x (" in experiment.tags[NOTE_TAG]
    assert "Slower, though not significantly: megatron." in experiment.tags[NOTE_TAG], "two seeds exclude nothing"
    assert "| all | 6.000 | **1.500** |" in experiment.tags[NOTE_TAG]


def test_a_grown_sweep_keeps_its_parent_and_brings_speedups_up_to_date(store: Results) -> None:
    records = contest(store, "b")
    assert log_records(store, records[2:], "grown") == 2
    before = runs_of(store, "grown")
    assert "answer/speedup_over_megatron" not in before["bentrain0"].data.metrics
    assert log_records(store, records, "grown") == 4
    assert log_records(store, records, "grown") == 0
    after = runs_of(store, "grown")
    assert after["bentrain0"].data.metrics["answer/speedup_over_megatron"] == 2.0
    assert after[SWEEP].info.run_id == before[SWEEP].info.run_id
    assert after[SWEEP].data.metrics["num_runs"] == 4


def test_runs_of_other_code_are_told_apart_until_that_code_is_back(store: Results) -> None:
    old, new = contest(store, "c"), contest(store, "d")
    log_records(store, old, "code")
    assert log_records(store, [*old[:2], *new[2:]], "code") == 2
    current = {key: run.data.tags["current"] for key, run in runs_of(store, "code").items()}
    yes = dict.fromkeys((SWEEP, "cmegatron0", "cmegatron1", "dentrain0", "dentrain1"), "yes")
    assert current == yes | {"centrain0": "no", "centrain1": "no"}
    assert log_records(store, old, "code") == 0
    current = {key: run.data.tags["current"] for key, run in runs_of(store, "code").items()}
    assert {key for key, value in current.items() if value == "no"} == {"dentrain0", "dentrain1"}


def test_a_single_run_of_other_code_is_told_apart_from_its_successor_only(store: Results) -> None:
    runs = [("e1", 11), ("e2", 12), ("e3", 11)]
    for key, seed in runs:
        assert log_records(store, [some_record(store, key=key, seed=seed)], f"seed={seed}") == 1
    found = runs_of(store, SINGLE_RUNS)
    assert {key: found[key].data.tags["current"] for key, _ in runs} == {"e1": "no", "e2": "yes", "e3": "yes"}
    assert found["e3"].info.run_name == "seed=11"


def test_every_iteration_is_a_step(store: Results) -> None:
    losses = [3.0, 2.5, 2.0]
    rows = tuple({"loss": loss} for loss in losses)
    assert log_records(store, [some_record(store, key="1" * 16, iterations=rows * 400)], "losses") == 1
    client = MlflowClient(tracking_uri=store_uri(store))
    run = runs_of(store, SINGLE_RUNS)["1" * 16]
    assert run.data.metrics["values_by_iteration/loss"] == losses[-1]
    history = client.get_metric_history(run.info.run_id, "values_by_iteration/loss")
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == losses * 400


def test_of_more_than_thirty_parameters_the_usual_ones_are_left_out(store: Results) -> None:
    record = some_record(store)
    config = {**record.config, "freeze": ["vision"], "tp_overlap": 0.5}
    config["speed"] = {**config["speed"], "gemm": 0.5}
    layout = dict.fromkeys(("vision", "audio", "llm", "decoder", "microbatches"), "tp1")
    shown = parameters(replace(record, config=config, layout=layout))
    assert len(shown) == 30
    assert shown["freeze"] == "vision"
    assert shown["speed"] == "gemm=0.5"
    assert shown["tp_overlap"] == "0.5"
    assert {*LABELS, "planner", "requested", "strategy_parameters", "global_batch"} < {*shown}
    assert {f"chosen.{name}" for name in layout} < {*shown}
    # 6 labels, 3 parts, the requested degrees, 2 texts, 5 of the layout and 24 settings are 41.
    left_out = {
        "distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "align_param_gather",
        "p2p",
        "sequence_parallel",
        "encoder_cp",
        "cp_split",
        "head_tokens",
        "encoder_sp",
        "encoder_optimizers",
        "recompute_granularity",
        "grad_dtype",
        "cross_entropy",
        "constants",
    }
    assert {name for name, value in record.settings.items() if value not in ("", None)} - {*shown} == left_out


def test_numbers_that_are_none_are_logged_as_mlflow_stores_them(store: Results) -> None:
    record = some_record(store, key="f" * 16, time_s=float("nan"))
    log_records(store, [replace(record, metrics={**record.metrics, "mfu": float("inf")})], "odd")
    metrics = runs_of(store, SINGLE_RUNS)["f" * 16].data.metrics
    assert metrics["iteration_time_s"] != metrics["iteration_time_s"]
    assert metrics["mfu"] > 1e308


def test_a_run_that_failed_and_then_succeeded_shows_its_success(store: Results) -> None:
    record = some_record(store)
    failed = replace(record, key="0" * 16, status="failed", reason="disk full", metrics={})
    assert log_records(store, [failed], "again") == 1
    assert runs_of(store, SINGLE_RUNS)[failed.key].info.status == "FAILED"
    assert log_records(store, [replace(failed, status="ok", reason="", metrics=record.metrics)], "again") == 1
    run = runs_of(store, SINGLE_RUNS)[failed.key]
    assert run.info.status == "FINISHED"
    assert "reason" not in run.data.tags
    assert run.data.metrics.items() >= dict(record.metrics).items()


@pytest.mark.wide
def test_a_run_deleted_on_the_page_is_logged_again(store: Results) -> None:
    records = contest(store, "g")
    log_records(store, records, "deleted")
    MlflowClient(tracking_uri=store_uri(store)).delete_run(runs_of(store, "deleted")["gentrain0"].info.run_id)
    assert log_records(store, records, "deleted") == 1
    assert len(runs_of(store, "deleted")) == 5
    MlflowClient(tracking_uri=store_uri(store)).delete_experiment(experiment_of(store, "deleted").experiment_id)
    log_records(store, records, "deleted")
    assert len(runs_of(store, "deleted")) == 5


@pytest.mark.wide
def test_a_moved_folder_has_its_artifacts_and_links(store: Results, tmp_path: Path) -> None:
    log_records(store, contest(store, "h"), "moved")
    moved = Results(tmp_path / "elsewhere")
    shutil.copytree(store.root, moved.root)
    assert artifacts_of(moved, runs_of(moved, "moved")[SWEEP]) == TEXTS
    lines = links(moved, "http://127.0.0.1:5000")
    experiment, parent = experiment_of(moved, "moved"), runs_of(moved, "moved")[SWEEP]
    page = f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs"
    at = lines.index("moved")
    answer = f"{page}/{parent.info.run_id}/artifacts/answer.html?workflowType=machine_learning"
    assert lines[at + 1].split() == ["answer:", answer]
    assert lines[at + 2].split()[1] == f"{page}?workflowType=machine_learning&viewStateShareKey={VIEW}"
    assert lines[-1] == "all experiments: http://127.0.0.1:5000/#/experiments?workflowType=machine_learning"


def test_nothing_logged_has_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["ui", f"results_dir={tmp_path}"]) == 2
    assert "contains no runs" in capsys.readouterr().err


def test_runs_are_recorded_even_if_mlflow_breaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is not a database")
    assert run_command([*SMALL, f"results_dir={tmp_path}"]) == 0
    error = capsys.readouterr().err
    assert "could not be logged to MLflow" in error
    assert "delete it" in error
    assert len(Results(tmp_path).records()) == 1


def test_a_run_names_its_dataset_and_takes_as_long_as_its_iterations(store: Results) -> None:
    record = some_record(store, key="d" * 16, made_at="2026-11-23T10:00:00+00:00")
    assert log_records(store, [record], "dataset") == 1
    run = runs_of(store, SINGLE_RUNS)[record.key]
    (used,) = run.inputs.dataset_inputs
    assert used.dataset.name == record.labels["workload"]
    assert json.loads(used.dataset.source) == record.config["workload"]
    spent_s = sum(row["iteration_time_s"] for row in record.iterations)
    assert run.info.start_time == 1_795_428_000_000
    assert run.info.end_time - run.info.start_time == round(1e3 * spent_s) > 0
    # The same samples are the same dataset, others are another one; what cannot be read now is none.
    assert log_records(store, [replace(record, key="e" * 16)], "dataset") == 1
    config = {**record.config["workload"], "label": "Another"}
    assert log_records(store, [replace(record, key="a" * 16, config={**record.config, "workload": config})], "x") == 1
    gone = {**record.config["workload"], "_target_": "os.path.Gone"}
    assert log_records(store, [replace(record, key="b" * 16, config={**record.config, "workload": gone})], "x") == 1
    runs = runs_of(store, SINGLE_RUNS)
    digests = [[each.dataset.digest for each in runs[key * 16].inputs.dataset_inputs] for key in "deab"]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == []


def test_runs_of_several_jobs_are_grouped_by_case(store: Results) -> None:
    records = contest(store, "k")
    others = [
        replace(one, key=f"{one.key}x", labels={**one.labels, "workload": "other"}) for one in contest(store, "l")
    ]
    log_records(store, records, "one job")
    log_records(store, [*records, *others], "two jobs")
    views = {
        name: json.loads(experiment_of(store, name).tags[f"mlflow.sharedViewState.{VIEW}"])
        for name in ("one job", "two jobs")
    }
    assert "groupBy" not in views["one job"]
    assert views["two jobs"]["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "case"}]
    cases = {run.data.tags.get("case") for key, run in runs_of(store, "two jobs").items() if key != SWEEP}
    assert cases == {records[0].labels["workload"], "other"}
