"""Stages filled from a published checkpoint; each rank reads the rows and columns that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from entrain_bench.base.errors import UserError
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.modules import NamedParameter, Stage, named_parameters
from entrain_bench.train.modules.positions import sinusoids
from entrain_bench.train.weights.checkpoint import Checkpoint
from entrain_bench.train.weights.naming import Scheme, Stored, scheme_of, stored_tensors

# Sinusoids that a checkpoint stores may be rounded to bfloat16.
_ROUNDED = 2.0**-8

# Beginnings of the names of each root, by module and root.
Roots = dict[tuple[str, str], str]


def load_weights(checkpoint: Checkpoint, model: ModelSpec, stages: Iterable[Stage], roots: Roots) -> None:
    """Fill stages."""
    for stage in stages:
        stored = stored_tensors(model, stage.module)
        for named in named_parameters(stage):
            found = stored[named.key.removeprefix(f"{stage.module.name}.")]
            with torch.no_grad():
                named.parameter.copy_(_shard(checkpoint, named, found, stage.module, roots))


def check_tensors(checkpoint: Checkpoint, model: ModelSpec) -> Roots:
    """Check that a checkpoint has the tensors of a model, and no others; only headers are read.

    Returns:
        Beginnings of the names of each root.

    Raises:
        UserError: for tensors that are missing, unexpected or of another shape, by name.
    """
    where, roots = f"harness.weights={checkpoint.folder}", Roots()
    for module in model.modules:
        scheme = scheme_of(module)
        stored = list(stored_tensors(model, module).values())
        needed = sorted({name for one in stored for name in one.names})
        for root, beginnings in scheme.roots.items():
            if rests := [name.removeprefix(f"{root}:") for name in needed if name.startswith(f"{root}:")]:
                roots[module.name, root] = max(beginnings, key=lambda each: _count(checkpoint, each, rests))
    expected = expected_shapes(model, roots)
    missing = sorted(expected.keys() - checkpoint.files.keys())
    if missing:
        raise UserError(f"{where}: {_listed(missing)} missing for model={model.name}")
    unexpected = sorted(checkpoint.files.keys() - expected.keys() - {*_unused(checkpoint, model, roots)})
    if unexpected:
        raise UserError(f"{where}: {_listed(unexpected)} not in model={model.name}")
    for name, shape in expected.items():
        if (given := checkpoint.shape(name)) != shape:
            raise UserError(f"{where}: {name} has the shape {[*given]}, model={model.name} needs {[*shape]}")
    _check_positions(checkpoint, model, roots)
    return roots


def expected_shapes(model: ModelSpec, roots: Mapping[tuple[str, str], str]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint of a model must have, by name."""
    return {
        full_name(module, name, roots): stored.shape_of(name)
        for module in model.modules
        for stored in stored_tensors(model, module).values()
        for name in stored.names
    }


def full_name(module: ModuleSpec, name: str, roots: Mapping[tuple[str, str], str]) -> str:
    """The name of a tensor in a checkpoint."""
    root, _, rest = name.partition(":")
    return roots[module.name, root] + rest


def default_roots(model: ModelSpec) -> Roots:
    """Beginnings of names where no checkpoint was read."""
    return {
        (module.name, root): beginnings[0]
        for module in model.modules
        for root, beginnings in scheme_of(module).roots.items()
    }


def _count(checkpoint: Checkpoint, beginning: str, rests: list[str]) -> int:
    return sum(beginning + rest in checkpoint.files for rest in rests)


def _unused(checkpoint: Checkpoint, model: ModelSpec, roots: Roots) -> Iterator[str]:
    for module in model.modules:
        scheme: Scheme = scheme_of(module)
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
        if module.config.checkpoint != "whisper_encoder":
            continue
        name = full_name(module, "body:embed_positions.weight", roots)
        if name not in checkpoint.files:
            continue
        rows, width = checkpoint.shape(name)
        given = checkpoint.rows(name, 0, rows).float()
        if width != module.config.hidden_size or not torch.allclose(
            given, sinusoids(torch.arange(rows), width), rtol=0.0, atol=_ROUNDED
        ):
            raise UserError(
                f"harness.weights={checkpoint.folder}: {name} holds other positions than Whisper's sinusoids"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"{names[0]}{more}"


def _shard(checkpoint: Checkpoint, named: NamedParameter, stored: Stored, module: ModuleSpec, roots: Roots) -> Tensor:
    """This rank's shard of a parameter."""
    if stored.kernel:
        return named.shard(_flat(_rows(checkpoint, stored, 0, named.full_shape[0], None, module, roots), stored))
    if named.dim != 1:
        pieces = _pieces(named, named.full_shape[0]) if named.dim == 0 else [(0, named.full_shape[0])]
        return torch.cat([_rows(checkpoint, stored, *piece, None, module, roots) for piece in pieces])
    rows = named.full_shape[0]
    pieces = _pieces(named, named.full_shape[1])
    return torch.cat([_rows(checkpoint, stored, 0, rows, piece, module, roots) for piece in pieces], dim=1)


def _pieces(named: NamedParameter, size: int) -> list[tuple[int, int]]:
    """What a rank has of the split dimension: a piece of each stride."""
    each = size // (named.stride * named.tp)
    return [(piece * each, (piece + 1) * each) for piece in range(named.tp_rank, named.stride * named.tp, named.tp)]


def _rows(
    checkpoint: Checkpoint,
    stored: Stored,
    start: int,
    stop: int,
    columns: tuple[int, int] | None,
    module: ModuleSpec,
    roots: Roots,
) -> Tensor:
    """Rows of a whole parameter, as stored."""
    found, at = [], 0
    for part in stored.parts:
        low, high = max(start - at, 0), min(stop - at, part.stop - part.start)
        at += part.stop - part.start
        if low >= high:
            continue
        if not part.name:
            found.append(torch.zeros(high - low))
            continue
        name = full_name(module, part.name, roots)
        found.append(checkpoint.rows(name, part.start + low, part.start + high, columns))
    return torch.cat([rows.to(found[0].dtype) for rows in found])


def _flat(rows: Tensor, stored: Stored) -> Tensor:
    """Kernels of a convolution as rows of a product's weight."""
    return (rows.transpose(1, 2) if stored.taps_first else rows).reshape(len(rows), stored.width)
