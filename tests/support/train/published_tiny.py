"""``model=tiny`` in Hugging Face's ``transformers``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.modules.positions import arrangement_of
from entrain_bench.train.running.data import SampleData
from support.train.published import TEXT, VISION, randomised, tensors_of
from support.train.runs import features_of


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
        return tensors_of(self.vision, "visual.") | tensors_of(self.llm, "")

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
