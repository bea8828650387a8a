"""Training from published weights: losses and the weights written are those of ``transformers`` with torch's AdamW."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from entrain_bench.run.experiment import prepare
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.modules.packing import arrangement_of
from entrain_bench.train.running.data import MadeUp, SampleData
from entrain_bench.train.weights import Checkpoint
from support.train.published import TEXT, VISION, randomised
from support.train.ranks import run_ranks
from support.train.runs import ONE_RANK, batch, config_from_json, configuration, features_of, train_here

STEPS = 3
SETTINGS = ("model=tiny", f"iterations={STEPS}", "harness.warmup_iterations=2", "harness.learning_rate_decay=linear")
LAYOUTS = {
    "tp2_pp2": ("strategy=megatron", "layout.tp=2", "layout.pp=2", "layout.dp=1", "layout.recompute=[llm]"),
    "dp2_pp2": ("strategy=megatron", "layout.tp=1", "layout.pp=2", "layout.dp=2", "distributed_optimizer=true"),
    "fsdp": ("strategy=fsdp", "layout.tp=1", "layout.dp=4"),
}


@dataclass(frozen=True)
class TinyPublished:
    """``model=tiny`` in ``transformers``: Qwen2.5-VL's vision tower and Llama, which see items before text."""

    vision: torch.nn.Module
    llm: torch.nn.Module

    @classmethod
    def make(cls) -> TinyPublished:
        torch.manual_seed(0)
        tower = {
            **VISION,
            "depth": 8,
            "intermediate_size": 128,
            "window_size": 112,
            "fullatt_block_indexes": [3, 7],
            "out_hidden_size": 128,
        }
        text = {
            **TEXT,
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        }
        rope = {"rope_type": "default", "rope_theta": 5e5}
        vision = transformers.Qwen2_5_VLConfig(vision_config=tower).vision_config
        llm = transformers.LlamaConfig(**text, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=rope)
        return cls(
            randomised(Qwen2_5_VisionTransformerPretrainedModel(vision), std=0.05),
            randomised(transformers.LlamaForCausalLM(llm), std=0.05),
        )

    def tensors(self) -> dict[str, Tensor]:
        """By the names of a checkpoint."""
        named = chain(self.vision.named_parameters(prefix="visual"), self.llm.named_parameters())
        return {name: parameter.detach().clone() for name, parameter in named}

    def save(self, folder: Path) -> None:
        """As a checkpoint of two files with an index."""
        folder.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors().items()}
        files = {name: f"model-0000{1 + name.startswith('visual.')}-of-00002.safetensors" for name in tensors}
        for file in {*files.values()}:
            save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    def loss(self, data: SampleData, vision: ModuleSpec) -> Tensor:
        """Mean cross entropy over the predicted tokens of a batch."""
        losses = []
        for sample in range(len(data.shapes)):
            first, stop = data.shapes.item_offsets[sample : sample + 2].tolist()
            pack = data.llm_pack(np.array([sample]))
            ids, labels = pack.token_ids, pack.labels
            assert ids is not None
            embeddings = self.llm.get_input_embeddings()(ids.clamp(min=0))
            if first < stop:
                items = np.arange(first, stop)
                own = data.encoder_pack(items)
                arrangement = arrangement_of(vision, own)
                assert arrangement is not None
                pixels = features_of(data, vision, items)[arrangement.place]
                grids = torch.tensor([[1, *grid] for grid in own.grids])
                embeddings = embeddings.masked_scatter((ids < 0)[:, None], self.vision(pixels, grids).pooler_output)
            logits = self.llm(inputs_embeds=embeddings[None]).logits[0]
            losses.append(functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum"))
        return torch.stack(losses).sum() / data.num_loss_tokens


def pictures(path: Path) -> tuple[str, str]:
    """A workload of pictures of known sizes."""
    rng = np.random.default_rng(0)
    sizes = [rng.integers(56, 200, size=(int(count), 2)).tolist() for count in rng.integers(0, 3, size=24)]
    frame = pd.DataFrame(
        {
            "text_tokens": rng.integers(2, 12, size=24),
            "image_widths": [[width for width, _ in each] for each in sizes],
            "image_heights": [[height for _, height in each] for each in sizes],
        }
    )
    frame.to_parquet(path)
    return "workload=trace", f"workload.path={path}"


def reference(config: str, published: TinyPublished) -> list[float]:
    """Losses of the published model, which is trained."""
    setting = prepare(config_from_json(config))
    settings, vision = setting.executor, setting.job.model.module("vision")
    parameters = [*published.vision.parameters(), *published.llm.parameters()]
    adam = torch.optim.AdamW(parameters, lr=0.0, eps=settings.epsilon, weight_decay=0.0, betas=settings.betas)
    losses = []
    for iteration in range(STEPS):
        data = SampleData(batch(setting, iteration), MadeUp(0, 1024))
        adam.zero_grad()
        loss = published.loss(data, vision)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad)
        adam.param_groups[0]["lr"] = settings.rate_at(iteration, STEPS)
        adam.step()
        losses.append(float(loss.detach()))
    return losses


def worst_error(folder: Path, published: TinyPublished, start: dict[str, torch.Tensor]) -> float:
    """Of the weights written, in units of the largest step that training has taken."""
    checkpoint, tensors = Checkpoint.open(folder), published.tensors()
    assert checkpoint.stored.keys() == tensors.keys()
    found = []
    for name, value in tensors.items():
        written = checkpoint.tensor(name)
        moved = float((value - start[name]).abs().max())
        found.append(float((written - value).abs().max()) / max(moved, 1e-6))
    return max(found)


def on_ranks(_: int, config: str) -> list[float]:
    prepare_platform()
    return [row["loss"] for row in train_here(config)]


def check(tmp_path: Path, num_ranks: int, *layout: str) -> None:
    published, given, written = TinyPublished.make(), tmp_path / "given", tmp_path / "written"
    published.save(given)
    start = published.tensors()
    folders = (f"harness.weights={given}", f"harness.save_weights={written}")
    config = configuration(*pictures(tmp_path / "pictures.parquet"), *SETTINGS, *layout, *folders)
    losses = run_ranks(on_ranks, num_ranks, config, stay=False)[0]
    assert losses == pytest.approx(reference(config, published), rel=1e-5)
    assert worst_error(written, published, start) < 1e-2


@pytest.mark.wide
def test_one_rank_trains_as_the_published_model(tmp_path: Path) -> None:
    check(tmp_path, 1, *ONE_RANK)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_train_as_the_published_model(tmp_path: Path, layout: str) -> None:
    check(tmp_path, 4, *LAYOUTS[layout])
