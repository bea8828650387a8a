"""Objects that runs of one job share for any strategy; computed once per process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from entrain_bench.base.remembered import remembered
from entrain_bench.config.constants import speed_of
from entrain_bench.config.instantiate import instantiate
from entrain_bench.config.schema import RunConfig
from entrain_bench.costs.bound import Need, find_need
from entrain_bench.costs.noise import ActionNoise
from entrain_bench.costs.profiled.profiled_cluster import ProfiledDevice, cluster_with_times
from entrain_bench.costs.truth import CostTruth
from entrain_bench.records.keys import workload_of
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.variants import with_options
from entrain_bench.specs.workload import ShapeSource, Workload

# Jobs that a process remembers: the last ones, for sweeps run the cells of a job one after the other.
MAX_JOBS = 2
# Batches that a job remembers: those of a usual run.
MAX_BATCHES = 8
# Of these, what only planning sees.
PLANNING_KEYS = frozenset({"tuning", "tuning_budget", "planning_seed"})
# What of a configuration is a strategy's, or how a run is executed.
OWN = frozenset({"strategy", "harness", "iterations", "belief_error", "belief_bias", *PLANNING_KEYS})


@dataclass(frozen=True, slots=True)
class SharedJob:
    """A job with its truth and its samples.

    Attributes:
        job: the job.
        truth: what its actions cost.
        workload: where its samples are from.
        source: its samples.
    """

    job: Job
    truth: CostTruth
    workload: Workload
    source: ShapeSource
    _batches: dict[tuple[int, int], SampleShapes] = field(default_factory=dict, repr=False, compare=False)
    _needs: dict[tuple[int, int], Need] = field(default_factory=dict, repr=False, compare=False)

    def batch(self, iteration: int, seed: int) -> SampleShapes:
        """The samples of an iteration.

        Raises:
            UserError: for a sample that the model cannot take.
        """

        def drawn() -> SampleShapes:
            shapes = self.source.batch(iteration, self.job.global_batch, seed)
            self.job.model.check_shapes(shapes)
            return shapes

        return remembered(self._batches, (iteration, seed), drawn, MAX_BATCHES)

    def need(self, iteration: int, seed: int) -> Need:
        """Return the GPU time and lower bound of an iteration's samples under any layout."""
        made = partial(find_need, self.truth, self.batch(iteration, seed))
        return remembered(self._needs, (iteration, seed), made, MAX_BATCHES)


_jobs: dict[str, SharedJob] = {}


def shared_job(config: RunConfig, source: ShapeSource | None = None) -> SharedJob:
    """The job of a run.

    Args:
        config: the run.
        source: samples instead of the configured workload's.

    Raises:
        UserError: naming what is wrong in the configuration or the data.
    """
    if source is not None:
        return _made(config, source)
    content = {name: value for name, value in config.content().items() if name not in OWN}
    device = ProfiledDevice.of(config.cluster)
    data = [workload_of(config).fingerprint(), *([device.fingerprint()] if device else [])]
    key = json.dumps([content, data, asdict(speed_of(config))], sort_keys=True)
    return remembered(_jobs, key, partial(_made, config, None), MAX_JOBS)


def _made(config: RunConfig, source: ShapeSource | None) -> SharedJob:
    model = ModelSpec.from_config(config.model)
    cluster, measured = cluster_with_times(config.cluster, model, config.framework, speed_of(config))
    job = Job(
        model,
        cluster,
        config.global_batch,
        1 if config.microbatch_size is None else config.microbatch_size,
        config.layout,
        cluster.device.memory_bytes * config.memory_fraction,
        config.framework,
        free_microbatch_size=config.microbatch_size is None,
    )
    # Checked by the job; what is frozen or recomputed is a property of the model from here on.
    model = with_options(model, config.framework)
    job = replace(job, model=model)
    truth = CostTruth(model, cluster, config.framework, ActionNoise(config.action_noise, config.seed), measured)
    workload: Workload = instantiate(config.workload, "workload", "source")
    return SharedJob(job, truth, workload, workload.source(model.tokens) if source is None else source)
