"""Programs predicted: passes emulated on cores of this machine, communication at the speed of its links."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from entrain_bench.arrays import FloatArray
from entrain_bench.bench.ranks import pin
from entrain_bench.costs.truth import CostTruth, Prices
from entrain_bench.emulate import Emulator
from entrain_bench.emulate.emulator import Measured
from entrain_bench.emulate.work import PassSeconds
from entrain_bench.experiment import prepare
from entrain_bench.fidelity.cases import Case, overrides_of
from entrain_bench.fidelity.shared import cores_of_lanes, place_on_cores
from entrain_bench.files import write_atomically
from entrain_bench.program import Pass
from entrain_bench.program.timeline import Timeline
from entrain_bench.run import compose_cells
from entrain_bench.simulate.place import place_program, timeline_of
from entrain_bench.specs.cluster import ClusterSpec, LinkTier


def predict_group(cases: Sequence[Case], links: Mapping[str, float], cores: Sequence[int], folder: Path) -> None:
    """Leave ``<folder>/<key>.emulated.json`` of every case.

    As many processes measure as there are ranks, pinned like them, each all ranks' passes: what a pass finds in the
    caches depends on who else runs.

    Args:
        cases: of equally many ranks.
        links: latency and bandwidth of a message.
        cores: of this machine.
        folder: where files go.
    """
    if not cases:
        return
    num_ranks, context = cases[0].num_ranks, get_context("spawn")
    free: Queue[int] = context.Queue()
    for rank in range(num_ranks):
        free.put(cores[rank % len(cores)])
    with ProcessPoolExecutor(num_ranks, context, _take_core, (free,)) as pool:
        tasks = [pool.submit(_measured, cases, links, cores) for _ in range(num_ranks)]
        found = [task.result() for task in tasks]
    for case, several in zip(cases, zip(*found, strict=True), strict=True):
        emulator = _emulator(case, links, mean_of(several))
        prices = emulator.price(case.program)
        values = _values(prices, _placed(case, prices, emulator.truth, cores))
        write_atomically(folder / f"{case.key}.emulated.json", json.dumps(values).encode())


def mean_of(several: Sequence[Measured]) -> Measured:
    """Means of what several processes measured of the same."""
    passes = {
        work: PassSeconds(
            fmean(own.passes[work].forward_s for own in several), fmean(own.passes[work].backward_s for own in several)
        )
        for work in several[0].passes
    }
    optimizer_s = {shape: fmean(own.optimizer_s[shape] for own in several) for shape in several[0].optimizer_s}
    return Measured(passes, optimizer_s)


def _measured(cases: Sequence[Case], links: Mapping[str, float], cores: Sequence[int]) -> list[Measured]:
    """Run the passes of each case in this process, twice: as fast as they go, then with the waits that follow.

    Nothing is taken from another case, where other passes run before and beside them.
    """
    found = []
    for case in cases:
        dense, paced = (_emulator(case, links, Measured()) for _ in range(2))
        paced.price(case.program, _placed(case, dense.price(case.program), dense.truth, cores))
        found.append(paced.measured)
    return found


def _emulator(case: Case, links: Mapping[str, float], measured: Measured) -> Emulator:
    job = prepare(case.config).job
    truth = CostTruth(job.model, joined_by(job.cluster, links), job.framework)
    return Emulator(truth, float("inf"), "cpu", "float32", measured=measured)


def simulated(case: Case, truth: Sequence[str], links: Mapping[str, float], cores: Sequence[int]) -> dict[str, Any]:
    """The case under a cost truth of its own, as ``predict_group`` leaves it.

    Args:
        case: the case.
        truth: overrides that give the truth: ``cluster/device=profiled cluster.device.path=FILE``.
        links: latency and bandwidth of a message.
        cores: of this machine.

    Raises:
        UserError: for bad overrides, or a profile that does not fit.
    """
    (cell,) = compose_cells([*overrides_of(case.num_ranks, case.workload, case.seed, case.strategy), *truth])
    given = prepare(cell.config).truth
    prices = replace(given, cluster=joined_by(given.cluster, links)).price(case.program)
    return _values(prices, _placed(case, prices, given, cores))


def joined_by(cluster: ClusterSpec, links: Mapping[str, float]) -> ClusterSpec:
    """The cluster with one tier of links, as measured."""
    return replace(cluster, tiers=(LinkTier("gloo", cluster.num_ranks, **links),))


def _placed(case: Case, prices: Prices, truth: CostTruth, cores: Sequence[int]) -> Timeline:
    program, memory = case.program, truth.memory.over_program(case.program)
    if case.num_ranks <= len(cores):
        return timeline_of(program, prices, memory)
    return place_on_cores(program, prices, cores_of_lanes(program.layout, cores), memory)


def _values(prices: Prices, timeline: Timeline) -> dict[str, Any]:
    return {
        "work_s": prices.duration_s.tolist(),
        "start_s": timeline.start_s.tolist(),
        "end_s": timeline.end_s.tolist(),
        "peak_bytes": float(timeline.peak_memory_bytes.max()),
    }


def replayed_s(case: Case, links: Mapping[str, float], took_s: FloatArray) -> float:
    """From the first pass to the end of the last, if passes take as long as they did and messages as long as modelled.

    Args:
        case: the case.
        links: latency and bandwidth of a message.
        took_s: of each action ``[actions]``.
    """
    job, program = prepare(case.config).job, case.program
    prices = CostTruth(job.model, joined_by(job.cluster, links), job.framework).price(program)
    passes = program.kind <= Pass.BACKWARD
    start, end, _ = place_program(program, replace(prices, duration_s=np.where(passes, took_s, 0.0)))
    return float(end[passes].max() - start[passes].min())


def _take_core(free: Queue[int]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    pin([free.get()], 0)
