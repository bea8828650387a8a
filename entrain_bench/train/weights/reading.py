"""Stages filled from safetensors files; each rank reads the rows and columns that it holds, and unpickles nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from entrain_bench.base.errors import UserError
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.modules import NamedParameter, Stage, named_parameters
from entrain_bench.train.modules.positions import sinusoids
from entrain_bench.train.weights.naming import Roots, Stored, full_name, scheme_of, stored_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Sinusoids that a checkpoint stores may be rounded to bfloat16.
_ROUNDED = 2.0**-8


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

    def rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> Tensor:
        """Rows of a tensor, or only some columns of them; no more is read."""
        with self._tensor(name) as part:
            values: Tensor = part[start:stop] if columns is None else part[start:stop, columns[0] : columns[1]]
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
        named.parameter.copy_(_shard(checkpoint, named, stored[named.key.removeprefix(f"{stage.module.name}.")]))


def check_tensors(checkpoint: Checkpoint, model: ModelSpec) -> Roots:
    """Check that a checkpoint has the tensors of a model, and no others; return the prefix of each root.

    Only headers are read. ``UserError`` names tensors that are missing, unexpected or of another shape.
    """
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
    _check_positions(checkpoint, model, roots)
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


def _check_positions(checkpoint: Checkpoint, model: ModelSpec, roots: Roots) -> None:
    """Raise ``UserError`` if stored positions are others than the sinusoids that take their place."""
    for module in model.modules:
        name = full_name(module, "body:embed_positions.weight", roots)
        if module.config.checkpoint != "whisper_encoder" or name not in checkpoint.files:
            continue
        rows, width = checkpoint.shape(name)
        given = checkpoint.rows(name, 0, rows).float()
        if width != module.config.hidden_size or not torch.allclose(
            given, sinusoids(torch.arange(rows), width), rtol=0.0, atol=_ROUNDED
        ):
            raise UserError(f"harness.weights={checkpoint.folder}: {name} differs from Whisper's sinusoidal positions")


def _shard(checkpoint: Checkpoint, named: NamedParameter, stored: Stored) -> Tensor:
    """Read this rank's shard of a parameter."""
    rows = named.full_shape[0]
    if stored.kernel:
        whole = _rows(checkpoint, stored, 0, rows)
        return named.shard((whole.transpose(1, 2) if stored.taps_first else whole).reshape(rows, stored.width))
    if named.dim < 0:
        return _rows(checkpoint, stored, 0, rows)
    each = named.full_shape[named.dim] // (named.stride * named.tp)
    pieces = [(place * each, (place + 1) * each) for place in range(named.tp_rank, named.stride * named.tp, named.tp)]
    if named.dim == 0:
        return torch.cat([_rows(checkpoint, stored, *piece) for piece in pieces])
    return torch.cat([_rows(checkpoint, stored, 0, rows, piece) for piece in pieces], dim=1)


def _rows(
    checkpoint: Checkpoint, stored: Stored, start: int, stop: int, columns: tuple[int, int] | None = None
) -> Tensor:
    """Rows of a whole parameter, as stored."""
    pieces = []
    at = 0
    for part in stored.parts:
        low = max(start - at, 0)
        high = min(stop - at, part.stop - part.start)
        at += part.stop - part.start
        if low < high:
            first = part.start + low
            last = part.start + high
            pieces.append(checkpoint.rows(part.name, first, last, columns) if part.name else torch.zeros(high - low))
    return torch.cat([rows.to(pieces[0].dtype) for rows in pieces])
