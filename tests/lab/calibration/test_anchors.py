"""Published times: what the committed file holds, how a row becomes a run, and what is refused."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import config_tree
from entrain_bench.lab.calibration.anchors import Anchors, load_anchors, toggled
from entrain_bench.specs.model import ModelSpec

ANCHORS = load_anchors()


def changed(tmp_path: Path, change: Any) -> Anchors:
    """The committed anchors with something changed in their values."""
    values = yaml.safe_load((config_tree() / "anchors.yaml").read_text())
    change(values)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_anchors(path)


def test_every_row_says_where_it_is_from_and_when_it_was_read() -> None:
    for group in {anchor.group for anchor in (*ANCHORS.iterations, *ANCHORS.forwards)}:
        assert "read 2026-" in group.source
        assert group.framework


def test_the_halves_follow_the_rules_stated_in_the_file() -> None:
    h100 = [anchor for anchor in ANCHORS.iterations if anchor.group.device == "h100"]
    sizes = {anchor.group: parameters(anchor.overrides) for anchor in h100}
    halves = {anchor.group: anchor.half for anchor in h100}
    assert all(anchor.half == halves[anchor.group] for anchor in h100)
    in_order = [halves[group] for group in sorted(sizes, key=lambda group: sizes[group])]
    assert in_order == ["fit", "test"] * 3
    a100 = [anchor.half for anchor in ANCHORS.iterations if anchor.group.device == "a100"]
    assert a100 == ["fit", "test"] * 5


def parameters(overrides: tuple[str, ...]) -> int:
    return ModelSpec.from_config(compose(*overrides).model).llm.parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama 3.1 8B", 8.03),
        ("Llama 3.1 70B", 70.6),
        ("GPT-3 175B", 174.6),
        ("Nemotron-4 15B", 15.6),
        ("Nemotron-4 340B", 341.0),
        ("LLaMA 13B, 2048 tokens", 14.0),  # 13.0 with 32,000 words
        ("LLaMA 65B, 2048 tokens", 66.9),  # 65.3 with 32,000 words
    ],
)
def test_models_have_their_published_sizes(name: str, billions: float) -> None:
    first = next(anchor for anchor in ANCHORS.iterations if anchor.group.name == name)
    assert parameters(first.overrides) / 1e9 == pytest.approx(billions, rel=0.004)


def test_a_row_becomes_the_run_of_its_degrees() -> None:
    anchor = next(each for each in ANCHORS.iterations if each.group.name == "Llama 3.1 70B")
    config = compose(*anchor.overrides)
    assert anchor.dp == 2
    assert (config.layout.tp, config.layout.cp, config.layout.dp) == (4, 2, 2)
    assert config.cluster["num_nodes"] * config.cluster["gpus_per_node"] == 64
    assert (config.global_batch, config.microbatch_size, config.workload["text"]) == (128, 1, 8192)
    assert config.strategy["planner"]["virtual_stages"] == 5
    assert (config.framework.tp_overlap, config.framework.p2p) == (0.9375, "overlapped")


def test_all_rows_of_a_group_use_up_their_gpus() -> None:
    for _, rows in groupby(ANCHORS.iterations, key=lambda anchor: anchor.group):
        for anchor in rows:
            own = anchor.settings
            assert anchor.dp * own.tp * own.cp * own.pp == anchor.gpus
            assert anchor.global_batch % (anchor.dp * own.microbatch_size) == 0


def test_another_assumption_takes_the_place_of_a_runs_own() -> None:
    assert toggled(("a=1", "b.c=2"), ("b.c=3", "d=4")) == ("a=1", "b.c=3", "d=4")


def first_row(values: Any) -> Any:
    return values["iterations"][0]["rows"][0]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: first_row(v).update(half="both"), r"mine\.yaml: Llama 3\.1 8B: half=both: must be one of fit, test"),
        (lambda v: first_row(v).update(gpus=12), r"gpus=12: must be a multiple of TP x CP x PP = 2 and of 8"),
        (lambda v: first_row(v).update(published_s=0), r"published_s=0\.0: must be positive"),
        (lambda v: first_row(v).pop("gpus"), r"Llama 3\.1 8B\.gpus: missing"),
        (lambda v: v["iterations"][0]["settings"].update(ep=2), r"settings key=ep: unknown"),
        (lambda v: v["forwards"][0]["rows"][0].update(published_ms=[3, 2]), r"must be the least and the greatest"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        changed(tmp_path, change)
