"""Producers and readers: every rank of a lane gets its values in order, bounded ahead, and learns what went wrong."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import ExecutionError, UserError
from entrain_bench.train.messages.wire import from_bytes
from entrain_bench.train.producing.producer import ANSWER_BYTES, LOAD_AHEAD, Lane, Maker, serve
from entrain_bench.train.producing.reader import Reader

MADE: list[int] = []
TIMEOUT_S = 10.0


def value(number: int, num_elements: int = 3) -> tuple[int, torch.Tensor]:
    MADE.append(number)
    return number, torch.full((num_elements,), float(number))


def makers_of(said: dict[str, Any]) -> list[Maker]:
    return [partial(MAKERS[name], *arguments) for name, *arguments in said["asked"]]


def load(reader: Reader, asked: Sequence[Sequence[Any]]) -> Iterator[Any]:
    return reader.load({}, asked)


def bad_sample() -> NoReturn:
    raise UserError("sample 7: no picture")


def broken() -> NoReturn:
    raise KeyError("x")


@contextmanager
def connected(lanes: list[int], num_producers: int, ahead: int) -> Iterator[list[Reader]]:
    """Readers of lanes, and producers that serve them in threads of this process."""
    MADE.clear()
    pairs = [[Pipe() for _ in range(num_producers)] for _ in lanes]
    threads = []
    for producer in range(num_producers):
        members: dict[int, list[Connection]] = {}
        for lane, own in zip(lanes, pairs, strict=True):
            members.setdefault(lane, []).append(own[producer][1])
        served = [Lane(producer, members[lane], ahead, makers_of) for lane in sorted(members)]
        threads.append(threading.Thread(target=serve, args=(served,), daemon=True))
    readers = []
    for rank, (lane, own) in enumerate(zip(lanes, pairs, strict=True)):
        readers.append(Reader([ours for ours, _ in own], lane, TIMEOUT_S, leads=lane not in lanes[:rank]))
        for _, line in own:
            line.recv_bytes()
    for thread in threads:
        thread.start()
    try:
        yield readers
    finally:
        for own in pairs:
            for ours, _ in own:
                ours.close()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_values_come_in_order_whatever_is_kept(
    num_producers: int, ahead: int, calls: list[int], num_ranks: int, kept: int
) -> None:
    with connected([3] * num_ranks, num_producers, ahead) as readers:
        held: list[list[tuple[int, np.ndarray]]] = [[] for _ in readers]
        expected = 0
        for num in calls:
            asked = [("value", expected + i, 1 + i) for i in range(num)]
            # All ranks of a lane load alike before any takes.
            taken = [load(reader, asked) for reader in readers]
            for _ in range(num):
                for own, values in zip(held, taken, strict=True):
                    number, tensor = next(values)
                    assert number == expected
                    own.append((number, tensor))
                    for before, rows in own:
                        assert (rows == before).all(), "memory was used again while a rank held it"
                    del own[: max(0, len(own) - kept)]
                expected += 1
            assert [next(values, None) for values in taken] == [None] * num_ranks
        held.clear()


def test_ranks_of_a_lane_share_what_is_made_once() -> None:
    with connected([0, 0, 1], 1, 2) as (first, second, other):
        taken = [load(reader, [("value", i) for i in range(2)]) for reader in (first, second)]
        for number in range(2):
            one, two = (next(values)[1] for values in taken)
            assert np.array_equal(one, two)
            two.fill(-1.0)
            assert (one == -1).all(), f"value {number} is two copies"
        assert next(load(other, [("value", 9)]))[0] == 9
        assert sorted(MADE) == [0, 1, 9]


def settled() -> int:
    """How many values were made once nothing more happens."""
    before = -1
    while before != len(MADE):
        before = len(MADE)
        time.sleep(0.05)
    return before


def test_no_more_than_a_bounded_number_waits_for_the_slowest_rank() -> None:
    with connected([0, 0], 1, 2) as (first, second):
        quick, slow = (load(reader, [("value", i) for i in range(8)]) for reader in (first, second))
        assert settled() == 2
        for _ in range(2):
            next(quick)
        assert settled() == 2
        next(slow)
        assert settled() == 3


def of_size(num: int) -> list[int]:
    return [*range(num)]


def failing(num: int) -> NoReturn:
    raise KeyError("x" * num)


MAKERS: dict[str, Callable[..., Any]] = {
    "value": value,
    "bad_sample": bad_sample,
    "broken": broken,
    "of_size": of_size,
    "failing": failing,
}


@pytest.mark.wide
@pytest.mark.parametrize("make", ["of_size", "failing"])
def test_a_late_rank_keeps_no_other_waiting_however_large_what_waits_for_it(make: str) -> None:
    num = LOAD_AHEAD + 1
    with connected([0, 1], 1, LOAD_AHEAD) as (late, prompt):
        large, small = load(late, [(make, 2**18)] * num), load(prompt, [("of_size", 3)] * num)
        assert list(small) == [of_size(3)] * num
        with pytest.raises(ExecutionError, match="KeyError") if make == "failing" else nullcontext():
            assert list(large) == [of_size(2**18)] * num


def test_a_socket_has_room_for_what_may_wait() -> None:
    ours, _theirs = Pipe()
    with socket.fromfd(ours.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.setblocking(False)
        num = 0
        with suppress(BlockingIOError):
            while True:
                send_handle(ours, ours.fileno(), None)
                num += 1
        room = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert room <= num * ANSWER_BYTES
    Lane(0, [ours], room // ANSWER_BYTES, makers_of)
    with pytest.raises(AssertionError, match="wmem_default"):
        Lane(0, [ours], room // ANSWER_BYTES + 1, makers_of)


def test_a_producer_that_does_not_listen_holds_up_neither_the_rank_nor_the_others() -> None:
    pairs = [Pipe() for _ in range(2)]
    reader = Reader([ours for ours, _ in pairs], 0, 0.05, leads=True)
    values = reader.load({"common": of_size(2**18)}, [("of_size", 1)] * 2)
    # The first one has heard nothing yet, the second all.
    said = [from_bytes(pairs[1][1].recv_bytes()) for _ in range(2) if pairs[1][1].poll(TIMEOUT_S)]
    assert said == [{"lane": 0}, {"make": {"common": of_size(2**18), "asked": [["of_size", 1]]}}]
    with pytest.raises(ExecutionError, match=r"^producer 0: sent nothing for harness.timeout_s=0.05 s$"):
        next(values)
    for _, theirs in pairs:
        theirs.close()


def test_a_rank_that_ends_in_the_middle_of_a_word_ends_nobody_else() -> None:
    pairs = [Pipe() for _ in range(2)]
    reader = Reader([pairs[0][0]], 0, TIMEOUT_S, leads=True)
    pairs[0][1].recv_bytes()
    # A tenth of a message.
    os.write(pairs[1][0].fileno(), (100).to_bytes(4) + bytes(10))
    pairs[1][0].close()
    served = [Lane(0, [line], 2, makers_of) for _, line in pairs]
    thread = threading.Thread(target=serve, args=(served,), daemon=True)
    thread.start()
    assert next(load(reader, [("of_size", 3)])) == [0, 1, 2]
    pairs[0][0].close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_memory_has_no_name_and_goes_with_the_last_array() -> None:
    own = Path("/proc/self")

    def state() -> tuple[int, list[str]]:
        maps = [
            line.split(maxsplit=5)[5] for line in (own / "maps").read_text().splitlines() if "entrain-bench" in line
        ]
        return len([*(own / "fd").iterdir()]), maps

    with connected([0], 1, 1) as (reader,):
        before, _ = state()
        values = load(reader, [("value", i, 1000) for i in range(20)])
        kept = [next(values)[1][500:] for _ in range(20)]
        assert len(MADE) == settled() == 20
        assert state() == (before + 20, ["/memfd:entrain-bench (deleted)"] * 20)
        assert [rows[0] for rows in kept] == [*range(20)]
        kept.clear()
        assert state() == (before, [])


def test_lanes_for_which_least_waits_come_first() -> None:
    with connected([0, 1], 1, 4) as (first, second):
        _, other = load(first, [("value", i) for i in range(8)]), load(second, [("value", 100)])
        assert next(other)[0] == 100
        assert settled() == 5


@pytest.mark.parametrize(
    ("maker", "kind", "message"),
    [("bad_sample", UserError, r"^sample 7: no picture$"), ("broken", ExecutionError, r"^producer 0: KeyError: 'x'$")],
)
def test_what_a_maker_raises_reaches_who_takes_its_value(maker: str, kind: type[Exception], message: str) -> None:
    with connected([0], 1, 2) as (reader,):
        values = load(reader, [("value", 0), (maker,), ("value", 2)])
        assert next(values)[0] == 0
        with pytest.raises(kind, match=message) as raised:
            next(values)
        assert "in make" in str(raised.value.__cause__)


def test_a_producer_that_is_gone_or_silent_is_named() -> None:
    ours, theirs = Pipe()
    reader = Reader([ours], 0, 0.05, leads=True)
    values = load(reader, [("value", 0), ("value", 1)])
    with pytest.raises(ExecutionError, match=r"^producer 0: sent nothing for harness.timeout_s=0.05 s$"):
        next(values)
    theirs.close()
    values = load(reader, [("value", 0)])
    with pytest.raises(ExecutionError, match=r"^producer 0: closed its connection$"):
        next(values)
