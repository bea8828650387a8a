"""Packed sequences: who holds which tokens under context parallelism, who attends to whom, and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.specs.context_pieces import rows_of_ranks
from entrain_bench.specs.framework import PACK, SAMPLE
from entrain_bench.train.device import to_device


@dataclass(frozen=True, slots=True)
class StageGroups:
    """Process groups of this rank for one stage of one module; gradients of parameters are summed over ``dp_cp``.

    ``weights_tp`` is the TP of the weights that a wider TP takes slices of: rank ``p`` computes with slice
    ``p % weights_tp * slices + p // weights_tp``, one of ``slices`` in its shard.
    """

    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    sequence_parallel: bool = False
    cp_split: str = SAMPLE
    weights_tp: int = 1

    @property
    def slices(self) -> int:
        """Slices of a rank's shard of the weights, one of which it computes with."""
        return max(1, self.tp.size() // self.weights_tp)

    def renumbered(self, ids: Tensor, vocab_size: int) -> Tensor:
        """Token ids as if the ranks held the slices of the vocabulary in their own order."""
        if 1 in (self.weights_tp, self.slices):
            return ids
        rows = vocab_size // self.tp.size()
        held = ids // rows
        return (held % self.slices * self.weights_tp + held // self.slices) * rows + ids % rows

    @property
    def splits_tokens(self) -> bool:
        """Whether tensor parallel ranks hold different tokens between products."""
        return self.sequence_parallel and self.tp.size() > 1


@dataclass(frozen=True, slots=True)
class Pack:
    """The sequences of a chunk, packed one after the other; its tensors are on the CPU.

    Attributes:
        lengths: tokens of each sequence: encoder tokens of items, or LLM tokens of samples.
        outputs: encoders: LLM tokens that each item is projected to.
        token_ids: LLM ``[sum(lengths)]``: text token ids, -1 for a projected token.
        labels: LLM ``[sum(lengths)]``: the id to predict at each position, -1 for none.
        remade: number of first blocks of a stage that keep their input only and run again in backward.
        splits_backward: whether backward leaves the gradients of weights to a pass of their own.
        positions: LLM: time, height and width of each token ``[3, sum(lengths)]``; None: its place in its sample.
        grids: encoders of pictures: rows and columns of tokens of each item, (0, 0) if unknown; empty if none is known.
    """

    lengths: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    token_ids: Tensor | None = None
    labels: Tensor | None = None
    remade: int = 0
    splits_backward: bool = False
    positions: Tensor | None = None
    grids: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The rows of a pack that one of several ranks holds, padded at the end to as many as each holds.

    Attributes:
        rows: row of the pack at each place, -1 for padding ``[size]``; on the CPU.
        places: place of each row of the pack among the rows of all ranks ``[total]``.
        first: place of this rank's first row among them.
        run: the rows, if they are consecutive.
    """

    rows: Tensor
    places: Tensor
    first: int
    run: slice | None

    @classmethod
    def of(cls, rows: Tensor, places: Tensor, first: int) -> Share:
        """The share of these rows."""
        held = rows[rows >= 0]
        start = int(held[0]) if len(held) else 0
        follows = bool((held == torch.arange(start, start + len(held))).all())
        return cls(rows, places, first, slice(start, start + len(held)) if follows else None)

    @property
    def size(self) -> int:
        """Rows that each rank holds, padding included."""
        return len(self.rows)

    def pad(self, rows: Tensor, value: float = 0) -> Tensor:
        """This rank's rows of a tensor that holds all ``[total, ...]``, padding filled in ``[size, ...]``."""
        if self.run is not None:
            held = rows[self.run]
        else:
            held = rows.index_select(0, to_device(self.rows[self.rows >= 0], rows.device))
        missing = self.size - len(held)
        return torch.cat([held, held.new_full((missing, *held.shape[1:]), value)]) if missing else held

    def part(self, index: int, parts: int) -> Share:
        """Of the rows one of equally many parts."""
        size = self.size // parts
        return Share.of(self.rows[index * size : (index + 1) * size], self.places, self.first + index * size)


def share_of(total: int, group: dist.ProcessGroup) -> Share:
    """Return this rank's share of ``total`` rows, cut into consecutive blocks over a group."""
    size = -(-total // group.size())
    rows = torch.arange(group.rank() * size, (group.rank() + 1) * size)
    return Share.of(torch.where(rows < total, rows, -1), torch.arange(total), group.rank() * size)


@dataclass(frozen=True, slots=True)
class Shares:
    """The tokens of a chunk that a rank works on: in ``products`` and attention its context parallel part.

    Between products (``hidden``) it is a part of those with sequence parallelism.
    """

    products: Share
    hidden: Share
    cp: dist.ProcessGroup
    tp: dist.ProcessGroup


def shares_of(lengths: tuple[int, ...], groups: StageGroups) -> Shares:
    """This rank's tokens of a chunk of sequences; context parallel ranks cut each, or the pack (``cp_split``)."""
    parts = groups.tp.size() if groups.splits_tokens else 1
    share = _share_of_pieces(lengths, groups.cp.size(), groups.cp.rank(), groups.cp_split == PACK, parts)
    return Shares(share, share.part(groups.tp.rank(), parts) if parts > 1 else share, groups.cp, groups.tp)


@lru_cache(maxsize=64)
def _share_of_pieces(lengths: tuple[int, ...], cp: int, rank: int, whole_pack: bool, parts: int) -> Share:
    rows = rows_of_ranks(np.array(lengths), cp, whole_pack=whole_pack, parts=parts)
    places = np.empty(sum(lengths), np.int64)
    held = np.flatnonzero(rows >= 0)
    places[rows.ravel()[held]] = held
    return Share.of(torch.from_numpy(rows[rank]), torch.from_numpy(places), rank * rows.shape[1])


def with_halo(share: Share, lengths: tuple[int, ...], halo: int) -> tuple[Share, Tensor | None]:
    """A share with up to ``halo`` tokens of the same sequence before each run; places of its own, None if all are."""
    if not halo:
        return share, None
    held = share.rows[share.rows >= 0].numpy()
    begins = np.flatnonzero(np.diff(held, prepend=-2) != 1)
    before = np.minimum(halo, places_in(torch.tensor(lengths))[1].numpy()[held[begins]])
    more = np.zeros(len(held), np.int64)
    more[begins] = before
    if not more.any():
        return share, None
    counts = 1 + more
    last = np.cumsum(counts) - 1
    # Each own token, and before it as many as it has in its halo.
    wider = np.repeat(held - (last - counts + 1) - more, counts) + np.arange(counts.sum())
    padding = share.size - len(held)
    rows = torch.from_numpy(np.append(wider, np.full(padding, -1)))
    kept = torch.from_numpy(np.append(last, len(wider) + np.arange(padding)))
    return Share.of(rows, share.places, share.first), kept


@dataclass(frozen=True, slots=True)
class Segments:
    """Block-diagonal attention of the tokens one rank holds.

    Attributes:
        query_lengths: rows of each segment among this rank's tokens, in order.
        key_lengths: rows of each segment among its keys; a causal segment's last query sees all of them.
        keys: rows of keys among those of all ranks, segment by segment; None: all.
        query_offsets, key_offsets: bounds of segments ``[segments + 1]``, int32, on the device.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    keys: Tensor | None
    query_offsets: Tensor
    key_offsets: Tensor


def make_segments(
    query_lengths: Sequence[int], key_lengths: Sequence[int], keys: Tensor | None, device: torch.device
) -> Segments:
    """Segments with their offsets on a device."""
    offsets = torch.tensor([[0, *query_lengths], [0, *key_lengths]]).cumsum(1, dtype=torch.int32)
    keys = None if keys is None else to_device(keys, device)
    return Segments(tuple(query_lengths), tuple(key_lengths), keys, *to_device(offsets, device))


def segments_of(
    runs: Sequence[int], share: Share, *, causal: bool, device: torch.device, gathered: bool = True
) -> Segments:
    """Segments of sequences or windows; padding attends to itself. Without ``gathered`` this rank has all tokens."""
    bounds = np.cumsum([0, *runs])
    rows = share.rows[share.rows >= 0].numpy()
    padding = share.size - len(rows)
    if not gathered:
        lengths = [*runs, *([padding] if padding else [])]
        return make_segments(lengths, lengths, None, device)
    run = np.searchsorted(bounds, rows, side="right") - 1
    # A causal segment's queries follow each other; others see all keys of their run from wherever in it.
    breaks = np.diff(run, prepend=-1) != 0
    if causal:
        breaks |= np.diff(rows, prepend=-2) != 1
    begins = np.flatnonzero(breaks)
    queries = np.diff(begins, append=len(rows))
    of_segment = run[begins]
    first = bounds[of_segment]
    stop = rows[begins + queries - 1] + 1 if causal else bounds[of_segment + 1]
    counts = stop - first
    seen = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    keys = share.places[torch.from_numpy(seen)]
    if padding:
        queries = np.append(queries, padding)
        counts = np.append(counts, padding)
        keys = torch.cat([keys, share.first + torch.arange(len(rows), share.size)])
    return make_segments(queries.tolist(), counts.tolist(), keys, device)


def consecutive_windows(lengths: Sequence[int], window_tokens: int) -> list[int]:
    """Windows of ``window_tokens`` consecutive tokens in each sequence; a sequence's last may be shorter."""
    return [min(window_tokens, length - at) for length in lengths for at in range(0, length, window_tokens)]


def places_in(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence of each token, and the token's place in it, for sequences of these lengths ``[sum(lengths)]``."""
    sequence = torch.repeat_interleave(lengths)
    return sequence, torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]


def positions_of(lengths: tuple[int, ...], share: Share) -> Tensor:
    """Place of each token this rank holds in its own sequence ``[size]``, on the CPU; 0 for padding."""
    return share.pad(places_in(torch.tensor(lengths))[1])
