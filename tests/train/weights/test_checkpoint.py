"""Reading and writing published weights on one rank: there and back, and what is wrong with a folder in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.modules import stage as stage_module
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.stage import Stage, named_parameters
from entrain_bench.train.weights import Checkpoint, check_tensors, load_weights, save_weights
from support.builders import TOKENS
from support.train.modules import module_config, small_model, stage_of
from support.train.ranks import run_ranks
from support.train.runs import configuration, train_here

FILE = "model-00001-of-00001.safetensors"


def placed_stages(model: ModelSpec, groups: StageGroups, cuts: dict[str, int]) -> dict[tuple[int, int], Stage]:
    """Every module in two stages."""
    found = {}
    for index, module in enumerate(model.modules):
        cut = cuts[module.name]
        for stage, layers in enumerate((range(cut), range(cut, len(module.layers)))):
            found[index, stage] = stage_of(model, module, groups, layers)
    return found


def written(model: ModelSpec, groups: StageGroups, folder: Path) -> dict[tuple[int, int], Stage]:
    """A model's stages, written into a folder as one checkpoint."""
    stages = placed_stages(model, groups, {"vision": 2, "audio": 1, "llm": 2})
    save_weights(folder, model, [(stage, groups) for stage in stages.values()], groups.dp_cp)
    return stages


def values(stages: dict[tuple[int, int], Stage]) -> dict[str, Tensor]:
    return {named.key: named.parameter.detach() for stage in stages.values() for named in named_parameters(stage)}


@pytest.mark.wide
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_is_read(alone: StageGroups, tmp_path: Path, tied: bool) -> None:
    model = small_model(tied_embeddings=tied)
    first = values(written(model, alone, tmp_path))
    checkpoint = Checkpoint.open(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "model.safetensors.index.json"}
    check_tensors(checkpoint, model)
    other = placed_stages(model, alone, {"vision": 1, "audio": 2, "llm": 1})
    for stage in other.values():
        for parameter in stage.parameters():
            parameter.data.zero_()
    for stage in other.values():
        load_weights(checkpoint, model, stage)
    read = values(other)
    assert read.keys() == first.keys()
    for key, value in first.items():
        if "audio" in key and key.endswith("linear_qkv.bias"):
            # Whisper's keys have no bias.
            three = value.view(4, 3, 16).clone()
            three[:, 1] = 0
            value = three.view(-1)
        assert torch.equal(read[key], value), key


def in_one_file(groups: StageGroups, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Checkpoint:
    """The small model's checkpoint in a single file, changed."""
    written(small_model(), groups, folder)
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    return Checkpoint.open(folder)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def adding(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.wide
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("visual.blocks.1.attn.qkv.bias"), "visual.blocks.1.attn.qkv.bias is missing for model=small"),
        (adding("model.layers.2.mlp.up_proj.weight", torch.zeros(2)), "mlp.up_proj.weight is not in model=small"),
        (
            adding("model.norm.weight", torch.zeros(64)),
            r"model.norm.weight has the shape \[64\], but model=small needs \[128\]",
        ),
        (lambda tensors: [tensors.pop(name) for name in [*tensors][1:]], "and [0-9]+ more are missing for model=small"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    alone: StageGroups, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_tensors(in_one_file(alone, tmp_path, change), small_model())


def test_unused_tensors_and_a_tied_head_are_left_out(alone: StageGroups, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    check_tensors(in_one_file(alone, tmp_path, change), small_model())


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tensors in \*.safetensors"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(UserError, match=r"model.safetensors is damaged"):
        Checkpoint.open(tmp_path)


def test_a_module_whose_names_are_not_known_is_refused(alone: StageGroups, tmp_path: Path) -> None:
    written(small_model(), alone, tmp_path)
    config = module_config("tiny_llm", num_layers=2, vocab_size=96, checkpoint="")
    unnamed = ModelSpec.from_config({"name": "m", "modules": {"llm": config}, "tokens": TOKENS})
    with pytest.raises(IncompatibleError, match=r"model.modules.llm.checkpoint: missing"):
        check_tensors(Checkpoint.open(tmp_path), unnamed)


def _losses(_: int, configs: Sequence[str]) -> list[list[float]]:
    """Losses of runs one after the other; of all but the first, weights begin as zeros."""
    first = [row["loss"] for row in train_here(configs[0])]
    with patch.object(stage_module, "initialise", lambda stage, _: [p.data.zero_() for p in stage.parameters()]):
        return [first, *([row["loss"] for row in train_here(config)] for config in configs[1:])]


@pytest.mark.wide
def test_a_run_begins_with_the_weights_that_another_one_wrote(tmp_path: Path) -> None:
    """Nothing learns in the first runs, so losses are the same under any layout."""
    layouts = (
        ("strategy=megatron", "layout.tp=2", "layout.pp=2", "layout.dp=1", "layout.recompute=[llm]"),
        ("strategy=fsdp", "layout.tp=1", "layout.dp=4"),
        ("strategy=megatron", "layout.tp=1", "layout.pp=2", "layout.dp=2", "distributed_optimizer=true"),
    )
    still = ("model=tiny", "iterations=1", "harness.learning_rate=0")
    configs = []
    for number, layout in enumerate(layouts):
        read = [f"harness.weights={tmp_path}/{number - 1}"] if number else []
        configs.append(configuration(*still, *layout, *read, f"harness.save_weights={tmp_path}/{number}"))
    (loss,), *again = run_ranks(_losses, 4, configs, stay=False)[0]
    assert [other for (other,) in again] == pytest.approx([loss] * len(again), rel=1e-5)
    written = [
        {name: own.tensor(name) for name in own.stored} for own in map(Checkpoint.open, sorted(tmp_path.iterdir()))
    ]
    assert all(torch.equal(value, other[name]) for other in written[1:] for name, value in written[0].items())
