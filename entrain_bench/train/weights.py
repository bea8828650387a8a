"""Published weights: safetensors checkpoints with Hugging Face's names, read into stages and written from them.

Names are of ``transformers`` (5.23). ``Roots`` says which prefix a checkpoint has for a name's root.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import ExecutionError, IncompatibleError, UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import ModuleConfig
from entrain_bench.train.modules import Stage, StageGroups, named_parameters
from entrain_bench.train.modules.blocks import AttentionKernel
from entrain_bench.train.modules.packing import sinusoids

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WHISPER_POSITIONS = 1500  # 30 s (arXiv:2212.04356, section 2.2)
# Positions that checkpoints store and that are no parameter of a stage.
_SINUSOIDS = "0.sinusoids"
# Prefix of names by module and root.
Roots = dict[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored tensors of a parameter."""

    shapes: Mapping[str, tuple[int, ...]]  # of stored tensors by name; a convolution's have channels before taps
    order: IntArray | None = None  # row of all stored tensors for each of the parameter's, -1 for zeros; None: the same
    taps_first: bool = False  # whether the parameter has a convolution's taps before its channels


@dataclass(frozen=True, slots=True)
class Scheme:
    """How checkpoints of an architecture name a module's tensors."""

    roots: Mapping[str, tuple[str, ...]]  # possible prefixes of each root; the first is the default
    block: str  # prefix of a block's names, with its number from 0
    parts: Mapping[str, tuple[str, ...]]  # stored names of our parts; one part may be stored as several
    unused: tuple[str, ...] = ()  # prefixes of tensors that the model does not have


_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
SCHEMES: dict[str, Scheme] = {
    "llama": Scheme(
        roots={
            "body": ("model.", "model.language_model.", "language_model.model."),
            "head": ("lm_head.", "language_model.lm_head."),
        },
        block="body:layers.{}.",
        parts={
            "input_layernorm": ("input_layernorm",),
            "pre_mlp_layernorm": ("post_attention_layernorm",),
            "linear_qkv": _ATTENTION,
            "linear_proj": ("self_attn.o_proj",),
            "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "linear_fc2": ("mlp.down_proj",),
            "words": ("body:embed_tokens",),
            "norm": ("body:norm",),
            "logits": ("head:",),
        },
        unused=("rotary_emb.inv_freq",),
    ),
    "qwen25vl_vision": Scheme(
        roots={"body": ("visual.", "model.visual.")},
        block="body:blocks.{}.",
        parts={
            "input_layernorm": ("norm1",),
            "pre_mlp_layernorm": ("norm2",),
            "linear_qkv": ("attn.qkv",),
            "linear_proj": ("attn.proj",),
            "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "linear_fc2": ("mlp.down_proj",),
            "embed.0": ("body:patch_embed.proj",),
            "norm": ("body:merger.ln_q",),
            "head.0": ("body:merger.mlp.0",),
            "head.1": ("body:merger.mlp.2",),
        },
    ),
    "siglip": Scheme(
        roots={
            "body": ("vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower."),
            "projector": _PROJECTOR,
        },
        block="body:encoder.layers.{}.",
        parts={
            "input_layernorm": ("layer_norm1",),
            "pre_mlp_layernorm": ("layer_norm2",),
            "linear_qkv": _ATTENTION,
            "linear_proj": ("self_attn.out_proj",),
            "linear_fc1": ("mlp.fc1",),
            "linear_fc2": ("mlp.fc2",),
            "embed.0": ("body:embeddings.patch_embedding",),
            "positions": ("body:embeddings.position_embedding",),
            "head.0": ("projector:linear_1",),
            "head.1": ("projector:linear_2",),
        },
        # LLaVA-OneVision's LLM sees no end of a row of patches here.
        unused=("head.", "post_layernorm.", "image_newline"),
    ),
    "whisper_encoder": Scheme(
        roots={"body": ("audio_tower.", "model.audio_tower."), "projector": _PROJECTOR},
        block="body:layers.{}.",
        parts={
            "input_layernorm": ("self_attn_layer_norm",),
            "pre_mlp_layernorm": ("final_layer_norm",),
            "linear_qkv": _ATTENTION,
            "linear_proj": ("self_attn.out_proj",),
            "linear_fc1": ("fc1",),
            "linear_fc2": ("fc2",),
            "embed.0": ("body:conv1",),
            "embed.1": ("body:conv2",),
            "norm": ("body:layer_norm",),
            "head.0": ("projector:linear",),
        },
        unused=("embed_positions.weight",),
    ),
}


def scheme_of(module: ModuleSpec) -> Scheme:
    """How a module's tensors are named; ``IncompatibleError`` for an architecture that has no scheme."""
    if not module.config.checkpoint:
        raise IncompatibleError(f"model.modules.{module.name}.checkpoint: missing, so published weights cannot be read")
    return SCHEMES[module.config.checkpoint]


def default_roots(model: ModelSpec) -> Roots:
    """Prefixes of names if no checkpoint was read."""
    return {
        (module.name, root): prefixes[0]
        for module in model.modules
        for root, prefixes in scheme_of(module).roots.items()
    }


def full_name(module: ModuleSpec, name: str, roots: Roots) -> str:
    """A scheme's name as a checkpoint has it; a root that is not given stays as it is."""
    root, colon, rest = name.rpartition(":")
    return roots.get((module.name, root), root + colon) + rest


class _Alone:
    """The group of one rank, in which a stage is described before there are others."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def stored_tensors(model: ModelSpec, module: ModuleSpec, roots: Roots) -> dict[str, Stored]:
    """Stored tensors of every parameter of a module, by ``named_parameters``'s key without the module's name."""
    scheme = scheme_of(module)
    config = module.config
    group: Any = _Alone()
    layers = range(len(module.layers))
    with torch.device("meta"):
        kernel = AttentionKernel.SDPA
        groups = StageGroups(group, group, group)
        stage = Stage(module, layers, groups, dtype=torch.float32, recompute=False, attention=kernel)
    stored = dict[str, Stored]()
    for named in named_parameters(stage):
        key = named.key.removeprefix(f"{module.name}.")
        layer, *path, part = key.split(".")
        ours = path[-1] if path else part
        is_end = int(layer) in (0, layers[-1])
        end = "embed" if layer == "0" else "head"
        if "products" in path:
            ours = f"{end}.{ours}"
        if ours not in scheme.parts:
            index = ours.rpartition(".")[2]
            raise IncompatibleError(
                f"model.modules.{module.name}.{end}_gemms: checkpoint={config.checkpoint} has no product {index}"
            )
        block = "" if is_end else scheme.block.format(int(layer) - 1)
        prefixes = [full_name(module, block + name, roots) for name in scheme.parts[ours]]
        # The name of the head is empty, so its prefix ends in the dot.
        suffix = part if path else "weight"
        names = [f"{prefix}{'' if prefix.endswith(('.', ':')) else '.'}{suffix}" for prefix in prefixes]
        if ours == "linear_qkv":
            stored[key] = _heads(config, names, part)
            continue
        rows, *row = named.full_shape
        is_kernel = ours.startswith("embed.") and part == "weight"
        shape = (rows // len(names), *(_kernel(model, config.checkpoint, row[0]) if is_kernel else row))
        taps_first = is_kernel and config.checkpoint == "whisper_encoder"
        stored[key] = Stored(dict.fromkeys(names, shape), taps_first=taps_first)
    return stored


def _heads(config: ModuleConfig, names: Sequence[str], part: str) -> Stored:
    """Queries, keys and values; megatron-core stores each group of queries with its key and value."""
    groups = config.num_kv_heads
    head = config.head_dim
    sizes = [config.num_heads * head, groups * head, groups * head]
    missing = part == "bias" and config.checkpoint == "whisper_encoder"
    if missing:
        # Whisper's keys have no bias; one would shift all scores of a query equally, and so change nothing.
        names = (names[0], names[2])
        sizes[1] = 0
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if missing:
        rows[1] = np.full(groups * head, -1)
    order = np.concatenate([kind.reshape(groups, -1) for kind in rows], axis=1).ravel()
    row = (config.hidden_size,) if part == "weight" else ()
    if len(names) == 1:
        return Stored({names[0]: (sum(sizes), *row)}, order)
    stored = [size for size in sizes if size]
    return Stored({name: (size, *row) for name, size in zip(names, stored, strict=True)}, order)


def _kernel(model: ModelSpec, checkpoint: str, width: int) -> tuple[int, ...]:
    if checkpoint == "whisper_encoder":
        return width // 3, 3
    side = model.tokens.patch_pixels
    frames = () if checkpoint == "siglip" else (width // (3 * side * side),)
    return 3, *frames, side, side


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in Hugging Face's format: a folder, and the file of each tensor, by name."""

    folder: Path
    files: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """The checkpoint of a folder, single or by its index; ``UserError`` if there is none, or it is damaged."""
        index = folder / INDEX
        if not index.is_file():
            single = folder / SINGLE
            if not single.is_file():
                raise UserError(f"harness.weights={folder}: has neither {SINGLE} nor {INDEX}")
            try:
                return cls(folder, dict.fromkeys(_opened(single).keys(), single))
            except (SafetensorError, OSError) as error:
                raise UserError(f"harness.weights={folder}: {SINGLE} is damaged ({error})") from error
        try:
            files = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"harness.weights={folder}: {INDEX} is damaged") from error
        for file in sorted({*files.values()}):
            if Path(file).name != file or not (folder / file).is_file():
                raise UserError(f"harness.weights={folder}: {INDEX} names {file}, which is not in the folder")
        return cls(folder, {name: folder / file for name, file in files.items()})

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; ``UserError`` for a damaged file, or one without the tensor."""
        with self._tensor(name) as part:
            return tuple(part.get_shape())

    def tensor(self, name: str) -> Tensor:
        """A tensor; raises as ``shape``."""
        with self._tensor(name) as stored:
            values: Tensor = stored[:]
            return values

    @contextmanager
    def _tensor(self, name: str) -> Iterator[Any]:
        file = self.files[name]
        try:
            yield _opened(file).get_slice(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"harness.weights={self.folder}: {file.name} is damaged ({name} cannot be read)") from error


@cache
def _opened(file: Path) -> Any:
    """An open file, mapped into memory until ``close_files``."""
    return safe_open(file, framework="pt")


def close_files() -> None:
    """Close the files that reading has opened."""
    _opened.cache_clear()


@torch.no_grad()
def load_weights(checkpoint: Checkpoint, model: ModelSpec, stage: Stage, roots: Roots) -> None:
    """Fill a stage."""
    stored = stored_tensors(model, stage.module, roots)
    for named in named_parameters(stage):
        tensors = stored[named.key.removeprefix(f"{stage.module.name}.")]
        named.parameter.copy_(named.shard(_whole(checkpoint, tensors)))


def check_tensors(checkpoint: Checkpoint, model: ModelSpec) -> Roots:
    """Return the prefix of each root; ``UserError`` names tensors that are missing, unexpected or of another shape."""
    where = f"harness.weights={checkpoint.folder}"
    roots = Roots()
    for module in model.modules:
        needed = {name for stored in stored_tensors(model, module, {}).values() for name in stored.shapes}
        for root, prefixes in scheme_of(module).roots.items():
            if rests := [name.removeprefix(f"{root}:") for name in needed if name.startswith(f"{root}:")]:
                counts = [sum(prefix + rest in checkpoint.files for rest in rests) for prefix in prefixes]
                roots[module.name, root] = prefixes[counts.index(max(counts))]
    expected = expected_shapes(model, roots)
    missing = expected.keys() - checkpoint.files.keys()
    unexpected = checkpoint.files.keys() - expected.keys() - {*_unused(checkpoint, model, roots)}
    for names, problem in ((missing, "missing for"), (unexpected, "not in")):
        if names:
            more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
            raise UserError(f"{where}: {min(names)}{more} {problem} model={model.name}")
    for name, shape in expected.items():
        if (given := checkpoint.shape(name)) != shape:
            raise UserError(f"{where}: {name} has the shape {[*given]}, but model={model.name} needs {[*shape]}")
    return roots


def expected_shapes(model: ModelSpec, roots: Roots) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint of a model must have, by name."""
    return {
        name: shape
        for module in model.modules
        for stored in stored_tensors(model, module, roots).values()
        for name, shape in stored.shapes.items()
    }


def _unused(checkpoint: Checkpoint, model: ModelSpec, roots: Roots) -> Iterator[str]:
    for module in model.modules:
        scheme = scheme_of(module)
        bodies = [roots[module.name, root] for root in scheme.roots if (module.name, root) in roots]
        begins = tuple(body + rest for body in bodies for rest in scheme.unused)
        inner = tuple(f".{rest}" for rest in scheme.unused)
        tied = module.config.tied_embeddings
        heads = tuple(f"{head}weight" for head in scheme.roots.get("head", ())) if tied else ()
        for name in checkpoint.files:
            if name.startswith(begins) or name.endswith(inner) or name in (*heads, *scheme.unused):
                yield name


def _whole(checkpoint: Checkpoint, stored: Stored) -> Tensor:
    tensors = [checkpoint.tensor(name) for name in stored.shapes]
    if stored.taps_first:
        tensors = [kernel.transpose(1, 2) for kernel in tensors]
    rows = torch.cat([tensor.flatten(1) if tensor.dim() > 1 else tensor for tensor in tensors])
    if stored.order is None:
        return rows
    order = torch.from_numpy(stored.order)
    # Only vectors have rows that are not stored.
    return rows[order] if rows.dim() > 1 else torch.where(order >= 0, rows[order], 0.0)


def save_weights(
    folder: Path,
    model: ModelSpec,
    layout: Layout,
    stages: Mapping[tuple[int, int], Stage],
    groups: Mapping[tuple[int, int], StageGroups],
    roots: Roots,
) -> None:
    """Write all stages into a folder, the index last; collective. ``ExecutionError`` if it cannot be written.

    Files of the same names are replaced, others stay. Stages have whole weights.
    """
    places = [(index, stage) for index, placed in enumerate(layout.modules) for stage in range(placed.pp)]
    files: dict[str, str] = {}
    num_weights = 0
    for number, (index, stage) in enumerate(places, start=1):
        module = model.modules[index]
        layers_per_stage = layout.modules[index].layers_per_stage
        stored = stored_tensors(model, module, roots)
        first = sum(layers_per_stage[:stage])
        if module.config.checkpoint == "whisper_encoder":
            positions = full_name(module, "body:embed_positions.weight", roots)
            stored[_SINUSOIDS] = Stored({positions: (WHISPER_POSITIONS, module.config.hidden_size)})
        # Both copies of a tied embedding belong to the first stage.
        layers = range(first, first + layers_per_stage[stage])
        stored = {key: tensors for key, tensors in stored.items() if int(key.partition(".")[0]) in layers}
        name = f"model-{number:05d}-of-{len(places):05d}.safetensors"
        if (index, stage) in stages:
            _write_stage(folder / name, stages[index, stage], groups[index, stage], stored)
        shapes = {name: shape for tensors in stored.values() for name, shape in tensors.shapes.items()}
        files |= dict.fromkeys(sorted(shapes), name)
        num_weights += sum(map(prod, shapes.values()))
    dist.barrier()
    if places[0] in stages and _is_first(groups[places[0]]):
        size = num_weights * stages[places[0]].config.params_dtype.itemsize
        content = {"metadata": {"total_size": size}, "weight_map": files}
        write_atomically(folder / INDEX, json.dumps(content, indent=2).encode())


def _is_first(groups: StageGroups) -> bool:
    return groups.dp_cp.rank() == groups.tp.rank() == 0


def _write_stage(path: Path, stage: Stage, groups: StageGroups, stored: Mapping[str, Stored]) -> None:
    """Write a stage's tensors on the first rank of it; collective over the ranks that hold it."""
    tensors: dict[str, Tensor] = {}
    for named in named_parameters(stage):
        key = named.key.removeprefix(f"{stage.module.name}.")
        if key not in stored:
            continue
        value = named.parameter.detach()
        # All data parallel ranks take part if weights are sharded; otherwise the first has them all.
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if groups.dp_cp.rank():
            continue
        if named.dim >= 0 and named.tp > 1:
            shards = [torch.empty_like(value) for _ in range(named.tp)]
            dist.all_gather(shards, value.contiguous(), group=groups.tp)
            value = named.assemble(shards)
        if groups.tp.rank() == 0:
            tensors |= _unpacked(stored[key], value.cpu())
    if not _is_first(groups):
        return
    if _SINUSOIDS in stored:
        table = sinusoids(torch.arange(WHISPER_POSITIONS), stage.module.config.hidden_size)
        tensors |= _unpacked(stored[_SINUSOIDS], table.to(stage.config.params_dtype))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}")
        save_file(tensors, beside, metadata={"format": "pt"})
        beside.chmod(0o644)  # for others to read, as the index is; safetensors makes files for their owner alone
        beside.replace(path)
    except OSError as error:
        raise ExecutionError(f"harness.save_weights={path.parent}: cannot be written ({error.strerror})") from error


def _unpacked(stored: Stored, full: Tensor) -> dict[str, Tensor]:
    rows = full
    if stored.order is not None:
        held = torch.from_numpy(stored.order[stored.order >= 0])
        rows = full.new_empty(len(held), *full.shape[1:])
        rows[held] = full[torch.from_numpy(stored.order >= 0)]
    tensors = {}
    sizes = [shape[0] for shape in stored.shapes.values()]
    for (name, shape), part in zip(stored.shapes.items(), torch.split(rows, sizes), strict=True):
        kernel = part.view(len(part), shape[-1], -1).transpose(1, 2) if stored.taps_first else part
        tensors[name] = kernel.reshape(shape).contiguous()
    return tensors
