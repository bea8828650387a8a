"""The processes that make inputs apart from the ranks: how many, their start, and how ranks find them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import temporary_folder
from entrain_bench.config.schema import RunConfig
from entrain_bench.run.parallel import uninterrupted
from entrain_bench.train.launching.failures import begin_process, output_path
from entrain_bench.train.messages.control import gather_json
from entrain_bench.train.producing.producer import LOAD_AHEAD, produce
from entrain_bench.train.producing.reader import Rendezvous
from entrain_bench.train.running.loader import makers_of_run
from entrain_bench.train.settings import TrainSettings

# By default, where there are as many cores.
PRODUCERS_PER_RANK = 2


def num_producers(settings: TrainSettings, num_ranks: int) -> int:
    """Producers of a machine with so many ranks; 0 where ranks make inputs, ``UserError`` if it cannot share memory."""
    if settings.preprocessing != "processes":
        return 0
    if sys.platform != "linux":
        fix = f"On {sys.platform} use harness.preprocessing=thread"
        raise UserError(f"harness.preprocessing=processes: requires Linux (shared memory). {fix}")
    if settings.preprocessing_processes is not None:
        return settings.preprocessing_processes
    return max(1, min(len(os.sched_getaffinity(0)) - num_ranks, PRODUCERS_PER_RANK * num_ranks))


def start_producers(
    processes: list[BaseProcess],
    config: RunConfig,
    rendezvous: Rendezvous,
    num_ranks: int,
    context: ForkServerContext | SpawnContext,
    work: Path | None = None,
) -> None:
    """Start a machine's producers, appending each. What they print goes to ``work``, or where this process prints."""
    # All of it: a server has the environment of its own start. A GPU would only get a context that nobody uses.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for number in range(rendezvous.num_producers):
        args = (environment, config, rendezvous, number, num_ranks, work)
        process = context.Process(target=_run_producer, args=args, name=f"producer-{number}", daemon=True)
        with uninterrupted():
            process.start()
        processes.append(process)


@contextmanager
def producers_under_torchrun(
    config: RunConfig, settings: TrainSettings, control: dist.ProcessGroup
) -> Iterator[Rendezvous | None]:
    """The producers of this rank's machine, which its first rank starts and takes along when it ends; collective."""
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if not (num := num_producers(settings, num_ranks)):
        yield None
        return
    processes: list[BaseProcess] = []
    machine = os.environ["GROUP_RANK"]
    folder = None
    with ExitStack() as stack:
        try:
            if os.environ["LOCAL_RANK"] == "0":
                folder = str(stack.enter_context(temporary_folder("entrain-bench-")))
                start_producers(processes, config, Rendezvous(Path(folder), num), num_ranks, get_context("spawn"))
            everyone = gather_json([machine, folder], control)
            yield Rendezvous(Path(next(found for where, found in everyone if where == machine and found)), num)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run_producer(
    environment: dict[str, str],
    config: RunConfig,
    rendezvous: Rendezvous,
    number: int,
    num_ranks: int,
    work: Path | None,
) -> None:
    begin_process(environment, work and output_path(work, number, "producer"))
    torch.set_num_threads(1)
    # Ranks that are there have found the data as they should be.
    lines = rendezvous.accept(number, num_ranks)
    produce(lines, number, max(1, LOAD_AHEAD // rendezvous.num_producers), makers_of_run(config))
