"""Ranks and producers find each other, in time or not at all, in a folder whatever its name."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.base.errors import ExecutionError
from entrain_bench.train.producing.producer import Maker, produce
from entrain_bench.train.producing.reader import Reader, Rendezvous


def makers_of(said: dict[str, Any]) -> list[Maker]:
    return [partial(int, number) for number in said["asked"]]


def test_ranks_and_producers_meet_in_time(tmp_path: Path) -> None:
    # Longer than the address of a socket may be.
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    rendezvous = Rendezvous(folder, 2)

    def work(number: int) -> None:
        produce(rendezvous.accept(number, 2), number, 2, makers_of)

    producers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    late = threading.Timer(0.1, lambda: [producer.start() for producer in producers])
    late.start()
    readers = dict[int | None, Reader]()

    def join(lane: int | None) -> None:
        lines = [rendezvous.connect(number, 30.0) for number in range(2)]
        readers[lane] = Reader(lines, lane, 30.0, leads=True)

    ranks = [threading.Thread(target=join, args=(lane,)) for lane in (0, None)]
    for thread in (*ranks, late):
        thread.start() if thread is not late else None
    for thread in (*ranks, late):
        thread.join()
    assert list(readers[0].load({}, ["5", "6", "7"])) == [5, 6, 7]


def test_a_producer_that_never_listens_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match=r"^producer 0: not there after harness.timeout_s=0.05 \(.+\)$"):
        Rendezvous(tmp_path, 1).connect(0, 0.05)
