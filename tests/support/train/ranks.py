"""Runs a function on several gloo ranks, in processes that stay for the session of tests."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 60
# Failures of other ranks that follow from the first may be reported before it, but hardly longer.
FOLLOWING_S = 0.5
# Name of the processes, which tests of launchers do not count.
NAME = "pool-rank"
# What tests of the training runtime import and what takes longest; imported once instead of on every rank.
PRELOADED = [
    "entrain_bench.train.loop",
    "entrain_bench_strategies.entrain",
    "hypothesis.strategies",
    "omegaconf",
    "pytest",
]


class RankError(Exception):
    """A rank failed; the message ends with its traceback."""


_pool: list[tuple[BaseProcess, Connection]] = []


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, stay: bool = True) -> list[Any]:
    """Call ``function(rank, *args)`` in ``num_ranks`` processes joined by a gloo process group.

    Results must be plain values or arrays. Processes fork from a server that has imported ``PRELOADED`` and stay for
    the next call, with what they have compiled. Those of a function that fails, changes packages or shards weights do
    not ``stay``: DTensor's caches know groups that are gone. The first failure ends all of them.

    Raises:
        RankError: with the traceback of the first rank that failed.
    """
    pool = _pool if stay else []
    while len(pool) < num_ranks:
        pool.append(_start())
    pipes = [pipe for _, pipe in pool[:num_ranks]]
    with TemporaryDirectory() as folder:
        try:
            for rank, pipe in enumerate(pipes):
                pipe.send((Path(folder) / "store", rank, num_ranks, function, args, stay))
            results = _results(pipes)
            # A rank takes its group down once no other needs it.
            for pipe in pipes if stay else ():
                pipe.send(None)
        except BaseException:
            _end(pool)
            raise
    if not stay:
        _end(pool)
    return results


@atexit.register
def _end_all() -> None:
    _end(_pool)


def _end(pool: list[tuple[BaseProcess, Connection]]) -> None:
    for process, _ in pool:
        process.kill()
    for process, pipe in pool:
        process.join()
        pipe.close()
    pool.clear()


def start_server() -> None:
    """Have the server that processes fork from import what tests need; a process has one, of whoever starts it."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _start() -> tuple[BaseProcess, Connection]:
    start_server()
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), name=NAME, daemon=True)
    process.start()
    there.close()
    return process, here


def _results(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, str]] = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), FOLLOWING_S if failures else None)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failed_at, value = pipe.recv()
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if failed_at:
                failures.append((failed_at, f"rank {rank}:\n{value}"))
            else:
                results[rank] = value
    if failures:
        raise RankError(min(failures)[1])
    return [results[rank] for rank in range(len(pipes))]


def _serve(pipe: Connection) -> None:
    # Ranks over gloo compute on the CPU, on a machine with GPUs too.
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    while True:
        try:
            store, rank, num_ranks, function, args, stays = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), num_ranks),
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            pipe.send((None, function(rank, *args)))
        except BaseException:
            pipe.send((time.time(), traceback.format_exc()))
        if not stays:
            return
        pipe.recv()
        # Hooks hold stages, and so their groups, in circles.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
