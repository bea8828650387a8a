"""DIP's modality-aware partitioner: each module in stages of its own on all pipeline ranks (arXiv:2504.14145)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray
from entrain_bench.errors import DeadlockError, IncompatibleError, require
from entrain_bench.job import Degrees, Job
from entrain_bench.layout import Layout, ModuleLayout, check_layout
from entrain_bench.planning import (
    Candidate,
    fastest_that_fits,
    partition_layers,
    recompute_choices,
)
from entrain_bench.profile import Profile
from entrain_bench.shapes import SampleShapes
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.strategy import Compose
from strategies.dip.belief import believed_s

# Sequence whose layer times split a module that no profiled sample exercises.
FALLBACK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class DipPlanner:
    """Colocates one stage of every module on every rank; a module's stages are balanced by themselves.

    Attributes:
        profile_samples: samples the layers are measured on; 4 is the one microbatch that arXiv:2605.27918 plans DIP by.
    """

    profile_samples: int = 4

    def __post_init__(self) -> None:
        require(self.profile_samples >= 1, "strategy.planner.profile_samples", self.profile_samples, "at least 1")

    def plan(self, profile: Profile, compose: Compose) -> Layout:
        """The layout with the least believed time of a profiled batch among those whose programs fit memory."""
        samples = profile.draw(self.profile_samples)
        batch = profile.draw(profile.job.global_batch)
        return fastest_that_fits(profile, _candidates(profile, samples, batch, compose), compose)


def _candidates(profile: Profile, samples: SampleShapes, batch: SampleShapes, compose: Compose) -> Iterator[Candidate]:
    """Every degree and every choice of recomputation, timed by belief on one batch; ``samples`` decide the split.

    DIP picks recomputation for each batch by an integer program; here it is part of the layout, so it is picked once,
    by what it makes of the schedule.
    """
    modules = profile.job.model.modules
    for degrees in profile.job.degrees():
        layers = [
            partition_layers(layer_s(profile, module, samples, degrees), min(degrees.pp, len(module.layers)))
            for module in modules
        ]
        for recompute in recompute_choices(len(modules)):
            layout = colocate(profile.job, degrees, layers, recompute)
            try:
                seconds = believed_s(profile, compose(batch, layout))
            except DeadlockError as error:
                raise IncompatibleError(
                    "strategy.scheduler: cannot order modules that all run on the same ranks, as DIP places them"
                ) from error
            yield Candidate(seconds + profile.step_s(layout), layout)


def colocate(job: Job, degrees: Degrees, layers: Sequence[tuple[int, ...]], recompute: Sequence[bool]) -> Layout:
    """All modules of a replica on the same consecutive blocks of TP x CP ranks, one block a stage.

    A module with fewer layers than blocks leaves blocks out: encoders the last ones, the LLM the first ones, so that
    together they use all.

    Args:
        job: the job.
        degrees: TP, CP, DP and the number of blocks of a replica.
        layers: layers of each stage, for every module of the model.
        recompute: modules that recompute their activations.
    """
    width = degrees.tp * degrees.cp
    ranks = np.arange(degrees.dp * degrees.pp * width).reshape(degrees.dp, degrees.pp, width)
    modules = []
    for module, split, again in zip(job.model.modules, layers, recompute, strict=True):
        first = 0 if module.is_encoder else degrees.pp - len(split)
        held = np.ascontiguousarray(ranks[:, first : first + len(split)])
        modules.append(ModuleLayout(module.name, degrees.tp, degrees.cp, split, held, again))
    layout = Layout(tuple(modules), job.num_microbatches(degrees.dp))
    check_layout(layout, job.model, job.cluster)
    return layout


def layer_s(profile: Profile, module: ModuleSpec, samples: SampleShapes, degrees: Degrees) -> FloatArray:
    """Measured forward and backward seconds of every layer on the samples as one packed microbatch ``[layers]``.

    A module that no sample exercises is measured on one sequence of ``FALLBACK_TOKENS``.
    """
    lengths = module.lengths(samples, module.units(samples))
    probe = lengths if len(lengths) else np.array([FALLBACK_TOKENS])
    times = profile.measure(module, probe, degrees.tp, degrees.cp)
    return np.array([float(t.total_s[0]) for t in times])[module.layer_kind]
