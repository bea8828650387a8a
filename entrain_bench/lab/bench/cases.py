"""All cases by name, with their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

from entrain_bench.config.tree import choices
from entrain_bench.lab.bench import measures
from entrain_bench.lab.bench.measures import Measure

# Against hangs: on an idle machine with two cores no measure takes as long.
CASE_TIMEOUT_S = 300.0
# 2,048 nodes of 8 H100 GPUs: 1,024 replicas; 131,072 samples.
WIDE = (
    "cluster=h100x64",
    "cluster.num_nodes=2048",
    "model=qwen25vl_llama3_8b",
    "layout.tp=2",
    "layout.dp=1024",
    "workload=coco",
    "global_batch=131072",
)
# A small, a middle and a large model; runs of one job share its batches, bounds and layer times.
SHARED = (
    ("workload=opencqa_ocr", "model=qwen25vl_llama3_1b"),
    ("workload=coco", "model=qwen25vl_llama3_3b"),
    ("workload=chartqa", "model=qwen25vl_llama3_8b", "cluster=h100x64"),
)
# 16 samples per bucket, 128 buckets for 2,048 samples.
BUCKETS = ("strategy=dflop", "strategy/planner=megatron", "microbatch_size=16")
LPT = "entrain_bench.balancing.filling.lpt_with_exchange"
# The cheapest run there is.
TINY = (
    "strategy=megatron",
    "model=tiny",
    "cluster=tiny",
    "global_batch=16",
    "microbatch_size=2",
    "layout.tp=1",
    "layout.dp=2",
    "iterations=1",
)
# An LLM in two stages on two ranks of this machine, text of one length: what megatron-core's own schedule supports.
TRAINED = (
    "strategy=megatron",
    "harness=train",
    "harness.num_ranks=2",
    "harness.device=cpu",
    "cluster=tiny",
    "cluster.gpus_per_node=2",
    "cluster.tiers=[{name: pcie, num_ranks: 2, bandwidth_bytes_per_s: 24e9, latency_s: 5.7e-6}]",
    "model=tiny",
    "~model.modules.vision",
    "workload=uniform",
    "~workload.modalities.image",
    "layout.tp=1",
    "layout.dp=1",
    "layout.pp=2",
    "global_batch=16",
    "microbatch_size=2",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Measures that one process makes one by one, and the values to reach in words."""

    target: str
    measure: Callable[[], Iterator[Measure]]


CASES = {
    "cells": Case("CPU seconds of one run per strategy", measures.cells),
    "shared_cells": Case("CPU seconds of all strategies on three jobs", partial(measures.sweep_of_jobs, SHARED)),
    "sweep": Case("overhead_s <= 0.020, memory growth <= 0.02", partial(measures.sweep, 100, TINY)),
    "commands": Case(
        "CPU seconds of a command; quick: from nothing <= 60, with nothing to do <= 6", partial(measures.commands, TINY)
    ),
    "parts_64_gpus": Case(
        "assign_s <= 0.020, schedule_s + execute_s <= 0.010", partial(measures.parts, choices("strategy"), ())
    ),
    "parts_16384_gpus": Case(
        "assign_s <= 0.5, schedule_s + execute_s <= 2, peak_rss_gb <= 4",
        partial(measures.parts, ("megatron", "entrain"), WIDE, repeats=3),
    ),
    "lpt": Case(
        "fill_s <= 0.100, worst_gap <= 0.01", partial(measures.lpt, ("opencqa_ocr", "synthetic"), BUCKETS, LPT)
    ),
    "solver": Case("share <= 1.1", partial(measures.solver_limit, (0.2, 1.0), BUCKETS)),
    "training_against_megatron": Case(
        "ratio <= 1.05, loss_difference <= 1e-5", partial(measures.against_megatron, TRAINED)
    ),
}


def measure_apart(name: str) -> Iterator[Measure]:
    """Yield a case's measures as a process makes them; ``RuntimeError`` if it fails or hangs."""
    context = get_context("spawn")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(name, sent))
    process.start()
    sent.close()
    try:
        while received.poll(CASE_TIMEOUT_S):
            found: Measure | str = received.recv()
            if isinstance(found, str):
                raise RuntimeError(found)
            yield found
        raise RuntimeError(f"no measure for {CASE_TIMEOUT_S:g} s")
    except EOFError:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def _measure(name: str, sent: Connection) -> None:
    try:
        for measure in CASES[name].measure():
            sent.send(measure)
    except Exception as error:
        sent.send(f"{type(error).__name__}: {error}")
