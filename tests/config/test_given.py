"""Models and clusters that no YAML states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.config.compose import Composer, compose
from entrain_bench.config.given import check_model, with_data
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.model import ModelSpec
from entrain_bench_workloads.trace import PACKAGED_TRACES
from support.specs import load

CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def sizes(name: str) -> tuple[int, int, list[int]]:
    cluster = ClusterSpec.from_config(compose(f"cluster={name}").cluster)
    return cluster.num_nodes, cluster.gpus_per_node, [tier.num_ranks for tier in cluster.tiers]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("16xh100", (2, 8, [8, 16])),
        ("h100x16", (2, 8, [8, 16])),
        ("8xa100-80g", (1, 8, [8, 8])),
        ("8xh100-sxm-80gb", (1, 8, [8, 8])),
        ("4xh100", (1, 4, [4, 4])),
        ("1xh200", (1, 1, [1])),
        ("8xa40", (2, 4, [2, 4, 8])),
        ("2xa40", (1, 2, [2, 2])),
        ("3xa40", (1, 3, [2, 3, 3])),
        ("4x4090", (1, 4, [4, 4])),
        ("8xRTX-4090", (1, 8, [8, 8])),
        ("8xh100_80gb_hbm3", (1, 8, [8, 8])),
        ("16xmi300x", (2, 8, [8, 16])),
        ("mi300xx16", (2, 8, [8, 16])),
        ("144xgb200", (2, 72, [72, 144])),
        ("16xgb200-nvl72", (1, 16, [16, 16])),
        ("8xrtx6000-ada", (1, 8, [8, 8])),
        ("2xl40s-48gb", (1, 2, [2, 2])),
    ],
)
def test_counted_clusters(name: str, expected: tuple[int, int, list[int]]) -> None:
    assert sizes(name) == expected


def test_a_counted_cluster_is_the_choice_of_that_size() -> None:
    assert compose("cluster=64xh100").cluster == load("cluster", "h100x64")
    assert compose("cluster=h100x8").cluster == compose("cluster=8xh100").cluster == load("cluster", "h100x8")
    two, eight = compose("cluster=16xh100").cluster, compose("cluster=h100x64").cluster
    assert two == {**eight, "name": "h100x16", "num_nodes": 2}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("12xh100", "cluster=12xh100: must be from 1 to 8 GPUs, or a multiple of 8"),
        ("0xh100", "cluster=0xh100: must be"),
        ("8xa100-40g", "cluster=8xa100-40g: a100 has no variant 40g"),
        ("8xh100-pcie", "cluster=8xh100-pcie: h100 has no variant pcie"),
        ("8xb100", "cluster=8xb100: unknown. All: entrain-bench ls clusters. Any number of GPUs: "),
        ("8xb200-192gb", "cluster=8xb200-192gb: b200 has no variant 192gb"),
        ("999999999xh100", "cluster.num_nodes|cluster=999999999xh100"),
    ],
)
def test_clusters_that_are_not_known(name: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        ClusterSpec.from_config(compose(f"cluster={name}").cluster)


@pytest.mark.parametrize(
    ("own", "gpus", "nodes"),
    [
        ("defaults:\n  - node: hopper\n  - device: h200\n  - _self_\nname: z1x8\nnum_nodes: 1\n", 24, 3),
        # Another cluster's YAML with a memory of its own; 2 GPUs are a part of a node.
        ("defaults:\n  - a100x8\n  - _self_\nname: z1x8\ndevice:\n  memory_bytes: 42297524224\n", 32, 4),
        ("defaults:\n  - a100x8\n  - _self_\nname: z1x8\n", 2, 1),
    ],
)
def test_clusters_of_the_users_own_device(own: str, gpus: int, nodes: int, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "z1x8.yaml").write_text(own)
    cluster = Composer(str(tmp_path)).run([f"cluster={gpus}xz1"]).cluster
    assert (cluster["name"], cluster["num_nodes"]) == (f"z1x{gpus}", nodes)
    assert cluster["device"]["memory_bytes"] == 42297524224 or "memory_bytes" not in own


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def llm(config: Any) -> Any:
    return ModelSpec.from_config(config.model).llm.config


def test_a_model_that_no_yaml_states(folder: Path) -> None:
    config = compose(f"model={folder}", "cluster=8xh100", "seed=3")
    assert config.model["name"] == str(folder)
    assert config.seed == 3
    assert llm(config).hidden_size == 64
    changed = compose(f"model=hf:{folder}", "model.modules.llm.num_layers=5")
    assert llm(changed).num_layers == 5
    assert changed.model["name"] == f"hf:{folder}"


def test_a_changed_file_is_read_again(folder: Path) -> None:
    composer = Composer()
    cells = composer.sweep([f"model={folder}", "seed=0,1"]).cells
    assert [llm(composer.run(cell)).num_layers for cell in cells] == [2, 2]
    composer.save()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 7}))
    again = Composer()
    again.sweep([f"model={folder}", "seed=0,1"])
    assert llm(again.run(cells[0])).num_layers == 7


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.modules.llm.depth=3", r"model\.modules\.llm\.depth=3: unknown key"),
        ("model/tokens=llavaov", "model/tokens=llavaov: Could not override"),
    ],
)
def test_what_cannot_be_combined_with_a_given_model(override: str, line: str, folder: Path) -> None:
    with pytest.raises(UserError, match=line):
        compose(f"model={folder}", override)


def test_data_stands_for_a_trace() -> None:
    assert with_data(["data=./my data.parquet", "seed=1"]) == (
        "workload=trace",
        "workload.path=./my data.parquet",
        "seed=1",
    )
    assert with_data(["data=a.parquet,b.parquet"])[1] == "workload.path=a.parquet,b.parquet"
    assert with_data(["workload=chartqa"]) == ("workload=chartqa",)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data=x.jsonl"], r"data=x\.jsonl: must be a shape trace.*entrain-bench trace source=NAME"),
        (["data=x.parquet,y.tar"], "must be a shape trace"),
        (["data=x.parquet", "workload=chartqa"], "means workload=trace .*. Leave workload=chartqa out"),
        (["workload.path=y.parquet", "data=x.parquet"], "Leave workload.path=y.parquet out"),
    ],
)
def test_data_that_is_no_trace(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        with_data(overrides)


def test_plans_name_given_models_and_nothing_else() -> None:
    for model in ("hf:Qwen/Qwen3-VL-8B", "hf:Qwen/Qwen3-VL-8B@v1", "/models/a_b-c.d/config.json", "./x"):
        check_model(model)
    for model in ("hf:a/b,c/d", "hf:a/b seed=1", "hf:${oc.env:HOME}", "glob(*)", "hf:[a/b]", "http://x/y"):
        with pytest.raises(UserError, match=r"job\.model"):
            check_model(model)


@pytest.mark.wide
def test_a_job_without_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision = {"model_type": "clip_vision_model", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision["intermediate_size"] = 256
    model = {
        "model_type": "llava_next",
        "vision_config": {**vision, "patch_size": 14},
        "text_config": {**CONFIG, "max_position_embeddings": 8192},
        "image_grid_pinpoints": [[336, 672], [672, 336]],
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 336}}))
    trace = PACKAGED_TRACES / "chartqa_test_by_image.parquet"
    job = [f"model=hf:{tmp_path}", f"data={trace}", "cluster=4xh100", "layout.tp=1", "layout.dp=2", "global_batch=16"]
    arguments = [*job, "strategy=megatron", f"results_dir={tmp_path}/results", "mlflow=false"]
    assert run_command(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"model hf:{tmp_path}, cluster h100x4" in shown
    assert run_command(arguments) == 0
    assert "finished earlier" in capsys.readouterr().err
    assert run_command(["recommend", *arguments, "seconds=0.1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("In a framework, unmodified: megatron in Megatron-LM\n")
    assert "harness=train" not in said.err
    (found,) = (tmp_path / "results" / "recommended").glob("*-framework.yaml")
    plan = f"plan={found}"
    assert run_command([plan, f"results_dir={tmp_path}/results", "mlflow=false"]) == 0
    assert f"model hf:{tmp_path}, cluster h100x4" in " ".join(capsys.readouterr().out.split())
