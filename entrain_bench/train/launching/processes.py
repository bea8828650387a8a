"""The processes of ranks: their environment, and how they come into being."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing import forkserver, get_context, get_start_method, set_start_method
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from entrain_bench.config.schema import RunConfig
from entrain_bench.run.workers import uninterrupted
from entrain_bench.train.connections import ON_LOOPBACK, connections_unless_given
from entrain_bench.train.launching.worker import RankJob, run_rank

LOCALHOST = "127.0.0.1"


@contextmanager
def environment_of_ranks(device: str) -> Iterator[None]:
    """What ranks inherit. Without GPUs they see none: megatron-core takes one where it can."""
    wanted = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **ON_LOOPBACK}
    if device == "cpu":
        wanted["CUDA_VISIBLE_DEVICES"] = ""
    else:
        wanted |= connections_unless_given(os.environ)
    if "OMP_NUM_THREADS" not in os.environ:
        wanted["OMP_NUM_THREADS"] = "1"
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


def prepare_server(config: RunConfig | None) -> None:
    """See to a server that imports what takes seconds, for ranks to fork from; a sweep's next run finds it ready.

    It ends with this process. Only for ranks on a CPU: what is imported asks for GPUs (``torch.utils.cpp_extension``),
    and a fork of a process that did so cannot use one.
    """
    parts = (config.workload, *config.strategy.values()) if config else ()
    targets = [part["_target_"] for part in parts if isinstance(part, Mapping) and "_target_" in part]
    modules = [target.rpartition(".")[0] for target in targets]
    forkserver.set_forkserver_preload(["entrain_bench.train.launching.preload", *modules])
    with uninterrupted():
        forkserver.ensure_running()


def context_of(device: str) -> ForkServerContext | SpawnContext:
    """How ranks start: a server that asked for GPUs cannot fork a process that uses them."""
    return get_context("forkserver") if device == "cpu" else get_context("spawn")


def start_processes(ranks: list[BaseProcess], device: str, num_ranks: int, port: int, work: Path, job: RankJob) -> None:
    """Start the ranks' processes, appending each."""
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(port),
        # Else rank 0 would make a store of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    context = context_of(device)
    with _start_method(context.get_start_method()):
        for rank in range(num_ranks):
            # All of it: a server has the environment of its own start.
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=run_rank, args=(environment, work, job), daemon=True)
            with nullcontext() if device == "cpu" else uninterrupted():
                process.start()
            ranks.append(process)


@contextmanager
def _start_method(method: str) -> Iterator[None]:
    """Hand a method of Python's own to processes as their default: they do not know that of a joblib worker, loky."""
    before = get_start_method(allow_none=True)
    set_start_method(method, force=True)
    try:
        yield
    finally:
        set_start_method(before, force=True)
