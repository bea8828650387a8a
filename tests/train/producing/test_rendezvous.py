"""Ranks and producers find each other, in time or not at all, whoever else knocks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, deliver_challenge

import pytest

from entrain_bench.base.errors import ExecutionError
from entrain_bench.train.producing.messages import Hello
from entrain_bench.train.producing.producer import produce
from entrain_bench.train.producing.reader import Reader
from entrain_bench.train.producing.rendezvous import Rendezvous

SHARED: list[int] = []
WAIT_S = 30.0


def asked(before: list[int]) -> int:
    before.append(len(before) + 1)
    return before[-1]


def address(rendezvous: Rendezvous) -> str:
    """Of the first producer, as ``/proc/net/unix`` shows it to everybody."""
    return f"\0{rendezvous.name}-0"


def knock(rendezvous: Rendezvous) -> socket.socket:
    """Connect as somebody who knows the name only."""
    while True:
        stranger = socket.socket(socket.AF_UNIX)
        with suppress(ConnectionRefusedError):
            stranger.connect(address(rendezvous))
            stranger.settimeout(WAIT_S)
            return stranger
        stranger.close()
        time.sleep(0.01)


@contextmanager
def accepting(rendezvous: Rendezvous, handshake_s: float) -> Iterator[list[Connection]]:
    """A producer that waits for one rank; its line is there when it is done, which it must be."""
    lines: list[Connection] = []
    wait = threading.Thread(target=lambda: lines.extend(rendezvous.accept(0, 1, handshake_s)), daemon=True)
    wait.start()
    yield lines
    wait.join(WAIT_S)
    assert not wait.is_alive()


def test_ranks_and_producers_meet_without_a_file() -> None:
    rendezvous = Rendezvous.from_json(Rendezvous.new(2).to_json())
    producers = [threading.Thread(target=produce, args=(rendezvous, i, 2, 2), daemon=True) for i in range(2)]
    late = threading.Timer(0.1, lambda: [producer.start() for producer in producers])
    late.start()
    stranger = Rendezvous(rendezvous.name, "another key", 2)
    readers = dict[int | None, Reader]()

    def join(lane: int | None) -> None:
        readers[lane] = Reader.connect(rendezvous, Hello(lane, SHARED), 5.0, leads=True)

    ranks = [threading.Thread(target=join, args=(lane,)) for lane in (0, None)]
    late.join()
    with pytest.raises(AuthenticationError):
        stranger.connect(0, 1.0)
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    # What travelled once is one object in each producer, and knows what it was asked before.
    values = [readers[0].load([partial(asked, SHARED)] * 4) for _ in range(2)]
    assert [next(own) for own in values for _ in range(4)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert not SHARED


def test_a_producer_that_never_listens_is_named() -> None:
    with pytest.raises(ExecutionError, match=r"^producer 0: not there after harness.timeout_s=0.05 \(.+\)$"):
        Rendezvous.new(1).connect(0, 0.05)


@pytest.mark.parametrize("queued", [0, 1])
def test_one_that_listens_and_never_answers_is_named_in_time(queued: int) -> None:
    rendezvous = Rendezvous.new(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(rendezvous))
        # One may wait. With it there, there is no room for the rank, which must not wait for some.
        listener.listen(0)
        before = [knock(rendezvous) for _ in range(queued)]
        begun = time.monotonic()
        with pytest.raises(ExecutionError, match=r"^producer 0: not there after harness.timeout_s=0.2 \(.+\)$"):
            rendezvous.connect(0, 0.2)
        assert 0.2 <= time.monotonic() - begun < WAIT_S
        for stranger in before:
            stranger.close()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(b"", id="silent"),
        pytest.param((300).to_bytes(4) + bytes(300), id="too long"),
        pytest.param((2**31).to_bytes(4) + b"\xff" * 8, id="without measure"),
        pytest.param((40).to_bytes(4) + b"{md4}" + bytes(35), id="of no known digest"),
        pytest.param((32).to_bytes(4) + bytes(32), id="of another key"),
    ],
)
@pytest.mark.parametrize("stays", [True, False])
def test_a_stranger_keeps_no_rank_out(words: bytes, stays: bool) -> None:
    rendezvous = Rendezvous.new(1)
    with accepting(rendezvous, 0.3) as lines:
        stranger = knock(rendezvous)
        stranger.sendall(words)
        if not stays:
            stranger.close()
        rank = rendezvous.connect(0, WAIT_S)
    lines[0].send("hello")
    assert rank.recv() == "hello"
    # What was said to it before, then the end.
    with suppress(ConnectionResetError):
        while stays and stranger.recv(4096):
            pass
    stranger.close()


@pytest.mark.parametrize("error", [AuthenticationError, EOFError, OSError, ValueError])
def test_whatever_goes_wrong_with_one_that_connects_the_next_is_heard(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    rendezvous, raised = Rendezvous.new(1), list[Exception]()

    def fail_once(line: Connection, key: bytes) -> None:
        if not raised:
            raised.append(error())
            raise raised[0]
        deliver_challenge(line, key)

    monkeypatch.setattr("entrain_bench.train.producing.rendezvous.deliver_challenge", fail_once)
    with accepting(rendezvous, WAIT_S):
        with knock(rendezvous) as stranger:
            assert stranger.recv(1) == b""
        rendezvous.connect(0, WAIT_S)
    assert raised


def test_a_stranger_that_speaks_slowly_has_no_more_time() -> None:
    rendezvous, gone = Rendezvous.new(1), threading.Event()

    def drip(stranger: socket.socket) -> None:
        with suppress(OSError):
            for byte in (256).to_bytes(4) + bytes(256):
                stranger.send(bytes([byte]))
                if gone.wait(0.1):
                    return

    with accepting(rendezvous, 0.3), knock(rendezvous) as stranger:
        slow = threading.Thread(target=drip, args=(stranger,))
        slow.start()
        begun = time.monotonic()
        rendezvous.connect(0, WAIT_S)
        # At that pace, it would have spoken for 26 s.
        assert time.monotonic() - begun < 13
        gone.set()
        slow.join()


def test_another_user_is_turned_away_before_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous, own = Rendezvous.new(1), os.geteuid()
    with accepting(rendezvous, 10 * WAIT_S):
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with knock(rendezvous) as stranger:
            assert stranger.recv(1) == b""
        with pytest.raises(AuthenticationError, match="another user"):
            rendezvous.connect(0, WAIT_S)
        monkeypatch.undo()
        rendezvous.connect(0, WAIT_S)


def test_a_rank_that_was_too_slow_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous, begun = Rendezvous.new(1), time.monotonic()
    proper, slept = Rendezvous._meet, list[float]()

    def late_once(*args: object, **kwargs: object) -> Connection:
        if threading.current_thread() is threading.main_thread() and not slept:
            slept.append(0.5)
            time.sleep(0.5)
        return proper(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Rendezvous, "_meet", late_once)
    with accepting(rendezvous, 0.2) as lines:
        rank = rendezvous.connect(0, WAIT_S)
    assert slept
    assert time.monotonic() - begun >= 0.5
    rank.send("hello")
    assert lines[0].recv() == "hello"
