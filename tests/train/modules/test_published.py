"""Stages filled with the weights of Hugging Face's models compute what those compute: outputs and all gradients."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train.modules.packing import StageGroups
from support.train.names import expected_shapes, hub_name
from support.train.published import CASES, PICTURES, module_errors, qwen25vl, spec_of

TOLERANCE = 1e-4


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_a_module_equals_the_published_one(alone: StageGroups, tmp_path: Path, case: str) -> None:
    found = module_errors(case, tmp_path, alone)
    assert len(found) > 20
    assert max(found.values()) < TOLERANCE, found


def test_qwen25vl_equals_the_published_one_from_pixels_to_loss(alone: StageGroups, tmp_path: Path) -> None:
    found = qwen25vl(tmp_path, alone)
    assert len(found) > 80
    assert max(found.values()) < TOLERANCE, found


# What each architecture's numbers depend on, done wrong.
FAULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen25", "llm", {"rope_theta": 500_000.0}),
    ("qwen25", "llm", {"norm_epsilon": 1e-3}),
    ("llama31", "llm", {"rope_scaling": None}),
    ("qwen3_moe", "llm", {"rope_theta": 1e4}),
    ("qwen25vl_vision", "vision", {"window_tokens": 64}),
    ("qwen25vl_vision", "vision", {"full_attention_layers": [1]}),
    ("siglip", "vision", {"activation": "gelu"}),
    ("whisper", "audio", {"norm_epsilon": 1e-3}),
]


@pytest.mark.wide
@pytest.mark.parametrize(("case", "name", "changes"), FAULTS)
def test_planted_faults_show(
    alone: StageGroups, tmp_path: Path, case: str, name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CASES[case]()
    config = replace(original.spec.module(name).config, **changes)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    others = {m.name: {f.name: getattr(m.config, f.name) for f in fields(m.config)} for m in original.spec.modules}
    monkeypatch.setitem(CASES, case, lambda: replace(original, spec=spec_of(**others | {name: values})))
    found = module_errors(case, tmp_path, alone)
    assert found["output"] > TOLERANCE, found["output"]


def test_unknown_grids_are_not_the_published_ones(alone: StageGroups, tmp_path: Path) -> None:
    """A grid of 4 x 6 patches and one of 10 x 8 are no near-squares."""
    with mock.patch("support.train.published.PICTURES", replace(PICTURES, grids=())):
        assert module_errors("qwen25vl_vision", tmp_path, alone)["output"] > TOLERANCE


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "text", "total"),
    [
        # config.json of Qwen/Qwen2.5-VL-3B-Instruct and -7B-Instruct, read 2026-11.
        ("3b", (2048, 36, 16, 2, 11008, 151936, True), 3_754_622_976),
        ("7b", (3584, 28, 28, 4, 18944, 152064, False), 8_292_166_656),
    ],
)
def test_published_sizes_have_the_tensors_of_the_published_model(name: str, text: tuple[int, ...], total: int) -> None:
    """Names and shapes are those of the model that ``transformers`` builds of the published configuration."""
    width, layers, heads, groups, wide, words, tied = text
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "intermediate_size": wide,
            "vocab_size": words,
            "tie_word_embeddings": bool(tied),
        },
        vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": width},
        tie_word_embeddings=bool(tied),
    )
    with torch.device("meta"):
        published = transformers.Qwen2_5_VLForConditionalGeneration(config)
    wanted = {hub_name(key): tuple(value.shape) for key, value in published.named_parameters()}
    (cell,) = compose_cells([f"model=qwen25vl_{name}"])
    spec = prepare(cell.config).job.model
    assert expected_shapes(spec) == wanted
    assert sum(module.parameters for module in spec.modules) == sum(map(prod, wanted.values())) == total
