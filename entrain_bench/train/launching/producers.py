"""The processes that make inputs apart from the ranks: how many, their start, and how ranks find them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from entrain_bench.base.errors import UserError
from entrain_bench.run.workers import end_with_parent, uninterrupted
from entrain_bench.train.launching.failures import output_path
from entrain_bench.train.messages.control import gather_json
from entrain_bench.train.producing.producer import LOAD_AHEAD, produce
from entrain_bench.train.producing.rendezvous import Rendezvous
from entrain_bench.train.settings import TrainSettings

# By default, where there are as many cores.
PRODUCERS_PER_RANK = 2
RENDEZVOUS = "producers.json"


def num_producers(settings: TrainSettings, num_ranks: int) -> int:
    """Producers of a machine with so many ranks; 0 where the ranks make inputs themselves.

    Raises:
        UserError: for a machine on which they cannot share memory.
    """
    if settings.preprocessing != "processes":
        return 0
    if sys.platform != "linux":
        raise UserError(f"harness.preprocessing=processes: shares memory as Linux does; thread works on {sys.platform}")
    if settings.preprocessing_processes is not None:
        return settings.preprocessing_processes
    return max(1, min(len(os.sched_getaffinity(0)) - num_ranks, PRODUCERS_PER_RANK * num_ranks))


def start_producers(
    processes: list[BaseProcess],
    rendezvous: Rendezvous,
    num_ranks: int,
    context: ForkServerContext | SpawnContext,
    work: Path | None = None,
) -> None:
    """Start a machine's producers, appending each.

    What they print goes to ``work``, or where this process prints.
    """
    # All of it: a server has the environment of its own start. A GPU would only get a context that nobody uses.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for number in range(rendezvous.num_producers):
        args = (environment, rendezvous, number, num_ranks, work)
        process = context.Process(target=_run_producer, args=args, name=f"producer-{number}", daemon=True)
        with uninterrupted():
            process.start()
        processes.append(process)


@contextmanager
def producers_under_torchrun(settings: TrainSettings, control: dist.ProcessGroup) -> Iterator[Rendezvous | None]:
    """The producers of this rank's machine, which its first rank starts; collective over all ranks.

    They end with that rank, however it ends.
    """
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if not (num := num_producers(settings, num_ranks)):
        yield None
        return
    processes: list[BaseProcess] = []
    machine, first = os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"] == "0"
    own = Rendezvous.new(num) if first else None
    try:
        if own:
            start_producers(processes, own, num_ranks, get_context("spawn"))
        everyone = gather_json([machine, own.to_json() if own else None], control)
        yield next(Rendezvous.from_json(text) for where, text in everyone if where == machine and text)
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def producers_of_launcher(work: Path) -> Iterator[Rendezvous | None]:
    """Those that the process started which also started this rank."""
    path = work / RENDEZVOUS
    yield Rendezvous.from_json(path.read_text()) if path.exists() else None


def _run_producer(
    environment: dict[str, str], rendezvous: Rendezvous, number: int, num_ranks: int, work: Path | None
) -> None:
    os.environ.update(environment)
    end_with_parent()
    if work is not None:
        try:
            output = output_path(work, number, "producer").open("w")
        except FileNotFoundError:
            # Interrupted while it started processes, the launcher is done with them.
            os._exit(1)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    torch.set_num_threads(1)
    produce(rendezvous, number, num_ranks, max(1, LOAD_AHEAD // rendezvous.num_producers))
