"""Which classes configurations may name, and what plans may set: refused by the field, before anything is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config import targets
from entrain_bench.config.given import check_of_job
from entrain_bench.config.targets import check_targets, instantiate, is_trusted, trust
from entrain_bench_workloads.mixture import MixtureWorkload


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(targets, "_trusted", [])
    (tmp_path / "their_module.py").write_text("from fractions import Fraction as Theirs\n")
    return tmp_path


def test_a_folder_that_is_named_is_trusted_and_nothing_is_imported_to_find_out(folder: Path) -> None:
    assert not is_trusted("their_module.Theirs")
    trust(folder)
    assert is_trusted("their_module.Theirs")
    assert "their_module" not in sys.modules


def test_a_module_that_is_imported_already_is_not_that_of_a_folder(folder: Path) -> None:
    (folder / "fractions.py").write_text("class Fraction: pass\n")
    trust(folder)
    assert not is_trusted("fractions.Fraction")


@pytest.mark.parametrize(
    ("node", "field"),
    [
        ({"_target_": "os.system"}, "workload._target_=os.system"),
        ({"a": [{"b": {"_target_": "os.system"}}]}, "workload.a.0.b._target_=os.system"),
        ({"_target_": ["os", "system"]}, "workload._target_=['os', 'system']"),
        ({"a": {"_partial_": True}}, "workload.a._partial_=True"),
        ({"a": {"_args_": []}}, "workload.a._args_=[]"),
    ],
)
def test_others_are_refused_however_deep(node: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        check_targets({"workload": node})
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize("name", ["run.parallel.pickle.loads", "records.code.Path", "base.files.write_atomically"])
def test_what_the_suite_imports_or_calls_is_no_class_of_it(name: str) -> None:
    with pytest.raises(UserError, match="must be a class that can be imported"):
        instantiate({"_target_": f"entrain_bench.{name}"}, "harness", "execute")


def test_nested_classes_of_the_suite_are_built_and_checked() -> None:
    text = {"_target_": "entrain_bench_workloads.trace.TraceWorkload", "name": "one", "path": "chartqa_test.parquet"}
    target = "entrain_bench_workloads.mixture.MixtureWorkload"
    node = {"_target_": target, "name": "both", "weights": {"a": 1}, "components": {"a": text}}
    found = instantiate(node, "workload", "source")
    assert isinstance(found, MixtureWorkload)
    assert type(found.components["a"]).__name__ == "TraceWorkload"
    with pytest.raises(UserError, match=r"workload\.components\.a key=pth: unknown"):
        instantiate(node | {"components": {"a": text | {"pth": "x"}}}, "workload", "source")


@pytest.mark.parametrize(
    "text",
    [
        "layout.tp=2",
        "iterations=2",
        "freeze=[vision]",
        "cluster/device=h100",
        "cluster.tiers=[{name: network, bandwidth_bytes_per_s: 6.0e9, latency_s: 14.0e-6}]",
        "workload.path='a folder/mine.parquet'",
        "+workload.on_overlong=drop",
        "model/module@model.modules.llm=llama3_3b",
    ],
)
def test_a_plan_holds_values_of_a_job(text: str) -> None:
    check_of_job("job.overrides", text)


@pytest.mark.parametrize(
    "text",
    [
        "results_dir=x",
        "mlflow_uri=http://x",
        "harness.dtype=float32",
        "hydra/launcher=joblib",
        "+x=1",
        "+seed=1",
        "+workload._target_=x.Y",
        "+workload.x={_target_:x.Y}",
        "+workload/x=y",
        "+strategy.planner.x=1",
        "~workload.name",
        "workload.name=${oc.env:HOME}",
        "workload.path=http://x/y.parquet",
        "workload.components={a:{_target_:x.Y}}",
        "cluster/device=../h100",
        "model/module@hydra.launcher=llama3_3b",
        "seed=1,2",
    ],
)
def test_a_plan_sets_nothing_else(text: str) -> None:
    with pytest.raises(UserError, match=r"^job\.overrides="):
        check_of_job("job.overrides", text)
