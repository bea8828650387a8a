"""Packed sequences: who holds which tokens under context parallelism, who attends to whom, and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.train.device import to_device


@dataclass(frozen=True, slots=True)
class StageGroups:
    """Process groups of this rank for one stage of one module; gradients of parameters are summed over ``dp_cp``."""

    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    sequence_parallel: bool = False

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


@dataclass(frozen=True, slots=True)
class Share:
    """The rows ``start..stop`` that one of several ranks holds of ``total``, padded so that all ranks hold as many."""

    total: int
    start: int
    stop: int
    padded: int

    def pad(self, rows: Tensor, value: float = 0) -> Tensor:
        """This rank's rows of a tensor that holds all ``[total, ...]``, padding filled in ``[stop - start, ...]``."""
        held = rows[self.start : self.stop]
        missing = self.stop - self.start - len(held)
        return torch.cat([held, held.new_full((missing, *held.shape[1:]), value)]) if missing else held


def share_of(total: int, group: dist.ProcessGroup, parts: int = 1) -> Share:
    """What this rank of a group holds of ``total`` rows, a multiple of ``parts``."""
    size = -(-total // (group.size() * parts)) * parts
    start = group.rank() * size
    return Share(total, start, start + size, size * group.size())


@dataclass(frozen=True, slots=True)
class Shares:
    """The tokens of a chunk that a rank works on.

    Attributes:
        products: in attention and products: its part among context parallel ranks.
        hidden: between products: with sequence parallelism a part of those.
    """

    products: Share
    hidden: Share


def shares_of(total: int, groups: StageGroups) -> Shares:
    """This rank's tokens of a chunk of ``total``."""
    parts = groups.tp.size() if groups.splits_tokens else 1
    share = share_of(total, groups.cp, parts)
    size = (share.stop - share.start) // parts
    start = share.start + groups.tp.rank() * size if groups.splits_tokens else share.start
    return Shares(share, Share(total, start, start + size, share.padded))


@dataclass(frozen=True, slots=True)
class Segments:
    """Block-diagonal attention of the tokens one rank holds; keys of consecutive segments are consecutive rows.

    Attributes:
        query_lengths: rows of each segment among this rank's tokens, in order.
        key_lengths: rows of each segment among all tokens; a causal segment's last query sees all of them.
        first_key: row of the first segment's first key among all tokens.
        query_offsets, key_offsets: starts of the segments' rows, and the last end ``[segments + 1]``, int32, on the
            device that attends; keys from ``first_key`` on.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    first_key: int
    query_offsets: Tensor
    key_offsets: Tensor


def make_segments(
    query_lengths: Sequence[int], key_lengths: Sequence[int], first_key: int, device: torch.device
) -> Segments:
    """Segments with their offsets on a device."""
    offsets = torch.tensor([[0, *query_lengths], [0, *key_lengths]]).cumsum(1, dtype=torch.int32)
    return Segments(tuple(query_lengths), tuple(key_lengths), first_key, *to_device(offsets, device))


def segments_of(runs: Sequence[int], share: Share, *, causal: bool, device: torch.device) -> Segments:
    """Segments of runs of tokens, packed sequences or windows; padding attends to itself alone."""
    queries, keys, first_keys = [], [], []
    for start, stop in pairwise(accumulate((*runs, share.padded - share.total), initial=0)):
        low, high = max(start, share.start), min(stop, share.stop)
        if low < high:
            queries.append(high - low)
            keys.append((high if causal else stop) - start)
            first_keys.append(start)
    return make_segments(queries, keys, first_keys[0], device)


def consecutive_windows(lengths: Sequence[int], window_tokens: int) -> list[int]:
    """Windows of ``window_tokens`` consecutive tokens in each sequence; a sequence's last may be shorter."""
    return [min(window_tokens, length - at) for length in lengths for at in range(0, length, window_tokens)]


def places_in(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence of each token, and the token's place in it, for sequences of these lengths ``[sum(lengths)]``."""
    sequence = torch.repeat_interleave(lengths)
    return sequence, torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]


def positions_of(lengths: tuple[int, ...], share: Share) -> Tensor:
    """Place of each token this rank holds in its own sequence ``[stop - start]``, on the CPU; 0 for padding."""
    return share.pad(places_in(torch.tensor(lengths))[1])
