"""Stages read from and written to safetensors files with Hugging Face's names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from entrain_bench.base.errors import ExecutionError, UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.modules import Stage, StageGroups, named_parameters
from entrain_bench.train.modules.positions import sinusoids
from entrain_bench.train.weights.naming import Roots, Stored, full_name, scheme_of, stored_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WHISPER_POSITIONS = 1500  # 30 s (arXiv:2212.04356, section 2.2)
# Positions that checkpoints store and that are no parameter of a stage.
_SINUSOIDS = "0.sinusoids"


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
