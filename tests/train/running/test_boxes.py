"""Boxes of a whole tensor: every number is in exactly one, where it belongs."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.train.modules import NamedParameter
from entrain_bench.train.running.checkpoint import boxes_of


@given(
    rows=st.integers(1, 4),
    columns=st.integers(0, 5),
    dim=st.integers(-1, 1),
    stride=st.integers(1, 3),
    tp=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 400), max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_boxes_of_all_ranks_are_the_whole(
    rows: int, columns: int, dim: int, stride: int, tp: int, cuts: list[int]
) -> None:
    shard = [rows * stride, columns * stride] if columns else [rows * stride]
    dim = min(dim, len(shard) - 1)
    full = torch.randn([size * tp if place == dim else size for place, size in enumerate(shard)])
    put, times = torch.full_like(full, torch.nan), torch.zeros_like(full)
    for rank in range(tp if dim >= 0 else 1):
        named = NamedParameter("k", torch.nn.Parameter(torch.empty(shard)), dim, stride, tp, rank)
        own = named.shard(full).contiguous().view(-1)
        # What a distributed optimizer's ranks have: any ranges of the flat shard.
        edges = sorted({0, len(own), *(min(cut, len(own)) for cut in cuts)})
        for start, stop in pairwise(edges):
            part = boxes_of(named, own[start:stop], start)
            assert part.shape == full.shape
            assert len(part.boxes) <= 3 * stride
            for box in part.boxes:
                place = tuple(
                    slice(offset, offset + size) for offset, size in zip(box.offsets, box.values.shape, strict=True)
                )
                put[place] = box.values
                times[place] += 1
    assert torch.equal(put, full)
    assert bool((times == 1).all())


def test_what_is_written_into_a_box_is_in_the_tensor() -> None:
    named = NamedParameter("k", torch.nn.Parameter(torch.zeros(4, 3)), 0, 2, 2, 1)
    values = torch.zeros(12)
    for number, box in enumerate(boxes_of(named, values[2:10], 2).boxes):
        box.values.fill_(number + 1)
    # Rows 0 and 1 are rows 2 and 3 of the whole, rows 2 and 3 its rows 6 and 7: a border between two pieces.
    assert values.tolist() == [0, 0, 1, 2, 2, 2, 3, 3, 3, 4, 0, 0]
