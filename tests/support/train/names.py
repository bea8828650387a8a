"""Published weights of Hugging Face's classes in the suite's own stages, to compare what both compute.

Names are of ``transformers`` (5.23) and the hub; others that ``transformers`` writes become these (``hub_name``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.modules.blocks import AttentionKernel
from entrain_bench.train.modules.experts import ALONE, LOCAL
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.stage import NamedParameter, Stage, named_parameters

# Beginnings of names, and the hub's replacements; the first match counts.
BEGINNINGS = (
    (r"(model\.)?visual\.", "visual."),
    (r"(model\.)?vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
    (r"(model\.)?audio_tower\.", "audio_tower."),
    (r"(model\.)?multi_modal_projector\.", "multi_modal_projector."),
    (r"(model\.language_model|language_model\.model|model)\.", "model."),
    (r"(language_model\.)?lm_head\.", "lm_head."),
)
# Tensors that no stage has. Here LLaVA-OneVision's LLM gets no token at the end of a row of patches.
UNUSED = re.compile(
    r".*\.rotary_emb\.inv_freq|vision_tower\.vision_model\.(head|post_layernorm)\..*|(.*\.)?image_newline"
    r"|audio_tower\.embed_positions\.weight"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How checkpoints of an architecture name a module's tensors."""

    block: str  # prefix of a block's names, with its number from 0
    parts: dict[str, tuple[str, ...]]  # stored names of our parts; one part may be stored as several


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA = Scheme(
    block="model.layers.{}.",
    parts={
        "input_layernorm": ("input_layernorm",),
        "pre_mlp_layernorm": ("post_attention_layernorm",),
        "linear_qkv": _ATTENTION,
        "linear_proj": ("self_attn.o_proj",),
        "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "linear_fc2": ("mlp.down_proj",),
        "words": ("model.embed_tokens",),
        "norm": ("model.norm",),
        "logits": ("lm_head",),
    },
)
SCHEMES: dict[str, Scheme] = {
    "llama": _LLAMA,
    "qwen3_moe": Scheme(
        block=_LLAMA.block,
        # Braces: the expert's number.
        parts=_LLAMA.parts
        | {
            "q_layernorm": ("self_attn.q_norm",),
            "k_layernorm": ("self_attn.k_norm",),
            "router": ("mlp.gate",),
            "experts.linear_fc1": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
            "experts.linear_fc2": ("mlp.experts.{}.down_proj",),
        },
    ),
    "qwen25vl_vision": Scheme(
        block="visual.blocks.{}.",
        parts={
            "input_layernorm": ("norm1",),
            "pre_mlp_layernorm": ("norm2",),
            "linear_qkv": ("attn.qkv",),
            "linear_proj": ("attn.proj",),
            "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "linear_fc2": ("mlp.down_proj",),
            "embed.0": ("visual.patch_embed.proj",),
            "norm": ("visual.merger.ln_q",),
            "head.0": ("visual.merger.mlp.0",),
            "head.1": ("visual.merger.mlp.2",),
        },
    ),
    "siglip": Scheme(
        block="vision_tower.vision_model.encoder.layers.{}.",
        parts={
            "input_layernorm": ("layer_norm1",),
            "pre_mlp_layernorm": ("layer_norm2",),
            "linear_qkv": _ATTENTION,
            "linear_proj": ("self_attn.out_proj",),
            "linear_fc1": ("mlp.fc1",),
            "linear_fc2": ("mlp.fc2",),
            "embed.0": ("vision_tower.vision_model.embeddings.patch_embedding",),
            "positions": ("vision_tower.vision_model.embeddings.position_embedding",),
            "head.0": ("multi_modal_projector.linear_1",),
            "head.1": ("multi_modal_projector.linear_2",),
        },
    ),
    "whisper_encoder": Scheme(
        block="audio_tower.layers.{}.",
        parts={
            "input_layernorm": ("self_attn_layer_norm",),
            "pre_mlp_layernorm": ("final_layer_norm",),
            "linear_qkv": _ATTENTION,
            "linear_proj": ("self_attn.out_proj",),
            "linear_fc1": ("fc1",),
            "linear_fc2": ("fc2",),
            "embed.0": ("audio_tower.conv1",),
            "embed.1": ("audio_tower.conv2",),
            "norm": ("audio_tower.layer_norm",),
            "head.0": ("multi_modal_projector.linear",),
        },
    ),
}


def hub_name(name: str) -> str:
    """A stored tensor's name as the hub has it."""
    for pattern, beginning in BEGINNINGS:
        if begin := re.match(pattern, name):
            return beginning + name[begin.end() :]
    return name


def published_parts(
    model: ModelSpec, module: ModuleSpec, named: NamedParameter, full: Tensor
) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """The published tensors of a whole parameter by name: views of ``full``, and the shapes that they are stored in.

    ``IncompatibleError`` for a module or a product whose tensors have no names.
    """
    config = module.config
    if not config.checkpoint:
        raise IncompatibleError(f"model.modules.{module.name}.checkpoint: missing, so published weights cannot be read")
    scheme = SCHEMES[config.checkpoint]
    is_whisper = config.checkpoint == "whisper_encoder"
    layer, *path, part = named.key.removeprefix(f"{module.name}.").split(".")
    end = "embed" if layer == "0" else "head"
    ours = path[-1] if path else part
    ours = f"{end}.{ours}" if "products" in path else ours
    expert = path[-2] if LOCAL in path else ""
    kinds = [kind for kind in ("experts", "shared_experts") if kind in path]
    ours = ".".join([*kinds, ours])
    if kinds and ours not in scheme.parts:
        where = f"model.modules.{module.name}.experts"
        raise IncompatibleError(f"{where}: checkpoint={config.checkpoint} has no {ours}")
    if ours not in scheme.parts:
        index = ours.rpartition(".")[2]
        raise IncompatibleError(
            f"model.modules.{module.name}.{end}_gemms: checkpoint={config.checkpoint} has no product {index}"
        )
    block = scheme.block.format(int(layer) - 1) if 0 < int(layer) < len(module.layers) - 1 else ""
    names = [f"{block}{name.format(expert)}.{part if path else 'weight'}" for name in scheme.parts[ours]]
    if ours == "linear_qkv":
        # megatron-core stores each group of queries with its key and value.
        groups = full.reshape(config.num_kv_heads, -1, config.head_dim, *full.shape[1:])
        heads = [groups.transpose(0, 1)] if len(names) == 1 else [groups[:, :-2], groups[:, -2], groups[:, -1]]
        parts = {name: (rows, (-1, *full.shape[1:])) for name, rows in zip(names, heads, strict=True)}
        if is_whisper and part == "bias":
            # Whisper's keys have no bias; one would shift all scores of a query equally, and so change nothing.
            del parts[names[1]]
        return parts
    views = full.chunk(len(names))
    if ours.startswith("embed.") and part == "weight":
        side = model.tokens.patch_pixels
        taps = (3, side, side) if config.checkpoint == "siglip" else (3, -1, side, side)
        # Convolutions over frames have their taps before channels in a stage, and behind them in a checkpoint.
        kernel = full.reshape(len(full), *((3, -1) if is_whisper else taps))
        views = (kernel.transpose(1, 2) if is_whisper else kernel,)
    return {name: (view, tuple(view.shape)) for name, view in zip(names, views, strict=True)}


def expected_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint of a model must have, by name."""
    groups = StageGroups(ALONE, ALONE, ALONE)
    shapes = {}
    for module in model.modules:
        layers = range(len(module.layers))
        kernel = AttentionKernel.SDPA
        with torch.device("meta"):
            stage = Stage(module, layers, groups, dtype=torch.float32, recompute=False, attention=kernel)
        for named in named_parameters(stage):
            for name, (view, shape) in published_parts(model, module, named, named.parameter).items():
                shapes[name] = tuple(view.reshape(shape).shape)
    return shapes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The safetensors files of a folder; ``stored`` are file, name there and shape of each tensor by its hub name."""

    folder: Path
    stored: Mapping[str, tuple[Path, str, tuple[int, ...]]]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """The checkpoint of a folder; ``UserError`` if there is none, or it is damaged."""
        stored = {}
        for file in sorted(folder.glob("*.safetensors")):
            with _opened(file) as content:
                for name in content.keys():  # noqa: SIM118
                    stored[hub_name(name)] = file, name, tuple(content.get_slice(name).get_shape())
        if not stored:
            raise UserError(f"harness.weights={folder}: has no tensors in *.safetensors")
        return cls(folder, stored)

    def tensor(self, name: str) -> Tensor:
        """A tensor by its hub name; ``UserError`` for a damaged file."""
        file, stored_name, _ = self.stored[name]
        with _opened(file) as content:
            values: Tensor = content.get_tensor(stored_name)
            return values


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise UserError(f"harness.weights={file.parent}: {file.name} is damaged ({error})") from error


def check_tensors(checkpoint: Checkpoint, model: ModelSpec) -> None:
    """Raise ``UserError`` that names tensors that are missing, unexpected or of another shape."""
    where = f"harness.weights={checkpoint.folder}"
    expected = expected_shapes(model)
    unused = {name for name in checkpoint.stored if UNUSED.fullmatch(name)}
    if any(module.config.tied_embeddings for module in model.modules):
        unused.add("lm_head.weight")
    missing = expected.keys() - checkpoint.stored.keys()
    unexpected = checkpoint.stored.keys() - expected.keys() - unused
    for names, problem in ((missing, "missing for"), (unexpected, "not in")):
        if names:
            more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
            raise UserError(f"{where}: {min(names)}{more} {problem} model={model.name}")
    for name, shape in expected.items():
        *_, given = checkpoint.stored[name]
        if given != shape:
            raise UserError(f"{where}: {name} has the shape {[*given]}, but model={model.name} needs {[*shape]}")


@torch.no_grad()
def load_weights(checkpoint: Checkpoint, model: ModelSpec, stage: Stage) -> None:
    """Fill a stage."""
    for named in named_parameters(stage):
        full = torch.zeros(named.full_shape)
        for name, (view, _) in published_parts(model, stage.module, named, full).items():
            view.copy_(checkpoint.tensor(name).view(view.shape))
        named.parameter.copy_(named.shard(full))
