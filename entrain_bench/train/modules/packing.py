"""Packed sequences: tokens of each rank, attention segments, and positions, also of pictures as grids of patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.costs.loads import rows_of_ranks
from entrain_bench.specs.framework import PACK, SAMPLE
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import RopeScaling
from entrain_bench.train.device import to_device


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Ranks of a stage that divide its experts, those with their TP ranks, and those with the same experts."""

    ep: dist.ProcessGroup
    tp_ep: dist.ProcessGroup
    same: dist.ProcessGroup


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
    experts: ExpertGroups | None = None  # None: every rank has all experts

    @property
    def ep(self) -> int:
        """Degree of expert parallelism."""
        return self.experts.ep.size() if self.experts else 1

    @property
    def sharing(self) -> tuple[dist.ProcessGroup, ...]:
        """Ranks over which gradients are summed: of parameters that all of them hold, and of divided experts."""
        return (self.dp_cp, self.experts.same) if self.experts else (self.dp_cp,)

    def sharing_of(self, parameter: Tensor) -> dist.ProcessGroup:
        """Ranks over which a parameter's gradient is summed; megatron-core notes parameters of divided experts."""
        return self.sharing[0 if getattr(parameter, "allreduce", True) else -1]

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
    """The sequences of a chunk, packed one after the other; its tensors are on the CPU."""

    lengths: tuple[int, ...]  # tokens of each sequence: encoder tokens of items, or LLM tokens of samples
    outputs: tuple[int, ...] = ()  # encoders: LLM tokens that each item is projected to
    token_ids: Tensor | None = None  # LLM ``[sum(lengths)]``: text token ids, -1 for a projected token
    labels: Tensor | None = None  # LLM ``[sum(lengths)]``: the id to predict at each position, -1 for none
    remade: int = 0  # number of first blocks of a stage that keep their input only and run again in backward
    splits_backward: bool = False  # whether backward leaves the gradients of weights to a pass of their own
    # LLM: time, height and width of each token ``[3, sum(lengths)]``; None: its place in its sample
    positions: Tensor | None = None
    # encoders of pictures: rows and columns of tokens of each item, (0, 0) if unknown; empty if none is known
    grids: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The rows of a pack that one of several ranks holds, padded at the end to as many as each holds."""

    rows: Tensor  # row of the pack at each place, ascending, -1 for padding ``[size]``; on the CPU
    places: Tensor  # place of each row of the pack among the rows of all ranks ``[total]``
    first: int  # place of this rank's first row among them

    @property
    def size(self) -> int:
        """Rows that each rank holds, padding included."""
        return len(self.rows)

    def pad(self, rows: Tensor, value: float = 0) -> Tensor:
        """This rank's rows of a tensor that holds all ``[total, ...]``, padding filled in ``[size, ...]``."""
        held = self.rows[self.rows >= 0]
        taken = rows if len(held) == len(rows) else rows.index_select(0, to_device(held, rows.device))
        missing = self.size - len(held)
        return torch.cat([taken, taken.new_full((missing, *taken.shape[1:]), value)]) if missing else taken

    def part(self, index: int, parts: int) -> Share:
        """One of equally many parts of the rows."""
        size = self.size // parts
        return Share(self.rows[index * size : (index + 1) * size], self.places, self.first + index * size)


def share_of(total: int, group: dist.ProcessGroup) -> Share:
    """Return this rank's share of ``total`` rows, cut into consecutive blocks over a group."""
    size = -(-total // group.size())
    rows = torch.arange(group.rank() * size, (group.rank() + 1) * size)
    return Share(torch.where(rows < total, rows, -1), torch.arange(total), group.rank() * size)


@dataclass(frozen=True, slots=True)
class Shares:
    """The tokens of a chunk that a rank works on: in ``products`` and attention its context parallel part.

    Between products (``hidden``) it is a part of those with sequence parallelism.
    """

    products: Share
    hidden: Share
    cp: dist.ProcessGroup


def shares_of(lengths: tuple[int, ...], groups: StageGroups) -> Shares:
    """This rank's tokens of a chunk of sequences; context parallel ranks cut each, or the pack (``cp_split``)."""
    parts = groups.tp.size() if groups.splits_tokens else 1
    share = _share_of_pieces(lengths, groups.cp.size(), groups.cp.rank(), groups.cp_split == PACK, parts)
    return Shares(share, share.part(groups.tp.rank(), parts) if parts > 1 else share, groups.cp)


@lru_cache(maxsize=64)
def _share_of_pieces(lengths: tuple[int, ...], cp: int, rank: int, whole_pack: bool, parts: int) -> Share:
    rows = rows_of_ranks(np.array(lengths), cp, whole_pack=whole_pack, parts=parts)
    places = np.empty(sum(lengths), np.int64)
    held = np.flatnonzero(rows >= 0)
    places[rows.ravel()[held]] = held
    return Share(torch.from_numpy(rows[rank]), torch.from_numpy(places), rank * rows.shape[1])


@dataclass(frozen=True, slots=True)
class Segments:
    """Block-diagonal attention of the tokens one rank holds."""

    query_lengths: tuple[int, ...]  # rows of each segment among this rank's tokens, in order
    key_lengths: tuple[int, ...]  # rows of each segment among its keys; a causal segment's last query sees all of them
    keys: Tensor | None  # rows of keys among those of all ranks, segment by segment; None: all
    query_offsets: Tensor  # bounds of segments ``[segments + 1]``, int32, on the device
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


_SINUSOID_TIMESCALE = 10_000.0  # arXiv:1706.03762, Sec. 3.5


def on_grid(module: ModuleSpec) -> bool:
    """Whether tokens are patches of pictures, whose rotary positions are two-dimensional."""
    return module.is_encoder and "audio" not in module.config.modalities


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of the rotary angles of a rank's tokens, each ``[tokens, 1, 1, head_dim / 2]``."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def by(cls, angles: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation by angles ``[tokens, head_dim / 2]``."""
        angles = angles[:, None, None, :]
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))

    def apply(self, rows: Tensor) -> Tensor:
        """Rotate ``[tokens, 1, heads, head_dim]``: the first half of the features with the second."""
        first, second = rows.chunk(2, dim=-1)
        return torch.cat([first * self.cosine - second * self.sine, second * self.cosine + first * self.sine], dim=-1)


def rotary_angles(positions: Tensor, module: ModuleSpec) -> Tensor:
    """Angles of an LLM's rotary positions ``[tokens, head_dim / 2]``, float32 (arXiv:2104.09864).

    ``positions`` are ``[tokens]``, or time, height and width ``[3, tokens]`` for ``mrope_sections`` (arXiv:2409.12191).
    """
    config = module.config
    frequencies = rotary_frequencies(config.head_dim // 2, config.rope_theta, config.rope_scaling, positions.device)
    if positions.dim() == 1:
        return positions[:, None] * frequencies
    time, height, _ = config.mrope_sections or (len(frequencies), 0, 0)
    # By comparisons, for repetitions would wait for their numbers.
    place = torch.arange(len(frequencies), device=positions.device)
    turning = (place >= time).long() + (place >= time + height)
    return positions[turning].T * frequencies


def grid_rotary_angles(rows: Tensor, columns: Tensor, module: ModuleSpec) -> Tensor:
    """Angles ``[tokens, head_dim / 2]``, float32; half turn with the row, half with the column (arXiv:2502.13923)."""
    config = module.config
    frequencies = rotary_frequencies(config.head_dim // 4, config.rope_theta, None, rows.device)
    return torch.cat([places[:, None] * frequencies for places in (rows, columns)], dim=-1)


def rotary_frequencies(count: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians that each of ``count`` pairs of features turns by a position ``[count]``, float32."""
    frequencies = 1.0 / theta ** (torch.arange(count, device=device) / count)
    if scaling is None:
        return frequencies
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    turns = frequencies * scaling.original_context_tokens / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


@dataclass(frozen=True, slots=True)
class Picture:
    """The grid of LLM tokens of a picture, or of a video; ``tokens`` is their number if the last row is not full."""

    rows: int
    columns: int
    frames: int = 1
    frame_step: float = 1.0
    tokens: int | None = None


def multimodal_positions(parts: Sequence[int | Picture]) -> Tensor:
    """Time, height and width of a sample's LLM tokens ``[3, tokens]``, int64, on the CPU.

    As Hugging Face's ``Qwen2_5_VLModel.get_rope_index`` (transformers 5.23) counts; numbers are of text tokens.
    """
    positions = []
    start = 0
    for part in parts:
        if isinstance(part, int):
            positions.append((torch.arange(part) + start).expand(3, -1))
            start += part
            continue
        time = (torch.arange(part.frames) * part.frame_step).long()
        grid = torch.meshgrid(time, torch.arange(part.rows), torch.arange(part.columns), indexing="ij")
        positions.append(torch.stack(grid).flatten(1)[:, : part.tokens] + start)
        start += max(part.rows, part.columns)
    return torch.cat(positions, dim=1)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Fixed sinusoidal positions ``[tokens, width]``, float32, sines before cosines (Whisper, arXiv:2212.04356)."""
    half = width // 2
    step = math.log(_SINUSOID_TIMESCALE) / max(1, half - 1)
    angles = positions[:, None] * torch.exp(-step * torch.arange(half, device=positions.device))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The tokens of a pack in the order of its stages; on the CPU."""

    order: Tensor  # token of the pack at each place, and its inverse ``[tokens]``
    place: Tensor
    rows: Tensor  # of the token at each place ``[tokens]``
    columns: Tensor
    windows: tuple[int, ...]  # tokens of each window, in order


@lru_cache(maxsize=64)
def arrange(
    lengths: tuple[int, ...], grids: tuple[tuple[int, int], ...], merge_tokens: int, window_tokens: int
) -> Arrangement:
    """The order of a pack's tokens, in windows that are squares of blocks (0 for none).

    Where the rows and columns of a picture are not known, (0, 0) or none, blocks fill rows of ceil(sqrt(blocks)).
    """
    sizes = torch.tensor(lengths)
    side = _side(merge_tokens)
    blocks = (sizes + merge_tokens - 1) // merge_tokens
    wide = blocks.double().sqrt().ceil().long()
    if grids:
        known = torch.tensor([columns // side for _, columns in grids])
        wide = torch.where(known > 0, known, wide)
    item, within = places_in(sizes)
    block = within // merge_tokens
    inside = within % merge_tokens
    block_row = block // wide[item]
    block_column = block % wide[item]
    rows = block_row * side + inside // side
    columns = block_column * side + inside % side
    if not window_tokens:
        natural = torch.arange(len(item))
        return Arrangement(natural, natural, rows, columns, ())
    span = math.isqrt(window_tokens) // side
    windows_wide = -(-wide // span)
    windows_high = -(-blocks // (wide * span))
    first = ((windows_wide * windows_high).cumsum(0) - windows_wide * windows_high)[item]
    window = first + block_row // span * windows_wide[item] + block_column // span
    order = torch.sort(window, stable=True).indices
    _, counts = torch.unique_consecutive(window[order], return_counts=True)
    return Arrangement(order, torch.argsort(order, stable=True), rows[order], columns[order], tuple(counts.tolist()))


def arrangement_of(module: ModuleSpec, pack: Pack) -> Arrangement | None:
    """The order of a pack's tokens in a module's stages; None where nothing depends on places in a picture."""
    config = module.config
    if not on_grid(module) or not (config.rotary or config.window_tokens):
        return None
    merged = merge_tokens(module)
    if odd := [grid for grid in pack.grids if any(size % _side(merged) for size in grid)]:
        size = "{} x {}".format(*odd[0])
        raise IncompatibleError(
            f"model.modules.{module.name}: cannot merge an image of {size} patches in squares of {merged} patches"
        )
    return arrange(pack.lengths, pack.grids, merged, config.window_tokens)


def in_stage_order(module: ModuleSpec, pack: Pack, features: Tensor) -> Tensor:
    """Features ``[sum(lengths), input_width]`` in the order in which a module's first stage takes them; on the CPU."""
    arrangement = arrangement_of(module, pack)
    return features[arrangement.order] if arrangement and arrangement.windows else features


def check_windows(module: ModuleSpec) -> None:
    """Raise ``IncompatibleError`` for windows of a picture that are no squares of whole blocks."""
    merged = merge_tokens(module)
    window = module.config.window_tokens
    side = _side(merged)
    if window and (math.isqrt(window) ** 2 != window or math.isqrt(window) % side):
        raise IncompatibleError(
            f"model.modules.{module.name}.window_tokens={window}: must be the square of a multiple of {side}, "
            f"the side of the {merged} patches that become an LLM token"
        )


def merge_tokens(module: ModuleSpec) -> int:
    """Consecutive encoder tokens that become one LLM token."""
    rows = module.layers[-1].gemms[-1].rows_per_token
    if (merge := round(1 / rows)) < 1 or not math.isclose(merge * rows, 1):
        raise IncompatibleError(
            f"model.modules.{module.name}.head_gemms: the last rows_per_token={rows} must be 1 / an integer"
        )
    return merge


def _side(merge_tokens: int) -> int:
    return math.ceil(math.sqrt(merge_tokens))
