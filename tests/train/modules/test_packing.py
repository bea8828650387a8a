"""Who attends to whom, places on a grid, and shards of parameters: against definitions."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from entrain_bench.costs.loads import rank_rows
from entrain_bench.costs.profiled.layers import held_segments, num_segments
from entrain_bench.specs.layer import Attention
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import Items, shapes_of
from entrain_bench.train.modules import blocks
from entrain_bench.train.modules.blocks import AttentionKernel, packed_attention
from entrain_bench.train.modules.packing import (
    Segments,
    _share_of_pieces,
    arrange,
    consecutive_windows,
    make_segments,
    segments_of,
)
from entrain_bench.train.modules.stage import NamedParameter
from entrain_bench.train.running.data import MadeUp, SampleData
from support.builders import TOKENS
from support.train.modules import assembled, module_config, normal

CPU = torch.device("cpu")


def dense_mask(segments: Segments, num_rows: int, total: int, causal: bool) -> Tensor:
    """Which of all rows each of a rank's rows sees ``[num_rows, total]``."""
    mask = torch.zeros(num_rows, total, dtype=torch.bool)
    places = torch.arange(total) if segments.keys is None else segments.keys
    row, key = 0, 0
    for queries, keys in zip(segments.query_lengths, segments.key_lengths, strict=True):
        for i in range(queries):
            mask[row + i, places[key : key + (keys - queries + i + 1 if causal else keys)]] = True
        row, key = row + queries, key + keys
    assert row == num_rows
    return mask


packs = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)


@given(lengths=packs, cp=st.integers(1, 4), causal=st.booleans(), window=st.integers(0, 4), whole_pack=st.booleans())
@settings(max_examples=100, deadline=None)
def test_segments_of_all_ranks_are_the_block_diagonal_mask(
    lengths: tuple[int, ...], cp: int, causal: bool, window: int, whole_pack: bool
) -> None:
    label = [(i, at // window if window else 0) for i, length in enumerate(lengths) for at in range(length)]
    runs = consecutive_windows(lengths, window) if window else lengths
    seen_rows = list[int]()
    for rank in range(cp):
        share = _share_of_pieces(lengths, cp, rank, whole_pack, 1)
        segments = segments_of(runs, share, causal=causal, device=CPU, gathered=cp > 1)
        mask = dense_mask(segments, share.size, cp * share.size, causal)
        own = [row for row in share.rows.tolist() if row >= 0]
        seen_rows += own
        for place, row in enumerate(own):
            wanted = {k for k in range(len(label)) if label[k] == label[row] and (k <= row or not causal)}
            assert set(mask[place].nonzero().flatten().tolist()) == {int(share.places[k]) for k in wanted}
        # Padding sees padding of its rank, so that no row is without a key.
        for place in range(len(own), share.size):
            seen = mask[place].nonzero().flatten()
            assert len(seen)
            assert all(share.first + len(own) <= key < share.first + share.size for key in seen.tolist())
    assert sorted(seen_rows) == [*range(len(label))]


@given(
    lengths=st.lists(st.integers(8, 60), min_size=1, max_size=4).map(tuple),
    cp=st.integers(1, 4),
    causal=st.booleans(),
    window=st.sampled_from([0, 4, 9]),
    whole_pack=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_profile_counts_the_segments_that_ranks_attend_in(
    lengths: tuple[int, ...], cp: int, causal: bool, window: int, whole_pack: bool
) -> None:
    attention = Attention(8, 8, causal, window)
    runs = consecutive_windows(lengths, window) if window else lengths
    counts = []
    for rank in range(cp):
        share = _share_of_pieces(lengths, cp, rank, whole_pack, 1)
        found = segments_of(runs, share, causal=causal, device=CPU, gathered=cp > 1)
        counts.append(len(found.query_lengths) - bool(share.size - int((share.rows >= 0).sum())))
    counted = float(held_segments(attention, num_segments(attention, np.array(lengths)).sum(), cp, whole_pack))
    if not window and not whole_pack:
        # The last rank's two runs are one.
        assert counts[:-1] == [counted] * (cp - 1)
        assert counts[-1] == len(lengths)
    else:
        # Each of a sequence's two runs cuts a window at either end at most.
        assert max(counts) - 3 * len(lengths) <= counted <= max(counts) + 2


@given(lengths=packs, cp=st.integers(1, 4), whole_pack=st.booleans(), parts=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_ranks_take_a_piece_from_the_front_and_one_from_the_end(
    lengths: tuple[int, ...], cp: int, whole_pack: bool, parts: int
) -> None:
    units = [sum(lengths)] if whole_pack else [*lengths]
    held: list[list[int]] = [[] for _ in range(cp)]
    start = 0
    for tokens in units:
        cuts = [start + tokens * piece // (2 * cp) for piece in range(2 * cp + 1)]
        for rank, own in enumerate(held):
            for piece in (rank, 2 * cp - 1 - rank):
                own += range(cuts[piece], cuts[piece + 1])
        start += tokens
    rows = torch.arange(sum(lengths)) * 10
    for rank, own in enumerate(held):
        share = _share_of_pieces(lengths, cp, rank, whole_pack, parts)
        assert share.size == rank_rows(np.array(lengths), cp, whole_pack=whole_pack, parts=parts)
        assert share.size % parts == 0
        assert share.pad(rows, -7).tolist() == [10 * row for row in own] + [-7] * (share.size - len(own))
        joined = [row for index in range(parts) for row in share.part(index, parts).rows.tolist()]
        assert joined == share.rows.tolist()
        assert [share.first + place for place in range(len(own))] == share.places[own].tolist()


def varlen_in_plain_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch.nn.attention.varlen documents; a causal segment's last query sees its last key."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size in ((-1, 0), (-1, -1))
    assert max_queries == query_offsets.diff().max()
    assert max_keys == key_offsets.diff().max()
    rows = []
    for (start, stop), (first, end) in zip(
        pairwise(query_offsets.tolist()), pairwise(key_offsets.tolist()), strict=True
    ):
        queries, keys = stop - start, end - first
        mask = torch.ones(queries, keys, dtype=torch.bool)
        q, k, v = (part.transpose(0, 1) for part in (query[start:stop], key[first:end], value[first:end]))
        mask = mask.tril(keys - queries) if window_size == (-1, 0) else mask
        rows.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(rows)


@given(
    segments=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6),
    causal=st.booleans(),
    kernel=st.sampled_from([AttentionKernel.CPU, AttentionKernel.SDPA, AttentionKernel.FLASH2]),
)
@settings(max_examples=60, deadline=None)
def test_packed_attention_is_masked_attention(
    segments: list[tuple[int, int]], causal: bool, kernel: AttentionKernel
) -> None:
    lengths = make_segments([q for q, _ in segments], [q + more for q, more in segments], None, CPU)
    rng = np.random.default_rng(len(segments))
    query = normal(rng, sum(lengths.query_lengths), 4, 8)
    key, value = (normal(rng, sum(lengths.key_lengths), 2, 8) for _ in range(2))
    mask = dense_mask(lengths, len(query), len(key), causal)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) / 8**0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, 1))
    with mock.patch.object(blocks, "varlen_attn", varlen_in_plain_torch):
        found = packed_attention(query, key, value, lengths, causal=causal, kernel=kernel)
    torch.testing.assert_close(found, expected)


@given(dim=st.integers(-1, 1), stride=st.integers(1, 3), tp=st.integers(1, 4))
def test_shards_assemble_to_the_full_parameter(dim: int, stride: int, tp: int) -> None:
    shape = [4 * stride, 4 * stride]
    full = torch.randn([n * tp if i == dim else n for i, n in enumerate(shape)])
    named = [NamedParameter("k", torch.nn.Parameter(torch.empty(shape)), dim, stride, tp, rank) for rank in range(tp)]
    assert named[0].full_shape == tuple(full.shape)
    shards = [part.shard(full) for part in named]
    assert all(list(shard.shape) == shape for shard in shards)
    assert torch.equal(assembled(named[0], shards), full)


def test_an_unknown_grid_is_near_square() -> None:
    # 5 blocks: a row of 3 and a row of 2.
    arranged = arrange((20,), (), 4, 0)
    assert arranged.rows.tolist() == [0, 0, 1, 1] * 3 + [2, 2, 3, 3] * 2
    assert arranged.columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 0, 1, 0, 1, 2, 3, 2, 3]
    assert arrange((20, 24), ((0, 0), (4, 6)), 4, 0).columns[:20].tolist() == arranged.columns.tolist()


def test_positions_of_samples_by_hand() -> None:
    # A picture of 2 x 3 LLM tokens, two frames of 1 x 2 that make a video, audio of 2 tokens, an unknown grid of 3.
    shapes = shapes_of(
        np.array([2, 1]),
        {
            "image": Items(np.array([1, 1]), np.array([24, 12]), np.array([6, 3]), np.array([[4, 6], [0, 0]])),
            "video": Items(np.array([2, 0]), np.array([8, 8]), np.array([2, 2]), np.array([[2, 4], [2, 4]])),
            "audio": Items(np.array([1, 0]), np.array([4]), np.array([2])),
        },
    )
    config = module_config("tiny_llm", mrope_sections=[4, 2, 2], mrope_frame_step=2)
    llm = ModelSpec.from_config({"name": "m", "modules": {"llm": config}, "tokens": TOKENS}).llm
    data = SampleData(shapes, MadeUp(0, 96))
    assert data.positions(llm, np.array([0])).T.tolist() == [
        *[[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]],
        *[[3, 3, 3], [3, 3, 4], [5, 3, 3], [5, 3, 4]],
        *[[5, 5, 5], [6, 6, 6], [7, 7, 7], [8, 8, 8]],
    ]
    assert data.positions(llm, np.array([1])).T.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [2, 2, 2]]
    assert torch.equal(data.inputs(llm, 0, np.array([1])).pack.positions, data.positions(llm, np.array([1])))
    assert data.encoder_pack(np.array([0, 3, 4])).grids == ((4, 6), (0, 0), (0, 0))


pictures = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


@given(blocks=pictures, span=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_windows_are_squares_of_one_picture_and_every_token_has_a_place(
    blocks: list[tuple[int, int]], span: int
) -> None:
    grids = tuple((2 * rows, 2 * columns) for rows, columns in blocks)
    lengths = tuple(rows * columns for rows, columns in grids)
    arranged = arrange(lengths, grids, 4, (2 * span) ** 2)
    assert torch.equal(arranged.order[arranged.place], torch.arange(sum(lengths)))
    picture = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[arranged.order]
    names = torch.stack([picture, arranged.rows // (2 * span), arranged.columns // (2 * span)], 1)
    runs = names.split(arranged.windows)
    assert all(len(run.unique(dim=0)) == 1 for run in runs)
    # Runs of one window are not cut, windows of one row of a picture stay in order, and blocks stay whole.
    assert len({tuple(run[0].tolist()) for run in runs}) == len(runs)
    assert [tuple(run[0].tolist()) for run in runs] == sorted(tuple(run[0].tolist()) for run in runs)
    assert (arranged.order.view(-1, 4) == arranged.order[::4, None] + torch.arange(4)).all()
    places = torch.stack([picture, arranged.rows, arranged.columns], 1)
    assert len(places.unique(dim=0)) == sum(lengths)
