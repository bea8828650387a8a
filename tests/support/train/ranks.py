"""Runs a function on several gloo ranks, one process each."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 60
# Failures of other ranks that follow from the first may be reported before it, but hardly longer.
FOLLOWING_S = 0.5
# What tests of the training runtime import and what takes longest; imported once instead of on every rank.
PRELOADED = [
    "entrain_bench.train.running.loop",
    "entrain_bench_strategies.entrain",
    "hypothesis.strategies",
    "omegaconf",
    "pytest",
]


class RankError(Exception):
    """A rank failed; the message ends with its traceback."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` in ``num_ranks`` processes joined by a gloo process group.

    Results must be plain values or arrays (tensors would share memory with processes that are gone). The first failure
    ends all ranks. Processes fork from a server that has imported ``PRELOADED`` once.

    Raises:
        RankError: with the traceback of the first rank that failed.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(send, Path(folder) / "store", rank, num_ranks, function, args), daemon=True
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            return _results(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def start_server() -> None:
    """Have the server that processes fork from import what tests need; a process has one, of whoever starts it."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _results(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, str]] = []
    while len(results) + len(failures) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results and not pipe.closed}
        ready = wait(list(open_pipes), FOLLOWING_S if failures else None)
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes[pipe]
            try:
                failed_at, value = pipe.recv()
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if failed_at:
                failures.append((failed_at, f"rank {rank}:\n{value}"))
                pipe.close()
            else:
                results[rank] = value
    if failures:
        raise RankError(min(failures)[1])
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    send: Connection, store: Path, rank: int, num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    # Ranks over gloo compute on the CPU, on a machine with GPUs too.
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        send.send((None, function(rank, *args)))
    except BaseException:
        send.send((time.time(), traceback.format_exc()))
    finally:
        send.close()
