"""Blocks: lent to ranks, used again when all have let go, never more than wait or are held; memory without a name."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.train.producing.blocks import GRAIN_BYTES, Block, Ledger

SIZES = st.sampled_from([1, GRAIN_BYTES, GRAIN_BYTES + 1, 5 * GRAIN_BYTES])
# What happens next: a value of some size is made; a rank takes one; a rank lets go of the oldest or the newest it has.
EVENTS = st.one_of(
    st.tuples(st.just("make"), SIZES),
    st.tuples(st.just("take"), st.integers(0, 2)),
    st.tuples(st.sampled_from(["oldest", "newest"]), st.integers(0, 2)),
)


@given(st.integers(1, 3), st.integers(1, 4), st.lists(EVENTS, max_size=80))
def test_blocks_are_lent_to_one_value_at_a_time_and_bounded(
    num_readers: int, ahead: int, events: list[tuple[str, int]]
) -> None:
    ledger, sizes, most = Ledger(num_readers, ahead), dict[int, int](), 0
    # By rank: blocks of values on their way to it, and of those it holds.
    coming: list[deque[int]] = [deque() for _ in range(num_readers)]
    held: list[list[int]] = [[] for _ in range(num_readers)]
    for what, number in events:
        if what == "make":
            assert ledger.has_room == (max(map(len, coming)) < ahead)
            if not ledger.has_room:
                continue
            in_use = {block for own in (*coming, *held) for block in own}
            place = ledger.place(number)
            assert place.block not in in_use
            assert place.size >= number
            assert place.is_new == (place.block not in sizes)
            assert sizes.setdefault(place.block, place.size) == place.size
            if place.dropped is not None:
                assert place.dropped not in in_use
                assert sizes.pop(place.dropped) < number
            most = max(most, len(in_use) + 1)
            for own in coming:
                own.append(place.block)
        elif number < num_readers and what == "take" and coming[number]:
            ledger.take(number)
            held[number].append(coming[number].popleft())
        elif number < num_readers and what in ("oldest", "newest") and held[number]:
            ledger.release(held[number].pop(0 if what == "oldest" else -1))
        assert len(ledger._sizes) == len(sizes) <= most


def test_a_block_is_used_again_where_it_fits() -> None:
    ledger = Ledger(1, ahead=4)
    small, large = ledger.place(10), ledger.place(3 * GRAIN_BYTES)
    assert (small.size, large.size) == (GRAIN_BYTES, 3 * GRAIN_BYTES)
    for block in (small.block, large.block):
        ledger.release(block)
    again = ledger.place(2 * GRAIN_BYTES)
    assert (again.block, again.is_new) == (large.block, False)
    # Only the small one is free: one that is large enough takes its place.
    third = ledger.place(2 * GRAIN_BYTES)
    assert (third.is_new, third.dropped, third.size) == (True, small.block, 2 * GRAIN_BYTES)


def test_memory_is_shared_by_its_descriptor_and_has_no_name() -> None:
    own = Path("/proc/self")
    open_before = {path.name for path in (own / "fd").iterdir()}
    ours = Block(GRAIN_BYTES)
    theirs = Block(GRAIN_BYTES, os.dup(ours.descriptor))
    mapped = [line.split(maxsplit=5)[5] for line in (own / "maps").read_text().splitlines() if "entrain-bench" in line]
    assert mapped == ["/memfd:entrain-bench (deleted)"] * 2
    ours.tensor()[:4].view(torch.float32).fill_(2.5)
    assert theirs.tensor()[:4].view(torch.float32).item() == 2.5
    del ours, theirs
    assert {path.name for path in (own / "fd").iterdir()} == open_before


def test_who_lends_a_block_learns_when_no_tensor_refers_to_it() -> None:
    block, freed = Block(GRAIN_BYTES), list[str]()
    whole = block.tensor(lambda: freed.append("first"))
    other = block.tensor(lambda: freed.append("second"))
    parts = [whole[:8].view(torch.float32), whole[64:80].view(2, 8).t()]
    del whole
    parts.pop()
    assert not freed
    parts.pop()
    assert freed == ["first"]
    del other, block
    assert freed == ["first", "second"]


def test_a_tensor_outlives_its_block() -> None:
    block = Block(GRAIN_BYTES)
    rows = block.tensor()[:4].view(torch.int32)
    rows.fill_(7)
    del block
    assert rows.item() == 7


def test_what_was_not_handed_over_cannot_be_taken_or_released() -> None:
    ledger = Ledger(1, 1)
    with pytest.raises(AssertionError):
        ledger.take(0)
    with pytest.raises(AssertionError):
        ledger.place(0)
    place = ledger.place(1)
    with pytest.raises(AssertionError):
        ledger.place(1)
    ledger.release(place.block)
    with pytest.raises(AssertionError):
        ledger.release(place.block)
