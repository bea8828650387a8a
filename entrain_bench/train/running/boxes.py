"""Parts of a whole tensor, whatever layout cut it: what a checkpoint's files hold of it.

Tensor parallelism cuts rows or columns of a parameter, in pieces where several matrices are one (gate and up);
distributed optimizers and FSDP cut what is left as if it were flat. A range of flat numbers is at most three boxes: the
end of a row, whole rows, the beginning of a row; a piece's border cuts a box in two. So every rank says which boxes of
the whole it holds, and a checkpoint is read under any other layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from entrain_bench.train.messages.control import gather_json
from entrain_bench.train.modules import NamedParameter

# Of what a rank has written.
FILE = "rank_{:05d}.safetensors"

# Of each tensor, by name: its shape, and of each box the rank that wrote it, its offsets and its shape.
Index = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Numbers that lie together in a whole tensor, the first at ``offsets``; ``values`` is a view."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """A whole tensor's shape with the boxes that this rank holds."""

    shape: tuple[int, ...]
    boxes: list[Box]


def write_boxes(folder: Path, state: Mapping[str, Boxes], control: dist.ProcessGroup) -> Index:
    """Write what all ranks hold, each box once, by the rank that has least to write; collective."""
    own = [(name, whole.shape, box.offsets, box.values.shape) for name, whole in state.items() for box in whole.boxes]
    holders: dict[str, list[int]] = {}
    for rank, boxes in enumerate(gather_json(own, control)):
        for box in boxes:
            holders.setdefault(json.dumps(box), []).append(rank)
    load, index = [0] * control.size(), Index()
    for box, ranks in holders.items():
        name, shape, offsets, size = json.loads(box)
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += prod(size)
        index.setdefault(name, {"shape": shape, "boxes": []})["boxes"].append([writer, offsets, size])
    tensors = {
        _key(name, box.offsets): box.values.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, whole in state.items()
        for box in whole.boxes
        if [control.rank(), [*box.offsets], [*box.values.shape]] in index[name]["boxes"]
    }
    if tensors:
        path = folder / FILE.format(control.rank())
        save_file(tensors, path)
        path.chmod(0o644)  # as other files are; safetensors makes them for their owner alone
    return index


def read_boxes(folder: Path, index: Index, state: Mapping[str, Boxes]) -> None:
    """Read into what this rank holds; raises if any file is missing or damaged, or something is nowhere."""
    with ExitStack() as stack:
        writers = {writer for whole in index.values() for writer, _, _ in whole["boxes"]}
        files = {rank: stack.enter_context(safe_open(folder / FILE.format(rank), "pt")) for rank in sorted(writers)}
        for name, whole in state.items():
            if (*index[name]["shape"],) != whole.shape:
                raise ValueError(f"{name} has another shape")
            for box in whole.boxes:
                missing = box.values.numel()
                for writer, offsets, size in index[name]["boxes"]:
                    if overlap := _overlap(box, offsets, size):
                        here, there = overlap
                        part = files[writer].get_slice(_key(name, offsets))[there]
                        box.values[here].copy_(part)
                        missing -= part.numel()
                if missing:
                    raise ValueError(f"{name} is not whole")


def _overlap(box: Box, offsets: Sequence[int], size: Sequence[int]) -> tuple[tuple[slice, ...], ...] | None:
    """Where a box and another one overlap, in both, if they do."""
    dimensions = zip(box.offsets, box.values.shape, offsets, size, strict=True)
    spans = [(max(one, other), min(one + own, other + others)) for one, own, other, others in dimensions]
    if any(low >= high for low, high in spans):
        return None
    return tuple(
        tuple(slice(low - first, high - first) for (low, high), first in zip(spans, firsts, strict=True))
        for firsts in (box.offsets, offsets)
    )


def _key(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def boxes_of(named: NamedParameter, values: Tensor, start: int) -> Boxes:
    """The boxes of numbers of a parameter's shape: ``values`` are those of its shard, flat, from ``start`` on."""
    flat = values.view(-1)
    shape = tuple(named.parameter.shape)
    if len(shape) == 1:
        cuts = _cuts(start, start + len(flat), shape[0], named, 0)
        return Boxes(named.full_shape, [Box((row,), flat[low - start : high - start]) for low, high, row in cuts])
    width = shape[1]
    boxes = []
    for first, last, left, right in _rectangles(start, start + len(flat), width):
        for top, bottom, row in _cuts(first, last, shape[0], named, 0):
            rows = flat[top * width + left - start : (bottom - 1) * width + right - start]
            block = rows.view(bottom - top, -1) if right - left == width else rows.view(1, -1)
            for low, high, column in _cuts(left, right, width, named, 1):
                boxes.append(Box((row, column), block[:, low - left : high - left]))
    return Boxes(named.full_shape, boxes)


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """First row, last, first column, last (each last not included) of a flat range of rows of ``width``."""
    row, column = divmod(start, width)
    if column and start < stop:
        end = min(width, column + stop - start)
        yield row, row + 1, column, end
        start += end - column
    whole = (stop - start) // width
    if whole > 0:
        yield start // width, start // width + whole, 0, width
        start += whole * width
    if start < stop:
        yield start // width, start // width + 1, 0, stop - start


def _cuts(start: int, stop: int, size: int, named: NamedParameter, dim: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of a shard's dimension that are ranges of the whole one's: first, last (not included), place there."""
    if named.dim != dim:
        yield start, stop, start
        return
    each = size // named.stride
    while start < stop:
        piece, within = divmod(start, each)
        end = min(stop, (piece + 1) * each)
        yield start, end, (piece * named.tp + named.tp_rank) * each + within
        start = end
