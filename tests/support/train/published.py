"""Small random models of Hugging Face's ``transformers``, and stages filled with their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionMultiModalProjector
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.modules.packing import Pack, Picture, StageGroups, in_stage_order, multimodal_positions
from entrain_bench.train.modules.stage import Stage, build_stage, named_parameters
from support.builders import TOKENS
from support.train.modules import Grads, module_config, normal, run_stages
from support.train.names import Checkpoint, check_tensors, hub_name, load_weights, published_parts

LLM = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_hidden_size": 96}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTHS = (9, 30, 14)
# Rows and columns of patches; two frames of a video are pictures of their own. Windows are 4 x 4 patches.
GRIDS = ((4, 6), (10, 8), (6, 6), (6, 6))
PICTURES = Pack(tuple(h * w for h, w in GRIDS), tuple(h * w // 4 for h, w in GRIDS), grids=GRIDS)


@dataclass(frozen=True)
class Published:
    """A published model beside ours."""

    spec: ModelSpec  # ours
    module: str  # the module that is compared
    models: Mapping[str, torch.nn.Module]  # the published ones, by the beginning of their names in a checkpoint
    first: Tensor | None  # input of our first stage
    pack: Pack
    output: Callable[[], Tensor]  # what the published model gives

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The published tensors by the names of a checkpoint."""
        whole = (pair for own, model in self.models.items() for pair in named(model, own))
        return {part: value for name, p in whole for part, value in by_expert(name, p.detach().clone())}

    def run(self) -> tuple[Tensor, Grads]:
        """A gradient of the output, and what the published model gives: output, gradients by the same names."""
        output = self.output()
        gradient = normal(np.random.default_rng(5), *output.shape) if output.dim() else torch.ones(())
        output.backward(gradient)
        whole = (pair for own, model in self.models.items() for pair in named(model, own))
        grads = {part: grad for name, p in whole if p.grad is not None for part, grad in by_expert(name, p.grad)}
        return gradient, {"output": output.detach(), **grads}


def named(model: torch.nn.Module, beginning: str = "") -> list[tuple[str, torch.nn.Parameter]]:
    return [(beginning + name, parameter) for name, parameter in model.named_parameters()]


def by_expert(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint that ``transformers`` holds in one: gates and ups, or downs, of all experts."""
    before, fused, kind = name.partition(".experts.")
    if not fused:
        yield name, value
        return
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for number, rows in enumerate(value):
        for own, part in zip(kinds, rows.chunk(len(kinds)), strict=True):
            yield f"{before}{fused}{number}.{own}.weight", part


def spec_of(**modules: dict[str, Any]) -> ModelSpec:
    return ModelSpec.from_config({"name": "small", "modules": modules, "tokens": TOKENS})


def llm_config(**changes: Any) -> dict[str, Any]:
    return module_config("tiny_llm", **LLM, vocab_size=96) | changes


def randomised(model: torch.nn.Module, seed: int = 0, std: float = 0.1) -> torch.nn.Module:
    """The model in evaluation mode, with values that exercise every parameter, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            offset = 1.0 if "norm" in name and parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.normal_(offset, std, generator=generator)
    return model.eval()


def text_model(kind: str) -> Published:
    """Qwen2.5 (biases, tied embeddings), Qwen3-MoE (dense block, norms of heads) or Llama 3.1 (scaled frequencies)."""
    torch.manual_seed(0)
    if kind == "qwen25":
        rope = {"rope_type": "default", "rope_theta": 1e6}
        config = transformers.Qwen2Config(**TEXT, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=rope)
        model = randomised(transformers.Qwen2ForCausalLM(config))
        spec = spec_of(llm=llm_config(qkv_bias=True, rope_theta=1e6, norm_epsilon=1e-6, tied_embeddings=True))
    elif kind == "qwen3_moe":
        rope = {"rope_type": "default", "rope_theta": 1e6}
        mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
        config = transformers.Qwen3MoeConfig(
            **TEXT, **mixture, norm_topk_prob=True, head_dim=16, rms_norm_eps=1e-6, rope_parameters=rope
        )
        model = randomised(transformers.Qwen3MoeForCausalLM(config))
        experts = {"count": 8, "top_k": 2, "ffn_hidden_size": 32, "dense_layers": [1]}
        values = module_config("tiny_moe_llm", **LLM, vocab_size=96, experts=experts)
        spec = spec_of(llm=values)
    else:
        rope = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 32, **LLAMA3}
        config = transformers.LlamaConfig(**TEXT, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=rope)
        model = randomised(transformers.LlamaForCausalLM(config))
        scaling = {**LLAMA3, "original_context_tokens": 32}
        spec = spec_of(llm=llm_config(rope_theta=5e5, norm_epsilon=1e-5, tied_embeddings=False, rope_scaling=scaling))

    rng = np.random.default_rng(3)
    ids = torch.from_numpy(rng.integers(96, size=sum(LENGTHS)))
    labels = torch.from_numpy(np.where(rng.random(len(ids)) < 0.7, rng.integers(96, size=len(ids)), -1))

    def loss() -> Tensor:
        losses = [
            functional.cross_entropy(model(row[None]).logits[0], label, ignore_index=-1, reduction="sum")
            for row, label in zip(ids.split(LENGTHS), labels.split(LENGTHS), strict=True)
        ]
        return torch.stack(losses).sum()

    return Published(spec, "llm", {"": model}, None, Pack(LENGTHS, (), ids, labels), loss)


VISION = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
    "out_hidden_size": 64,
    "tokens_per_second": 2,
    "attn_implementation": "eager",
}


def vision_config() -> dict[str, Any]:
    return module_config(
        "tiny_vision", 64, num_layers=4, ffn_hidden_size=96, window_tokens=16, full_attention_layers=[1, 3]
    )


def qwen_vision() -> Published:
    """Qwen2.5-VL's vision tower on two pictures and a video of two frames."""
    torch.manual_seed(0)
    model = randomised(
        Qwen2_5_VisionTransformerPretrainedModel(transformers.Qwen2_5_VLConfig(vision_config=VISION).vision_config)
    )
    spec = spec_of(vision=vision_config(), llm=llm_config())
    pixels = normal(np.random.default_rng(4), sum(PICTURES.lengths), 1176)
    grids = torch.tensor([[1, 4, 6], [1, 10, 8], [2, 6, 6]])
    return Published(spec, "vision", {"visual.": model}, pixels, PICTURES, lambda: model(pixels, grids).pooler_output)


def siglip() -> Published:
    """SigLIP without its last norm, and LLaVA-OneVision's projector, on three tiles of 4 x 4 patches."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    tower = transformers.SiglipVisionConfig(**sizes, image_size=56, patch_size=14, attn_implementation="eager")
    tower.vision_use_head = False
    # Large enough for the two forms of GELU to differ.
    model = randomised(transformers.SiglipVisionModel(tower), std=0.25)
    joint = transformers.LlavaOnevisionConfig(
        vision_config=tower.to_dict(), text_config=transformers.Qwen2Config(**TEXT).to_dict()
    )
    projector = randomised(LlavaOnevisionMultiModalProjector(joint), 1)
    gemms = {"embed_gemms": [{"k": 588, "n": 64}], "head_gemms": [{"k": 64, "n": 64}, {"k": 64, "n": 64}]}
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "hidden_size": 64, "ffn_hidden_size": 96}
    vision = module_config("siglip_so400m", 64, **gemms, **heads, num_layers=3, learned_positions=16)
    spec = spec_of(vision=vision, llm=llm_config())
    pack = Pack((16, 16, 16), (16, 16, 16))
    pixels = normal(np.random.default_rng(4), 3, 3, 56, 56)
    # Patches row by row, each with its colours first.
    patches = pixels.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 1, 4, 5).reshape(48, 588)
    models = {"vision_tower.vision_model.": model, "multi_modal_projector.": projector}

    def output() -> Tensor:
        return projector(model(pixels, output_hidden_states=True).hidden_states[-1]).flatten(0, 1)

    return Published(spec, "vision", models, patches, pack, output)


def whisper() -> Published:
    """Whisper's encoder on two segments of equal length, then the mean of pairs and a product."""
    torch.manual_seed(0)
    frames, mels = 24, 8
    config = transformers.WhisperConfig(
        d_model=64,
        encoder_layers=3,
        encoder_attention_heads=4,
        encoder_ffn_dim=96,
        num_mel_bins=mels,
        max_source_positions=frames,
        attn_implementation="eager",
    )
    model = randomised(WhisperEncoder(config))
    projector = randomised(torch.nn.Linear(64, 64), 1)
    gemms = [{"k": 3 * mels, "n": 64, "rows_per_token": 2.0}, {"k": 192, "n": 64}]
    audio = module_config("tiny_audio", 64, num_layers=3, ffn_hidden_size=96, embed_gemms=gemms)
    spec = spec_of(audio=audio, llm=llm_config())
    pack = Pack((frames, frames), (frames // 2, frames // 2))
    features = normal(np.random.default_rng(4), 2, mels, 2 * frames)
    # Two rows a token, each of the frames that the first convolution sees there: before, at and after.
    windows = functional.pad(features, (1, 1)).unfold(2, 3, 1).permute(0, 2, 3, 1).reshape(2 * frames, -1)
    models = {"audio_tower.": model, "multi_modal_projector.linear.": projector}

    def output() -> Tensor:
        hidden = model(features).last_hidden_state
        return projector(hidden.view(2, frames // 2, 2, 64).mean(2)).flatten(0, 1)

    return Published(spec, "audio", models, windows, pack, output)


def qwen25vl(folder: Path, groups: StageGroups) -> dict[str, float]:
    """Errors of the whole of Qwen2.5-VL: two pictures and a video among text, one sample without any."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {**TEXT, "rms_norm_eps": 1e-6, "rope_parameters": rope, "tie_word_embeddings": True}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen2_5_VLConfig(vision_config=VISION, text_config=text, tie_word_embeddings=True, **tokens)
    model = randomised(transformers.Qwen2_5_VLForConditionalGeneration(config))
    changes = {"qkv_bias": True, "rope_theta": 1e6, "norm_epsilon": 1e-6, "tied_embeddings": True}
    spec = spec_of(vision=vision_config(), llm=llm_config(**changes, mrope_sections=[2, 3, 3], mrope_frame_step=2))
    rng = np.random.default_rng(8)
    pixels = normal(rng, sum(PICTURES.lengths), 1176)
    text_ids = [rng.integers(90, size=count).tolist() for count in (3, 2, 5, 4, 7, 11)]
    # Sample 0: text, picture, text, picture, text; sample 1: text, video, text; sample 2: text.
    samples = [
        [*text_ids[0], *[90] * 6, *text_ids[1], *[90] * 20, *text_ids[2]],
        [*text_ids[3], *[91] * 18, *text_ids[4]],
        text_ids[5],
    ]
    parts = [[3, Picture(2, 3), 2, Picture(5, 4), 5], [4, Picture(3, 3, 2, 2.0), 7], [11]]
    losses, labels = [], []
    given: dict[str, Any]
    for number, row in enumerate(samples):
        ids = torch.tensor([row])
        kinds = torch.where(ids == 90, 1, torch.where(ids == 91, 2, 0))
        given = [
            {"pixel_values": pixels[:104], "image_grid_thw": torch.tensor([[1, 4, 6], [1, 10, 8]])},
            {
                "pixel_values_videos": pixels[104:],
                "video_grid_thw": torch.tensor([[2, 6, 6]]),
                "second_per_grid_ts": torch.tensor([1.0]),
            },
            {},
        ][number]
        label = torch.where(ids[0] < 90, ids[0], -1).roll(-1)
        label[-1] = -1
        labels.append(label)
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **given).logits[0]
        losses.append(functional.cross_entropy(logits, label, ignore_index=-1, reduction="sum"))
    loss = torch.stack(losses).sum()
    loss.backward()
    tensors = {hub_name(name): parameter.detach().clone() for name, parameter in named(model)}
    grads = {hub_name(name): parameter.grad for name, parameter in named(model) if parameter.grad is not None}
    wanted = {"output": loss.detach(), **grads}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    check_tensors(checkpoint, spec)
    vision, llm = (
        filled(spec, name, range(len(spec.module(name).layers)), groups, checkpoint) for name in ("vision", "llm")
    )
    ids = torch.tensor([-1 if token in (90, 91) else token for row in samples for token in row])
    pack = Pack(
        tuple(map(len, samples)),
        (),
        ids,
        torch.cat(labels),
        positions=torch.cat([multimodal_positions(row) for row in parts], dim=1),
    )
    projected = vision(in_stage_order(vision.module, PICTURES, pixels), PICTURES).detach()
    found = run_stages([llm], projected, pack)
    encoded = run_stages([vision], pixels, PICTURES, found.pop("input"))
    encoded.pop("output")
    every = unpacked(spec, llm, found) | unpacked(spec, vision, encoded)
    return errors(every, wanted)


CASES: dict[str, Callable[[], Published]] = {
    "qwen25": lambda: text_model("qwen25"),
    "llama31": lambda: text_model("llama31"),
    "qwen3_moe": lambda: text_model("qwen3_moe"),
    "qwen25vl_vision": qwen_vision,
    "siglip": siglip,
    "whisper": whisper,
}


def module_errors(case: str, folder: Path, groups: StageGroups) -> dict[str, float]:
    """Largest difference of the output and of every gradient, relative to the largest published value."""
    published = CASES[case]()
    gradient, wanted = published.run()
    layers = range(len(published.spec.module(published.module).layers))
    stage = filled(published.spec, published.module, layers, groups, stored(published, folder))
    gradients = run_stages([stage], published.first, published.pack, gradient)
    return errors(unpacked(published.spec, stage, gradients), wanted)


def stored(published: Published, folder: Path) -> Checkpoint:
    """A checkpoint of one module, its other modules left out."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in published.tensors.items()}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    alone = ModelSpec("alone", (published.spec.module(published.module),), published.spec.tokens)
    check_tensors(checkpoint, alone)
    return checkpoint


def filled(spec: ModelSpec, name: str, layers: range, groups: StageGroups, checkpoint: Checkpoint) -> Stage:
    module = spec.module(name)
    stage = build_stage(spec, module, layers, groups)
    load_weights(checkpoint, spec, stage)
    return stage


def unpacked(spec: ModelSpec, stage: Stage, found: Grads) -> Grads:
    """A whole module's gradients by the names of a checkpoint."""
    result = {key: value for key, value in found.items() if key in ("output", "input")}
    for named in named_parameters(stage):
        parts = published_parts(spec, stage.module, named, found[named.key])
        result |= {name: view.reshape(shape) for name, (view, shape) in parts.items()}
    return result


def errors(found: Grads, wanted: Grads) -> dict[str, float]:
    """Largest difference of each tensor relative to its largest value.

    Gradients of keys' biases are compared with those of queries': softmax takes no notice of what shifts all keys, so
    without rotary positions they are nothing but rounding.
    """
    result = {}
    for name, value in wanted.items():
        scale = wanted[name.replace("k_proj", "q_proj")] if name.endswith("k_proj.bias") else value
        own = found.get(name, torch.zeros_like(value))
        result[name] = float((own - value).abs().max() / scale.abs().max())
    return result
