"""The view of a strategy: samples drawn for profiling, measured layers, and estimates made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from entrain_bench.balancing.correction import Corrector
from entrain_bench.balancing.layer_profile import LayerProfile
from entrain_bench.balancing.program_times import ProgramTimes
from entrain_bench.balancing.unit_estimates import UnitEstimates
from entrain_bench.base.errors import require
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.simulate.executor import place_program
from entrain_bench.specs.job import MAX_SAMPLES, Job
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import ShapeSource

# Samples that the mean microbatch is computed from; its passes hide a part of the step.
MEAN_SAMPLES = 256


class MeanUnits(NamedTuple):
    """Units of a module in a mean sample, their mean length in tokens, and the labelled share of LLM tokens."""

    per_sample: float
    length: float
    labelled_share: float


@dataclass(slots=True, eq=False)
class ProfiledSamples:
    """Samples of the workload for planners, separate from the training stream."""

    _source: ShapeSource
    _seed: int
    _rng: np.random.Generator = field(init=False)
    _means: dict[str, MeanUnits] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([self._seed, 0x70726F66])

    def draw(self, num_samples: int) -> SampleShapes:
        """Draw independent samples; every call draws new ones; ``UserError`` for more than ``MAX_SAMPLES``."""
        require(num_samples <= MAX_SAMPLES, "strategy: profiled samples", num_samples, f"at most {MAX_SAMPLES}")
        return self._source.draw(num_samples, self._rng)

    def tuning_batches(self, count: int, global_batch: int) -> tuple[SampleShapes, ...]:
        """Return the first global batches of a separate stream, equal for all strategies and after any draws."""
        rng = np.random.default_rng([self._seed, 0x74756E65])
        return tuple(self._source.draw(global_batch, rng) for _ in range(count))

    @property
    def state(self) -> Mapping[str, Any]:
        """State of the random draws, for ``restore``."""
        return self._rng.bit_generator.state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the random draws from an earlier ``state``."""
        self._rng.bit_generator.state = state

    def mean_units(self, module: ModuleSpec) -> MeanUnits:
        """Return the units of a module in a mean sample; draws do not change it."""
        if module.name not in self._means:
            samples = self._source.draw(MEAN_SAMPLES, np.random.default_rng([self._seed, 0x6D65616E]))
            lengths = module.lengths(samples, module.units(samples))
            share = float(samples.labelled_tokens.sum() / samples.llm_tokens.sum())
            mean = float(lengths.mean()) if len(lengths) else 0.0
            self._means[module.name] = MeanUnits(len(lengths) / len(samples), mean, share)
        return self._means[module.name]


@dataclass(frozen=True, slots=True)
class Profile:
    """A strategy's window on the truth.

    Attributes:
        job: the training job.
        samples: samples of the workload, to plan with.
        layers: measured times of single layers.
        estimates: estimated workload of each unit, with the estimation error that the user sets.
        tuning_budget: simulated batches with which planners choose by ``balancing.tuning``; None: planners choose by
            trials of their own.
    """

    job: Job
    samples: ProfiledSamples
    layers: LayerProfile
    estimates: UnitEstimates
    _truth: CostTruth
    tuning_budget: int | None = None

    @property
    def programs(self) -> ProgramTimes:
        """Estimated times of programs and of optimizer steps."""
        return ProgramTimes(self.job, self._truth, self.layers)

    @property
    def memory(self) -> Memory:
        """Memory estimates of layouts and programs, in bytes."""
        return self._truth.memory

    def trial_s(self, program: Program) -> float:
        """Return the measured iteration time of a program in a trial run, in seconds."""
        _, end, _ = place_program(program, self._truth.price(program))
        return float(end.max())

    def for_job(self, job: Job) -> Self:
        """Return the profile of a job of the same model; both share one stream of drawn samples."""
        return replace(self, job=job)

    def each_microbatch_size(self) -> list[Self]:
        """Return a profile for every microbatch size that the job allows."""
        return [self.for_job(job) for job in self.job.each_microbatch_size()]

    def under(self, layout: Layout) -> Self:
        """Return the profile with a layout's microbatch size if the planner chose it, otherwise this profile."""
        if not self.job.free_microbatch_size:
            return self
        num_microbatches = layout.modules[self.job.model.llm_index].dp * layout.num_microbatches
        return self.for_job(self.job.with_microbatch_size(-(-self.job.global_batch // num_microbatches)))

    def smoothed(self) -> Self:
        """Return the profile whose estimates have the mean error of units of about the same length.

        Times depend on lengths alone, so estimates that differ at equal lengths are wrong.
        """
        return replace(self, estimates=self.estimates.smoothed())

    def corrected(self, correction: Corrector) -> Self:
        """Return the profile whose estimates have the penalties that executed iterations have taught."""
        if not correction.active or not correction.ratios:
            return self
        return replace(self, estimates=self.estimates.corrected(correction))


def create_profile(
    job: Job,
    truth: CostTruth,
    source: ShapeSource,
    seed: int,
    belief_error: float = 0.0,
    belief_bias: float = 0.0,
    tuning_budget: int | None = None,
) -> Profile:
    """Return the profile of a job whose costs are ``truth`` and whose samples come from ``source``."""
    samples = ProfiledSamples(source, seed)
    layers = LayerProfile(truth, samples)
    estimates = UnitEstimates(job.model, layers, seed, belief_error, belief_bias)
    return Profile(job, samples, layers, estimates, truth, tuning_budget)
