"""Tiny Hugging Face models of every family with random weights, their samples, and the plain loop that trains them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from PIL import Image
from torch import Tensor
from torch.nn import functional

from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.runner.families import Family, family_of
from entrain_bench.train.runner.runner import ProgramRunner
from entrain_bench.train.runner.samples import UNLABELLED, Sample, shapes_of_sizes
from support.train.runs import config_from_json

GLOBAL_BATCH = 8
STEPS = 3
LEARNING_RATE = 1e-3
VOCAB = 96
PLACEHOLDER, VIDEO = 90, 91
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
QWEN_VISION = {"depth": 4, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
SQUARES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
IDS = {"image_token_id": PLACEHOLDER, "video_token_id": VIDEO}


def _qwen(name: str, vision: Mapping[str, Any], **text: Any) -> Any:
    kind = getattr(transformers, f"{name}Config")
    return kind(text_config=TEXT | {"rope_parameters": MROPE} | text, vision_config=QWEN_VISION | vision, **IDS)


def _qwen3(name: str, **text: Any) -> Any:
    own = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 64}
    text |= {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}}
    return _qwen(name, own | {"deepstack_visual_indexes": [0, 1, 2]}, **text)


CONFIGS: Mapping[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _qwen(
        "Qwen2VL", {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, tie_word_embeddings=True
    ),
    "qwen2_5_vl": lambda: _qwen(
        "Qwen2_5_VL",
        {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "fullatt_block_indexes": [1, 3],
            "window_size": 16,
        },
    ),
    "qwen3_vl": lambda: _qwen3("Qwen3VL"),
    "qwen3_vl_moe": lambda: _qwen3(
        "Qwen3VLMoe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
    "internvl": lambda: transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=SQUARES | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=PLACEHOLDER,
    ),
    "llava_onevision": lambda: transformers.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=SQUARES
        | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False},
        image_token_id=PLACEHOLDER,
        video_token_id=VIDEO,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    ),
    "gemma3": lambda: transformers.Gemma3Config(
        text_config=TEXT
        | {"head_dim": 8, "sliding_window": 6, "tie_word_embeddings": True, "query_pre_attn_scalar": 8},
        vision_config=SQUARES
        | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=PLACEHOLDER,
        tie_word_embeddings=True,
    ),
    "qwen2_audio": lambda: transformers.Qwen2AudioConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        audio_config={
            "num_mel_bins": 8,
            "encoder_layers": 4,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "d_model": 16,
            "max_source_positions": 40,
        },
        audio_token_id=PLACEHOLDER,
    ),
}
CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
}


def tiny_model(kind: str) -> Any:
    """A model of a family with the same random weights in every process."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config._attn_implementation = "sdpa"
    model = getattr(transformers, CLASSES[kind])(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Zero biases and unit norms would hide gradients that go astray.
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.float().eval()


def save_config(kind: str, folder: Path) -> None:
    """Write a tiny model's ``config.json``, and how its processor sizes images."""
    CONFIGS[kind]().save_pretrained(folder)
    sizes = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096}
    if "vl" not in kind or kind == "internvl":
        sizes = {"size": {"height": 16, "width": 16}, "min_patches": 1, "max_patches": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))


def encoded_sample(kind: str, number: int) -> dict[str, Tensor]:
    """One sample as a processor returns it; every fourth has no item, every fifth two where the family takes them."""
    rng = torch.Generator().manual_seed(number)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    count = 0 if number % 4 == 3 else 2 if number % 5 == 2 and kind != "llava_onevision" else 1
    runs, inputs = _item_inputs(kind, [draw(1, 4) for _ in range(count)], [draw(1, 4) for _ in range(count)], rng)
    parts = [torch.randint(3, 80, (draw(2, 9),), generator=rng)]
    for run in runs:
        parts += [torch.full((run,), PLACEHOLDER), torch.randint(3, 80, (draw(2, 9),), generator=rng)]
    return {"input_ids": torch.cat(parts)[None], **inputs}


def _item_inputs(
    kind: str, heights: Sequence[int], widths: Sequence[int], rng: torch.Generator
) -> tuple[list[int], dict[str, Tensor]]:
    if not heights:
        return [], {}
    if kind.startswith("qwen") and "vl" in kind:
        grids = torch.tensor([(1, 2 * high, 2 * wide) for high, wide in zip(heights, widths, strict=True)])
        pixels = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=rng)
        return (grids.prod(-1) // 4).tolist(), {"pixel_values": pixels, "image_grid_thw": grids}
    if kind == "internvl":
        pixels = torch.randn(sum(heights), 3, 16, 16, generator=rng)
        return [4 * tiles for tiles in heights], {"pixel_values": pixels}
    if kind == "gemma3":
        return [4] * len(heights), {"pixel_values": torch.randn(len(heights), 3, 16, 16, generator=rng)}
    if kind == "llava_onevision":
        # Two tiles and a small picture of 16 tokens each, and a mark after each of the rows of both tiles.
        tall = heights[0] > 1
        sizes = torch.tensor([(32, 16) if tall else (16, 32)])
        pixels = torch.randn(1, 3, 3, 16, 16, generator=rng)
        return [3 * 16 + (8 if tall else 4)], {"pixel_values": pixels, "image_sizes": sizes}
    frames = torch.tensor([16 * high + 8 for high in heights])
    mask = (torch.arange(80) < frames[:, None]).long()
    features = torch.randn(len(heights), 8, 80, generator=rng)
    tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return tokens.tolist(), {"input_features": features, "feature_attention_mask": mask}


def labels_of(ids: Tensor) -> Tensor:
    """Labels of about half of the words ``[tokens]``."""
    return torch.where((ids[0] < PLACEHOLDER) & (ids[0] % 2 == 0), ids[0], UNLABELLED)


@dataclass(frozen=True)
class TinySamples:
    """An endless stream of samples."""

    family: Family
    modality: str

    @cache  # noqa: B019
    def sample(self, identity: int) -> Sample:
        encoded = encoded_sample(str(self.family.config.model_type), identity)
        return self.family.sample(encoded, labels_of(encoded["input_ids"]))

    def bind(self, family: Family) -> None:
        assert family is self.family

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:  # noqa: ARG002
        names = range(iteration * num_samples, (iteration + 1) * num_samples)
        return shapes_of_sizes([self.sample(name).sizes for name in names], [self.modality], names)

    def num_labelled(self, shapes: SampleShapes) -> int:
        return sum(self.sample(int(name)).num_labelled for name in shapes.sample_ids)


def plain_loop(kind: str) -> tuple[list[float], dict[str, np.ndarray[Any, Any]]]:
    """Losses of steps, and gradients of the first one, of a loop over the model's own forward, sample by sample."""
    model = tiny_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = [encoded_sample(kind, step * GLOBAL_BATCH + each) for each in range(GLOBAL_BATCH)]
        labels = [labels_of(encoded["input_ids"])[1:] for encoded in batch]
        labelled = sum(int((each != UNLABELLED).sum()) for each in labels)
        total = 0.0
        for encoded, target in zip(batch, labels, strict=True):
            logits = model(**_forward_inputs(kind, encoded)).logits[0, :-1]
            loss = functional.cross_entropy(logits, target, ignore_index=UNLABELLED, reduction="sum") / labelled
            loss.backward()
            total += float(loss)
        losses.append(total)
        if not step:
            gradients = {
                name: np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy().copy()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
        optimizer.step()
    return losses, gradients


def _forward_inputs(kind: str, encoded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ids = encoded["input_ids"]
    inputs = {**encoded, "attention_mask": torch.ones_like(ids)}
    types = {"gemma3": "token_type_ids"} if kind == "gemma3" else {}
    if kind.startswith("qwen") and "vl" in kind:
        types = {kind: "mm_token_type_ids"}
    return inputs | {name: (ids == PLACEHOLDER).long() for name in types.values()}


def run_rank(
    _: int, kind: str, config_text: str
) -> tuple[list[float], dict[str, np.ndarray[Any, Any]], list[dict[str, Any]]]:
    """Losses, gradients of this rank's parameters in the first step, and the layout."""
    model = tiny_model(kind)
    family = family_of(model)
    config = config_from_json(config_text)
    runner = ProgramRunner(config, model, TinySamples(family, family.modality), family=family)
    optimizer = torch.optim.SGD(runner.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(runner.step(step))
        if not step:
            gradients = {name: _whole(parameter.grad) for name, parameter in runner.named_parameters()}
        optimizer.step()
    layout = [
        {"module": m.module, "tp": m.tp, "cp": m.cp, "pp": m.pp, "dp": m.dp, "widths": m.widths, "sharding": m.sharding}
        for m in runner.layout.modules
    ]
    dist.barrier()
    return losses, gradients, layout


def _whole(gradient: Any) -> np.ndarray[Any, Any]:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return np.array(whole.detach())


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>")


def tiny_processor() -> Any:
    """A processor of Qwen2.5-VL whose tokens are characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    characters = "?" + "\n abcdefghijklmnopqrstuvwxyz0123456789.,"
    words = {character: index for index, character in enumerate(characters)}
    words |= {mark: PLACEHOLDER + index for index, mark in enumerate(MARKS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        additional_special_tokens=[*MARKS],
        pad_token="?",  # noqa: S106
    )
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": 64, "longest_edge": 1024}
    return transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes, size=limits),
        fast,
        transformers.Qwen2VLVideoProcessor(**sizes, size=limits),
        chat_template=TEMPLATE,
    )


def conversations(count: int, bad: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Rows with pictures of different sizes, one or two answers, and undecodable pictures in some."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        picture = io.BytesIO()
        pixels = rng.integers(0, 256, (int(rng.integers(8, 40)), int(rng.integers(8, 40)), 3), np.uint8)
        Image.fromarray(pixels).save(picture, "png")
        data = b"no picture" if number in bad else picture.getvalue()
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"what is {number}"}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"picture {number}" * (1 + number % 3)}]}
        later = [
            {"role": "user", "content": [{"type": "text", "text": "picture"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        ]
        rows.append({"messages": [question, answer, *later[: 2 * (number % 2)]], "images": [{"bytes": data}]})
    return rows
