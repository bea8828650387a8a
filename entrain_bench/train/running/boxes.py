"""Parts of a whole tensor, whatever layout cut it: what ``torch.distributed.checkpoint`` writes and reads of it.

Tensor parallelism cuts rows or columns of a parameter, in pieces where several matrices are one (gate and up);
distributed optimizers and FSDP cut what is left as if it were flat. A range of flat numbers is at most three boxes: the
end of a row, whole rows, the beginning of a row; a piece's border cuts a box in two. So every rank says which boxes of
the whole it holds, and a checkpoint is read under any other layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from entrain_bench.train.modules import NamedParameter


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Numbers that lie together in a whole tensor.

    ``offsets`` are of the first one in each dimension; ``values`` is a view.
    """

    offsets: tuple[int, ...]
    values: Tensor


class Boxes(torch.Tensor):
    """A whole tensor's size with the boxes that this rank holds; nothing but them takes memory."""

    boxes: Sequence[Box]

    @staticmethod
    def of(size: tuple[int, ...], boxes: Sequence[Box]) -> Boxes:
        """The boxes of a tensor of a size."""
        whole: Boxes = torch.empty(()).expand(size).as_subclass(Boxes)
        whole.boxes = boxes
        return whole

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(box.values), torch.Size(self.shape)
                ),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), box.values.shape) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box.values for box in self.boxes if torch.Size(box.offsets) == index.offset)


def boxes_of(named: NamedParameter, values: Tensor, start: int) -> Boxes:
    """The boxes of a parameter, or of anything of its shape, whose flat numbers from ``start`` on this rank holds.

    Args:
        named: the parameter.
        values: consecutive numbers of its shard, as they lie there.
        start: place of the first of them in the shard.
    """
    flat = values.view(-1)
    shape = named.shard_shape
    if len(shape) == 1:
        cuts = _cuts(start, start + len(flat), shape[0], named, 0)
        return Boxes.of(named.full_shape, [Box((row,), flat[low - start : high - start]) for low, high, row in cuts])
    width = shape[1]
    boxes = []
    for first, last, left, right in _rectangles(start, start + len(flat), width):
        for top, bottom, row in _cuts(first, last, shape[0], named, 0):
            rows = flat[top * width + left - start : (bottom - 1) * width + right - start]
            block = rows.view(bottom - top, -1) if right - left == width else rows.view(1, -1)
            for low, high, column in _cuts(left, right, width, named, 1):
                boxes.append(Box((row, column), block[:, low - left : high - left]))
    return Boxes.of(named.full_shape, boxes)


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
