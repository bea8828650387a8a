"""``harness=train model=hf:...``: losses and weights of a plain loop, and a resumed run has the bits of a whole one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

import entrain_bench as eb
from entrain_bench.base.errors import UserError
from entrain_bench.run.experiment import prepare
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.runner.families import family_of
from entrain_bench.train.runner.published import MadeUpSamples
from entrain_bench.train.runner.samples import UNLABELLED, Item
from entrain_bench.train.running.data import MadeUp
from support.train.hub import CLASSES, VOCAB, save_config, tiny_model
from support.train.ranks import run_ranks
from support.train.runs import batch, config_from_json, configuration, train_here

# A busy machine decides nothing.
pytestmark = pytest.mark.timeout(900)
STEPS = 3
LAYOUTS = {
    "pp2_dp2": ("strategy=megatron", "layout.tp=1", "layout.pp=2", "layout.dp=2"),
    "tp2_pp2": ("strategy=megatron", "layout.tp=2", "layout.pp=2", "layout.dp=1"),
    "fsdp": ("strategy=fsdp", "layout.tp=1"),
    "braid": ("strategy=braid", "layout.tp=1"),
}


def config_of(folder: Path, *overrides: str) -> str:
    common = ("layout.ep=1", "tuning=own", "harness.weight_decay=0.1", f"iterations={STEPS}")
    return configuration(f"model=hf:{folder}", *common, *overrides)


def plain_loop(config: str, folder: Path) -> tuple[list[float], dict[str, np.ndarray[Any, Any]]]:
    """Losses and last weights of transformers' own forward, sample by sample, with torch's AdamW."""
    setting = prepare(config_from_json(config))
    settings = setting.executor
    model = getattr(transformers, CLASSES["qwen2_5_vl"]).from_pretrained(folder, dtype=torch.float32).eval()
    samples = MadeUpSamples(family_of(model), MadeUp(0, VOCAB))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=settings.learning_rate, eps=settings.epsilon)
    losses = []
    for iteration in range(STEPS):
        adam.zero_grad()
        shapes = batch(setting, iteration)
        total = 0.0
        for index in range(len(shapes)):
            sample = samples.sample(shapes, index)
            inputs = {}
            if sample.items:
                inputs = {
                    name: torch.cat([item.inputs[name] for item in sample.items]) for name in sample.items[0].inputs
                }
                inputs["mm_token_type_ids"] = family_of(model).is_placeholder(sample.ids)[None].long()
            logits = model(input_ids=sample.ids[None], attention_mask=torch.ones(1, len(sample.ids)), **inputs).logits
            loss = functional.cross_entropy(
                logits[0, :-1], sample.labels[1:], ignore_index=UNLABELLED, reduction="sum"
            ) / int(shapes.labelled_tokens.sum())
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
        adam.step()
        losses.append(total)
    return losses, {name: value.numpy() for name, value in model.state_dict().items()}


def train_all(_: int, configs: list[str]) -> list[list[dict[str, float]]]:
    prepare_platform()
    return [train_here(config) for config in configs]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    tiny_model("qwen2_5_vl").save_pretrained(folder)
    save_config("qwen2_5_vl", folder)
    return folder


@pytest.mark.wide
@pytest.mark.parametrize(
    "layout", ["pp2_dp2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*LAYOUTS][1:])]
)
def test_published_weights_train_as_in_a_plain_loop(layout: str, published: Path, tmp_path: Path) -> None:
    written = tmp_path / "written"
    folders = (f"harness.weights={published}", f"harness.save_weights={written}")
    config = config_of(published, *LAYOUTS[layout], *folders)
    losses, weights = plain_loop(config, published)
    ((rows,), *_) = run_ranks(train_all, 4, [config], stay=False)
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=1e-5)
    trained = getattr(transformers, CLASSES["qwen2_5_vl"]).from_pretrained(written, dtype=torch.float32)
    for name, value in trained.state_dict().items():
        np.testing.assert_allclose(value.numpy(), weights[name], atol=2e-5, err_msg=name)


def halves(rank: int, whole: str, parts: list[str]) -> None:
    """Train whole, and in two halves."""
    one, two = train_all(rank, [whole]), train_all(rank, parts)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in two[-1]] == [row[key] for row in one[0]], key


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["pp2_dp2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_bits_of_a_whole_one(layout: str, tmp_path: Path) -> None:
    save_config("qwen2_5_vl", tmp_path)
    kept = (f"harness.checkpoint_dir={tmp_path}/checkpoints", "harness.checkpoint_every=2")
    whole = config_of(tmp_path, *LAYOUTS[layout], "iterations=4")
    parts = [config_of(tmp_path, *LAYOUTS[layout], *kept, f"iterations={count}") for count in (2, 4)]
    run_ranks(halves, 4, whole, parts, stay=False)


def test_an_emulated_hugging_face_model_is_refused_in_one_line(tmp_path: Path) -> None:
    save_config("qwen2_5_vl", tmp_path)
    with pytest.raises(UserError, match=r"^model=hf:.*: cannot be emulated. Use harness=simulate, train"):
        prepare(eb.compose(f"model=hf:{tmp_path}", "cluster=tiny", "workload=synthetic", "harness=emulate"))


def test_own_models_have_no_published_format() -> None:
    message = r"^harness.save_weights=here: must be null, or give model=hf"
    with pytest.raises(UserError, match=message):
        prepare(eb.compose("model=tiny", "cluster=tiny", "harness=train", "harness.save_weights=here"))


SIZES = {"qwen3_vl": (24, 6), "internvl": (2 * 17, 2 * 4), "gemma3": (16, 4), "qwen2_audio": (40, 7)}


@pytest.mark.parametrize("kind", SIZES)
def test_made_up_items_have_the_sizes_that_are_asked_for(kind: str) -> None:
    family = family_of(tiny_model(kind))
    wanted = Item(family.modality, {}, *SIZES[kind])
    item = family.made_up(wanted, (), lambda size: torch.ones(*size))
    assert (item.encoder_tokens, item.llm_tokens) == SIZES[kind]
    features = family.features([item], torch.device("cpu"))
    assert len(features) == SIZES[kind][1]
    with pytest.raises(ValueError, match="does not exist: the next has"):
        family.made_up(replace(wanted, encoder_tokens=SIZES[kind][0] + 1), (), lambda size: torch.ones(*size))
