"""Checkpoints of a training run: weights, optimizer states and the iteration, as safetensors and JSON.

They hold whole tensors, so a run goes on under any layout, by any strategy. The sampler needs no state: batches follow
from seed and iteration. A checkpoint counts once its ``meta.json`` is there, which says where all is.

Tensor parallelism cuts rows or columns of a parameter, in pieces where several matrices are one (gate and up);
distributed optimizers and FSDP cut what is left as if it were flat. A range of flat numbers is at most three boxes: the
end of a row, whole rows, the beginning of a row; a piece's border cuts a box in two. So every rank says which boxes of
the whole it holds.
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.base.files import write_atomically
from entrain_bench.train.messages.control import gather_json
from entrain_bench.train.modules import NamedParameter, named_parameters
from entrain_bench.train.running.sharded import ShardedStage, local_part
from entrain_bench.train.running.step import TrainedStage

META = "meta.json"
FORMAT = "entrain-bench checkpoint 3"
MOMENTS = ("exp_avg", "exp_avg_sq")
# Nothing else of a folder is removed with a checkpoint.
_FILES = (META, "rank_*.safetensors")
_DIGITS = 8

# Of what a rank has written.
FILE = "rank_{:05d}.safetensors"

# Of each tensor, by name: its shape, and of each box the rank that wrote it, its offsets and its shape.
Index = dict[str, dict[str, Any]]

Stages = Mapping[tuple[int, int], TrainedStage | ShardedStage]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run in a folder; the last one is kept, and what else is in the folder stays.

    A checkpoint must share ``identity`` with the run (model, seed and so on, by name), but not ``setup``, on which
    metrics depend (layout and strategy). ``control`` is of all ranks.
    """

    folder: Path
    identity: Mapping[str, str]
    setup: Mapping[str, str]
    control: dist.ProcessGroup

    def resume(self, stages: Stages, iterations: int) -> tuple[list[dict[str, float]], int]:
        """Read the newest whole checkpoint into the stages, if there is one; collective.

        Returns:
            Metrics of the iterations behind it, and how many of them, the first ones, had another setup.

        Raises:
            UserError: if it is damaged, of another model or run, or beyond the run's iterations.
        """
        found = self._own()
        if not found:
            return [], 0
        path, meta = found[-1]
        try:
            stored = dict(meta["identity"])
            index = dict(meta["tensors"])
            history = [dict(row) for row in meta["history"]]
            num_elsewhere = len(history) if meta["setup"] != dict(self.setup) else int(meta["num_elsewhere"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(path) from error
        for name, value in self.identity.items():
            if stored.get(name) != value:
                raise UserError(
                    f"harness.checkpoint_dir={self.folder}: its checkpoint has another {name} "
                    f"({_short(stored.get(name))}; this run has {_short(value)}). Choose another folder"
                )
        require(iterations >= len(history), "iterations", iterations, f"at least the {len(history)} of the checkpoint")
        try:
            read_boxes(path, index, state_of(stages, all_copies=True))
        except Exception as error:
            raise self._damaged(path) from error
        return history, num_elsewhere

    def save(self, iteration: int, stages: Stages, history: list[Any], num_elsewhere: int) -> None:
        """Write the state after an iteration, drop older ones; collective. ``ExecutionError`` if it cannot."""
        path = self.folder / f"iteration_{iteration:0{_DIGITS}d}"
        for trained in stages.values():
            trained.gather_weights()
        try:
            path.mkdir(parents=True, exist_ok=True)
            index = write_boxes(path, state_of(stages), self.control)
        except (OSError, SafetensorError) as error:
            raise ExecutionError(f"harness.checkpoint_dir={self.folder}: cannot be written ({error})") from error
        dist.barrier()
        if dist.get_rank() == 0:
            meta = {
                "format": FORMAT,
                "identity": dict(self.identity),
                "setup": dict(self.setup),
                "num_elsewhere": num_elsewhere,
                "iteration": iteration,
                "history": history,
                "tensors": index,
            }
            write_atomically(path / META, json.dumps(meta).encode())
            for old, _ in self._own():
                if old != path:
                    _remove(old)

    def _own(self) -> list[tuple[Path, dict[str, Any]]]:
        """Whole checkpoints of this format, the oldest first, with what their ``meta.json`` says."""
        found = []
        for file in sorted(self.folder.glob(f"iteration_{'[0-9]' * _DIGITS}/{META}")):
            try:
                meta = dict(json.loads(file.read_text()))
            except (ValueError, TypeError, OSError) as error:
                raise self._damaged(file.parent) from error
            if meta.get("format") == FORMAT:
                found.append((file.parent, meta))
            elif "identity" in meta:
                raise UserError(
                    f"harness.checkpoint_dir={self.folder}: {file.parent.name} was written by another version. "
                    "Choose another folder"
                )
        return found

    def _damaged(self, path: Path) -> UserError:
        return UserError(f"harness.checkpoint_dir={self.folder}: checkpoint {path.name} is damaged. Remove it")


def state_of(stages: Stages, *, all_copies: bool = False) -> dict[str, Boxes]:
    """Return the content of a checkpoint: this rank's boxes, by a name that replicas of the same tensor share.

    Parameters in fp32, whatever the model's type, their moments, and the number of optimizer steps. States that do not
    exist yet are made, so that the same call serves saving and loading. With ``all_copies`` the second copy of a tied
    embedding is there, too, and weights that the optimizer has no view of, which are read from the same values.
    """
    state: dict[str, Boxes] = {}

    def hold(name: str, held: Boxes) -> None:
        state.setdefault(name, Boxes(held.shape, [])).boxes.extend(held.boxes)

    for trained in stages.values():
        for named in named_parameters(trained.stage):
            part = trained.part_of(named.parameter)
            own = named.parameter.data
            is_second = trained.stage.held.start > 0 and named.key == f"{trained.stage.module.name}.0.words.weight"
            if is_second and not all_copies:
                continue
            if all_copies and isinstance(trained, TrainedStage):
                hold(f"{named.key}.value", boxes_of(named, own, 0))
            if part is None:
                continue
            hold(f"{named.key}.value", boxes_of(named, part.value, part.start))
            if part.states is None:
                continue
            for moment in MOMENTS:
                values = part.states.setdefault(moment, torch.zeros_like(part.owner))
                hold(f"{named.key}.{moment}", boxes_of(named, local_part(values), part.start))
            step = part.states.setdefault("step", torch.zeros((), dtype=torch.float32))
            hold("step", Boxes((1,), [Box((0,), step.view(1))]))
    return state


def _remove(path: Path) -> None:
    """Remove a checkpoint's own files, the one that makes it count first, and its folder if nothing else is there."""
    for pattern in _FILES:
        for file in path.glob(pattern):
            file.unlink()
    if not any(path.iterdir()):
        path.rmdir()


def _short(text: str | None, most: int = 120) -> str:
    text = str(text)
    return text if len(text) <= most else text[: most - 3] + "..."


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
    load = [0] * control.size()
    index = Index()
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
