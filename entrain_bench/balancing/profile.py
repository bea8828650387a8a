"""Profiles: costs and samples that strategies may see, with estimated times of programs, and trial runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from entrain_bench.balancing.estimates import BatchCache, Corrector, LayerProfile, ProfiledSamples, UnitEstimates
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.remembered import remembered
from entrain_bench.costs.edges import held_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.sharding import exposed_s, passes_together, remade_layers, sharded_modules
from entrain_bench.costs.steps import ExposedStep, delayed_s, trailing_s
from entrain_bench.costs.truth import CostTruth, Handovers
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.simulate.engine import place_actions
from entrain_bench.simulate.executor import place_program, place_steps
from entrain_bench.specs.job import Job
from entrain_bench.specs.workload import ShapeSource

# Steps of layouts that are remembered: those of all candidates of a job.
MAX_STEPS = 4096


@dataclass(frozen=True, slots=True)
class ProgramTimes:
    """Times of programs and steps of a job, from durations that a strategy estimates."""

    _job: Job
    _truth: CostTruth
    _layers: LayerProfile

    def simulate(self, program: Program, duration_s: FloatArray, transfers: bool = False) -> FloatArray:
        """Return estimated ends of actions ``[actions]``, by default without transfers; ``DeadlockError`` if none."""
        if not transfers:
            return place_actions(program, duration_s, np.zeros(len(program.dep_actions)))[1]
        handed = self.handovers(program)
        hold_s = held_s(program, handed.send_s, handed.receive_s)
        return place_actions(program, duration_s, handed.delay_s, hold_s=hold_s)[1]

    def iteration_s(self, program: Program, duration_s: FloatArray) -> float:
        """Return an iteration's estimated seconds with transfers, gathers and the step, by durations ``[actions]``."""
        costs = self._truth.step_costs
        layer_s = self._layers_s(program.layout)
        ends = [costs.ends(program, index, module_s, duration_s) for index, module_s in enumerate(layer_s)]
        handed = self.handovers(program)
        hold_s = held_s(program, handed.send_s, handed.receive_s)
        release_s, stall_s = costs.gathers(program, ends)
        added_s, together = self._besides_passes(program, duration_s, layer_s)
        duration_s = duration_s + added_s
        times = place_actions(program, duration_s, handed.delay_s, None, hold_s, release_s, stall_s, together)
        place_steps(program, costs.steps(program, ends), hold_s, *times)
        return float(times[1].max())

    def with_weights_s(self, program: Program, duration_s: FloatArray) -> FloatArray:
        """Return estimated seconds of actions, including moves of offloaded or sharded weights ``[actions]``."""
        return duration_s + self._besides_passes(program, duration_s, self._layers_s(program.layout))[0]

    def handovers(self, program: Program) -> Handovers:
        """Return measured transfer times of a program on idle links; bytes follow from shapes and layout."""
        return self._truth.handovers(program)

    def _layers_s(self, layout: Layout) -> list[tuple[FloatArray, FloatArray]]:
        """Forward and backward seconds of every layer on a mean microbatch, for every module ``[layers]``."""
        layer_s = []
        for module, placed in zip(self._job.model.modules, layout.modules, strict=True):
            batch = (self._job.global_batch, placed.dp * layout.num_microbatches)
            layer_s.append(self._layers.mean_microbatch_s(module, placed, *batch))
        return layer_s

    def _besides_passes(
        self, program: Program, duration_s: FloatArray, layer_s: Sequence[tuple[FloatArray, FloatArray]]
    ) -> tuple[FloatArray, IntArray | None]:
        """Seconds that moving offloaded or sharded weights adds to passes, and passes that start together."""
        cluster = self._truth.cluster
        added_s = self._truth.memory.offload_bytes(program) / cluster.device.host_bandwidth_bytes_per_s
        layers_s = {}
        for index in sharded_modules(program):
            forward_s, backward_s = layer_s[index]
            ahead = duration_s[program.forward_actions(index)] * (forward_s / forward_s.sum())
            back = backward_s + forward_s * remade_layers(program, index)
            share = back / np.maximum(back.sum(axis=1, keepdims=True), 1e-12)
            layers_s[index] = ahead, duration_s[program.backward_actions(index)] * share
        if layers_s:
            added_s = added_s + exposed_s(program, layers_s, cluster, self._job.framework)
        return added_s, passes_together(program)

    def step_s(self, layout: Layout) -> float:
        """Return the seconds that gathers, synchronization and the optimizer of a step add to average microbatches."""

        def made() -> float:
            gather_s, sync_s, optimizer_s = self.lane_steps_s(layout)
            return float((gather_s + optimizer_s).max() + sync_s.max())

        key = layout.content, layout.num_microbatches, self._job.global_batch
        return remembered(self._layers.steps_s, key, made, MAX_STEPS)

    def lane_steps_s(self, layout: Layout) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return gather, synchronization and optimizer seconds of ``step_s`` on every lane ``[lanes]``."""
        exposed = self.exposed_steps(layout)
        framework = self._job.framework
        gather_s = layout.lane_sums([step.gather_s for step in exposed])
        sync_s = layout.lane_sums([step.sync_s for step in exposed])
        optimizer_s = layout.lane_sums([step.optimizer_s for step in exposed])
        if sum(len(blocks.held_lanes) for blocks in layout.blocks) > layout.num_lanes:
            lanes = [blocks.of_stage(stage) for blocks in layout.blocks for stage in range(blocks.num_stages)]
            forward_s = []
            backward_s = []
            for placed, passes in zip(layout.modules, self._layers_s(layout), strict=True):
                ahead_s, back_s = np.add.reduceat(passes, np.cumsum((0, *placed.layers_per_stage[:-1])), axis=1)
                forward_s.append(ahead_s)
                backward_s.append(back_s + placed.recompute * ahead_s)
            modules = [*zip(self._job.model.modules, layout.modules, strict=True)]
            costs = self._truth.step_costs
            if framework.overlap_param_gather and framework.align_param_gather:
                gathers_s = np.concatenate([costs.gather_s(module, placed) for module, placed in modules])
                lead_s = np.concatenate([step.gather_s for step in exposed])
                gather_s = delayed_s(lanes, layout.num_lanes, lead_s, gathers_s, np.concatenate(forward_s))
            if framework.overlap_grad_reduce:
                syncs_s = np.concatenate([costs.sync_s(module, placed) for module, placed in modules])
                lag_s = np.concatenate([step.sync_s for step in exposed])
                sync_s = trailing_s(lanes, layout.num_lanes, lag_s, syncs_s, np.concatenate(backward_s))
        return gather_s, sync_s, optimizer_s

    def exposed_steps(self, layout: Layout) -> list[ExposedStep]:
        """Return the part of each module's step that passes of an average microbatch do not hide, per stage."""
        modules = zip(self._job.model.modules, layout.modules, self._layers_s(layout), strict=True)
        return [self._truth.step_costs.exposed_beside(module, placed, *passes) for module, placed, passes in modules]


@dataclass(frozen=True, slots=True)
class Profile:
    """The measurements and cost estimates that a strategy may use."""

    job: Job
    samples: ProfiledSamples  # of the workload, to plan with
    layers: LayerProfile  # measured times of single layers
    estimates: UnitEstimates  # of the workload of each unit, with the estimation error that the user sets
    _truth: CostTruth
    tuning_budget: int | None = None  # simulated batches of ``balancing.tuning``; None: planners choose by own trials

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
        """Return the profile whose estimates have the mean error of units of about the same length."""
        return replace(self, estimates=replace(self.estimates, _smooth=True))

    def corrected(self, correction: Corrector) -> Self:
        """Return the profile whose estimates have the penalties that executed iterations have taught."""
        if not correction.active or not correction.ratios:
            return self
        return replace(self, estimates=replace(self.estimates, _correction=correction, _cache=BatchCache()))


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
