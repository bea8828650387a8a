"""Programs predicted: passes emulated on cores of this machine, communication at the speed of its links."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import astuple, replace
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.costs.truth import CostTruth, Prices
from entrain_bench.lab.fidelity.programs import FidelityProgram, overrides_of
from entrain_bench.lab.fidelity.shared import cores_of_lanes, place_on_cores
from entrain_bench.lab.files import write_json
from entrain_bench.program.timeline import Timeline
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate.place import place_program, timeline_of
from entrain_bench.specs.cluster import ClusterSpec, LinkTier
from entrain_bench.train.emulate import Emulator
from entrain_bench.train.emulate.emulator import LaneOrder, Measured, PassSeconds, StageShape, StageWork, lane_orders
from entrain_bench.train.launching.group import pin


def predict_group(
    programs: Sequence[FidelityProgram], links: Mapping[str, float], cores: Sequence[int], folder: Path
) -> None:
    """Leave ``<folder>/<key>.emulated.json`` of every program, all of the same number of ranks.

    Every rank has a process that measures its passes, pinned like it: what a pass finds in the caches depends on who
    else runs. It is done twice, as fast as passes go and with the waits between them that follow.
    """
    if not programs:
        return
    num_ranks, context = programs[0].num_ranks, get_context("spawn")
    free: Queue[int] = context.Queue()
    for rank in range(num_ranks):
        free.put(cores[rank % len(cores)])
    with ProcessPoolExecutor(num_ranks, context, _take_core, (free,)) as pool:
        for one in programs:
            _, dense = _emulate(one, links, cores, pool, None)
            prices, timeline = _emulate(one, links, cores, pool, dense)
            write_json(folder / f"{one.key}.emulated.json", _values(prices, timeline), None)


def _emulate(
    one: FidelityProgram, links: Mapping[str, float], cores: Sequence[int], pool: Executor, waits: Timeline | None
) -> tuple[Prices, Timeline]:
    """Measure all lanes at the same time, with the waits of a timeline, and place them."""
    tasks = [pool.submit(_measured, one, links, lane) for lane in lane_orders(one.program, waits)]
    emulator = _emulator(one, links, mean_of([task.result() for task in tasks]))
    prices = emulator.price(one.program)
    return prices, _placed(one, prices, emulator.truth, cores)


def mean_of(several: Sequence[Measured]) -> Measured:
    """What several processes measured; means of what they all did."""
    passes, optimizer_s = defaultdict[StageWork, list[PassSeconds]](list), defaultdict[StageShape, list[float]](list)
    for own in several:
        for work, took in own.passes.items():
            passes[work].append(took)
        for shape, took_s in own.optimizer_s.items():
            optimizer_s[shape].append(took_s)
    means = {work: PassSeconds(*map(fmean, zip(*map(astuple, took), strict=True))) for work, took in passes.items()}
    return Measured(means, {shape: fmean(took_s) for shape, took_s in optimizer_s.items()})


def _measured(one: FidelityProgram, links: Mapping[str, float], lane: LaneOrder) -> Measured:
    """Run the passes of a lane in this process."""
    emulator = _emulator(one, links, Measured())
    emulator.measure(one.program, [lane])
    return emulator.measured


def _emulator(one: FidelityProgram, links: Mapping[str, float], measured: Measured) -> Emulator:
    return Emulator(_truth(one, links), float("inf"), "cpu", "float32", measured=measured)


def _truth(one: FidelityProgram, links: Mapping[str, float]) -> CostTruth:
    job = prepare(one.config).job
    return CostTruth(job.model, joined_by(job.cluster, links), job.framework)


def simulated(
    one: FidelityProgram, truth: Sequence[str], links: Mapping[str, float], cores: Sequence[int]
) -> dict[str, Any]:
    """The same under the cost truth of these overrides; ``UserError`` for bad ones, or a profile that does not fit."""
    (cell,) = compose_cells([*overrides_of(one.num_ranks, one.workload, one.seed, one.strategy), *truth])
    given = prepare(cell.config).truth
    prices = replace(given, cluster=joined_by(given.cluster, links)).price(one.program)
    return _values(prices, _placed(one, prices, given, cores))


def joined_by(cluster: ClusterSpec, links: Mapping[str, float]) -> ClusterSpec:
    """The cluster with one tier of links, as measured."""
    return replace(cluster, tiers=(LinkTier("gloo", cluster.num_ranks, **links),))


def _placed(one: FidelityProgram, prices: Prices, truth: CostTruth, cores: Sequence[int]) -> Timeline:
    program, memory = one.program, truth.memory.over_program(one.program)
    if one.num_ranks <= len(cores):
        return timeline_of(program, prices, memory)
    return place_on_cores(program, prices, cores_of_lanes(program.layout, cores), memory)


def _values(prices: Prices, timeline: Timeline) -> dict[str, Any]:
    return {
        "work_s": prices.duration_s.tolist(),
        "start_s": timeline.start_s.tolist(),
        "end_s": timeline.end_s.tolist(),
        "peak_bytes": float(timeline.peak_memory_bytes.max()),
    }


def replayed_s(one: FidelityProgram, links: Mapping[str, float], took_s: FloatArray) -> float:
    """From the first pass to the end of the last, if passes take as long as they did ``[actions]``."""
    program, passes = one.program, one.program.is_pass
    prices = _truth(one, links).price(program)
    start, end, _ = place_program(program, replace(prices, duration_s=np.where(passes, took_s, 0.0)))
    return float(end[passes].max() - start[passes].min())


def _take_core(free: Queue[int]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    pin([free.get()], 0)
