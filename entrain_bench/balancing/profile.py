"""The view of a strategy: samples drawn for profiling, measured layer times, and estimates made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entrain_bench.balancing.belief_errors import length_bias, sample_error
from entrain_bench.balancing.correction import Corrector, shape_classes
from entrain_bench.balancing.packs import PackTimes, pack_times, probes, smoothed_over_lengths
from entrain_bench.base.arithmetic import fit_polynomial, matmul
from entrain_bench.base.arrays import FloatArray, IntArray, freeze
from entrain_bench.base.errors import require
from entrain_bench.costs.buckets import delayed_s, trailing_s
from entrain_bench.costs.edges import held_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.roofline import PassTimes
from entrain_bench.costs.sharding import (
    LayerTraffic,
    collective_passes,
    exposed_s,
    layer_traffic,
    remade_layers,
    sharded_modules,
)
from entrain_bench.costs.steps import ExposedStep
from entrain_bench.costs.truth import CostTruth, Handovers
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.simulate.engine import place_actions
from entrain_bench.simulate.place import place_program
from entrain_bench.simulate.steps import place_steps
from entrain_bench.specs.job import MAX_SAMPLES, Job
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import ShapeSource

# Sequence lengths at which layers are profiled (arXiv:2605.27918, section 4.1).
PROFILED_TOKENS = np.array([64, 256, 1024, 4096, 16384])
# Samples behind the mean microbatch whose passes hide a part of the step.
MEAN_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Profile:
    """A strategy's window on the truth.

    Planners draw samples and measure layers; assigners estimate the workloads of the samples they place. Estimates are
    wrong, the same way each time a sample is seen (unless ``smoothed``): by up to ``belief_error`` (relative) sample by
    sample, and by up to ``belief_bias`` for all units of a length alike. Planners choose by ``balancing.tuning`` with
    ``tuning_budget`` simulated batches, by their own trials if that is None.
    """

    job: Job
    _truth: CostTruth
    _source: ShapeSource
    _seed: int
    belief_error: float = 0.0
    belief_bias: float = 0.0
    tuning_budget: int | None = None
    _smooth: bool = field(init=False, default=False)
    _correction: Corrector = field(init=False, default=Corrector())
    _rng: np.random.Generator = field(init=False)
    _fits: dict[tuple[str, int, int], FloatArray] = field(init=False, default_factory=dict)
    _means: dict[str, tuple[float, float, float]] = field(init=False, default_factory=dict)
    _passes: dict[tuple[str, int, int, int], tuple[FloatArray, FloatArray]] = field(init=False, default_factory=dict)
    _packs: dict[tuple[str, int, int, bool], PackTimes] = field(init=False, default_factory=dict)
    _kept: list[tuple[SampleShapes, dict[tuple[object, ...], FloatArray]]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rng", np.random.default_rng([self._seed, 0x70726F66]))

    def for_job(self, job: Job) -> Profile:
        """Return the profile of a job with other planner choices; both share one stream of drawn samples."""
        other = copy(self)
        object.__setattr__(other, "job", job)
        return other

    def smoothed(self) -> Profile:
        """Return the profile whose estimates have the mean error of units of about the same length.

        Times depend on lengths alone, so estimates that differ at equal lengths are wrong.
        """
        other = copy(self)
        object.__setattr__(other, "_smooth", True)
        return other

    def corrected(self, correction: Corrector) -> Profile:
        """Return the profile whose estimates have the penalties that executed iterations have taught."""
        if not correction.active or not correction.ratios:
            return self
        other = copy(self)
        object.__setattr__(other, "_correction", correction)
        object.__setattr__(other, "_kept", [])
        return other

    def each_microbatch_size(self) -> list[Profile]:
        """Return a profile for every microbatch size that the job allows."""
        return [self.for_job(job) for job in self.job.each_microbatch_size()]

    def under(self, layout: Layout) -> Profile:
        """Return the profile with a layout's microbatch size if the planner chose it, otherwise this profile."""
        if not self.job.free_microbatch_size:
            return self
        num_microbatches = layout.modules[self.job.model.llm_index].dp * layout.num_microbatches
        return self.for_job(self.job.with_microbatch_size(-(-self.job.global_batch // num_microbatches)))

    def draw(self, num_samples: int) -> SampleShapes:
        """Draw independent samples of the workload, separate from the training stream; every call draws new ones.

        Raises:
            UserError: for more than ``MAX_SAMPLES``.
        """
        require(num_samples <= MAX_SAMPLES, "strategy: profiled samples", num_samples, f"at most {MAX_SAMPLES}")
        return self._source.draw(num_samples, self._rng)

    def tuning_batches(self, count: int) -> tuple[SampleShapes, ...]:
        """Return the first global batches of a separate stream, equal for all strategies and after any draws."""
        rng = np.random.default_rng([self._seed, 0x74756E65])
        return tuple(self._source.draw(self.job.global_batch, rng) for _ in range(count))

    @property
    def place(self) -> Mapping[str, Any]:
        """State of the random draws, for ``go_back``."""
        return self._rng.bit_generator.state

    def go_back(self, place: Mapping[str, Any]) -> None:
        """Restore the random draws of an earlier ``place``."""
        self._rng.bit_generator.state = place

    def measure(self, module: ModuleSpec, lengths: IntArray, tp: int, cp: int) -> list[PassTimes]:
        """Return measured times of one layer of each kind on one packed microbatch with sequences of these lengths."""
        return self.measure_packs(module, lengths, np.array([0, len(lengths)]), tp, cp)

    def measure_packs(
        self, module: ModuleSpec, lengths: IntArray, offsets: IntArray, tp: int, cp: int, split: bool = False
    ) -> list[PassTimes]:
        """Return ``measure`` for several packed microbatches whose sequences are CSR rows, each ``[microbatches]``.

        With ``split`` a separate pass computes weight gradients.
        """
        times = self._truth.layer_times
        lengths = np.asarray(lengths)
        return times.layers_s(
            module, times.loads(module, lengths, offsets, self._labelled(module, lengths)), tp, cp, split
        )

    def _labelled(self, module: ModuleSpec, lengths: IntArray) -> IntArray | None:
        """Labelled tokens of sequences of these lengths with the workload's mean share; None where none are told."""
        if module.layers[-1].labelled is None:
            return None
        return np.rint(lengths * self._mean(module)[2]).astype(np.int64)

    def _mean(self, module: ModuleSpec) -> tuple[float, float, float]:
        """Units of a module in a mean sample, their mean length, and the share of LLM tokens that have a label."""
        if module.name not in self._means:
            samples = self._source.draw(MEAN_SAMPLES, np.random.default_rng([self._seed, 0x6D65616E]))
            lengths = module.lengths(samples, module.units(samples))
            share = float(samples.labelled_tokens.sum() / samples.llm_tokens.sum())
            mean = float(lengths.mean()) if len(lengths) else 0.0
            self._means[module.name] = len(lengths) / len(samples), mean, share
        return self._means[module.name]

    @property
    def memory(self) -> Memory:
        """Memory estimates of layouts and programs, in bytes."""
        return self._truth.memory

    def simulate(self, program: Program, duration_s: FloatArray, transfers: bool = False) -> FloatArray:
        """Return the estimated end of every action of a program, in seconds ``[actions]``.

        Args:
            program: the program.
            duration_s: estimated seconds of each action ``[actions]``.
            transfers: whether transfers take the time of ``handovers``; if not, they are free.

        Raises:
            DeadlockError: if the order of actions contradicts their dependencies.
        """
        if not transfers:
            return place_actions(program, duration_s, np.zeros(len(program.dep_actions)))[1]
        handed = self.handovers(program)
        hold_s = held_s(program, handed.send_s, handed.receive_s)
        return place_actions(program, duration_s, handed.delay_s, hold_s=hold_s)[1]

    def iteration_s(self, program: Program, duration_s: FloatArray) -> float:
        """Return the estimated iteration time of a program in seconds, with transfers, weight gathers and the step.

        Transfers never wait for a link.

        Args:
            program: the program.
            duration_s: estimated seconds of each action ``[actions]``; values of steps are ignored.

        Raises:
            DeadlockError: if the order of actions contradicts their dependencies.
        """
        costs = self._truth.step_costs
        layer_s = self._layers_s(program.layout)
        ends = costs.ends_of_passes(program, duration_s, layer_s)
        handed = self.handovers(program)
        hold_s = held_s(program, handed.send_s, handed.receive_s)
        release_s, stall_s = costs.gathers(program, ends)
        added_s, together = self._besides_passes(program, duration_s, layer_s)
        duration_s = duration_s + added_s
        times = place_actions(program, duration_s, handed.delay_s, None, hold_s, release_s, stall_s, together)
        place_steps(program, costs.steps(program, ends), hold_s, *times)
        return float(times[1].max())

    def with_weights_s(self, program: Program, duration_s: FloatArray) -> FloatArray:
        """Return estimated seconds of actions with what moving offloaded or sharded weights adds ``[actions]``."""
        return duration_s + self._besides_passes(program, duration_s, self._layers_s(program.layout))[0]

    def _layers_s(self, layout: Layout) -> list[tuple[FloatArray, FloatArray]]:
        """``_mean_layers_s`` of every module."""
        modules = zip(self.job.model.modules, layout.modules, strict=True)
        return [self._mean_layers_s(module, placed, layout.num_microbatches) for module, placed in modules]

    def _besides_passes(
        self, program: Program, duration_s: FloatArray, layer_s: Sequence[tuple[FloatArray, FloatArray]]
    ) -> tuple[FloatArray, IntArray | None]:
        """Return the seconds that moving weights adds to passes, and groups of passes that start together.

        Weights move if they are offloaded to the host or sharded. Sharded layers divide a pass in proportion to
        ``layer_s``.
        """
        cluster = self._truth.cluster
        added_s = self.memory.offload_bytes(program) / cluster.device.host_bandwidth_bytes_per_s
        layers_s = {}
        for index in sharded_modules(program):
            forward_s, backward_s = layer_s[index]
            ahead = duration_s[program.forward_actions(index)] * (forward_s / forward_s.sum())
            back = backward_s + forward_s * remade_layers(program, index)
            share = back / np.maximum(back.sum(axis=1, keepdims=True), 1e-12)
            layers_s[index] = ahead, duration_s[program.backward_actions(index)] * share
        if not layers_s:
            return added_s, None
        return added_s + exposed_s(program, layers_s, cluster, self.job.framework), collective_passes(program)

    def step_s(self, layout: Layout) -> float:
        """Return the seconds that gathers, gradient synchronization and the optimizer add to average microbatches.

        The optimizer waits for the last synchronization of all ranks.
        """
        gather_s, sync_s, optimizer_s = self.lane_steps_s(layout)
        return float((gather_s + optimizer_s).max() + sync_s.max())

    def lane_steps_s(self, layout: Layout) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return gather, synchronization and optimizer seconds of ``step_s`` on every lane ``[lanes]``.

        Stages that share ranks use the links one by one. Overlapped communication also runs during an average
        microbatch of the other stages: gathers during forwards of earlier stages, synchronization during later
        backwards.
        """
        exposed = self.exposed_steps(layout)
        framework = self.job.framework
        gather_s, sync_s, optimizer_s = (
            layout.lane_sums([getattr(each, part) for each in exposed])
            for part in ("gather_s", "sync_s", "optimizer_s")
        )
        if layout.lane_sums([np.ones(placed.pp) for placed in layout.modules]).max() > 1:
            lanes = [blocks.of_stage(stage) for blocks in layout.blocks for stage in range(blocks.num_stages)]
            traffic = self._stage_traffic(layout)
            passes = self._mean_stages_s(layout)
            if framework.overlap_param_gather and framework.align_param_gather:
                lead_s = np.concatenate([each.gather_s for each in exposed])
                gather_s = delayed_s(lanes, layout.num_lanes, lead_s, traffic[0], passes[0])
            if framework.overlap_grad_reduce:
                lag_s = np.concatenate([each.sync_s for each in exposed])
                sync_s = trailing_s(lanes, layout.num_lanes, lag_s, traffic[1], passes[1])
        return gather_s, sync_s, optimizer_s

    def _stage_traffic(self, layout: Layout) -> tuple[FloatArray, FloatArray]:
        """How long gathers and synchronisations occupy the links, of all stages of all modules ``[stages]``."""
        costs = self._truth.step_costs
        modules = [*zip(self.job.model.modules, layout.modules, strict=True)]
        gathers, syncs = ([of(*each) for each in modules] for of in (costs.gather_s, costs.sync_s))
        return np.concatenate(gathers), np.concatenate(syncs)

    def _mean_stages_s(self, layout: Layout) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds of a mean microbatch, of all stages of all modules ``[stages]``."""
        forwards = []
        backwards = []
        for module, placed in zip(self.job.model.modules, layout.modules, strict=True):
            forward_s, backward_s = self._mean_layers_s(module, placed, layout.num_microbatches)
            starts = np.cumsum((0, *placed.layers_per_stage[:-1]))
            forwards.append(np.add.reduceat(forward_s, starts))
            backwards.append(np.add.reduceat(backward_s, starts) + placed.recompute * forwards[-1])
        return np.concatenate(forwards), np.concatenate(backwards)

    def exposed_steps(self, layout: Layout) -> list[ExposedStep]:
        """Return the part of each module's step that passes of an average microbatch do not hide, per stage."""
        modules = zip(self.job.model.modules, layout.modules, self._layers_s(layout), strict=True)
        return [self._truth.step_costs.exposed_beside(module, own, *passes) for module, own, passes in modules]

    def _mean_layers_s(
        self, module: ModuleSpec, placed: ModuleLayout, num_microbatches: int
    ) -> tuple[FloatArray, FloatArray]:
        """Measured forward and backward seconds of every layer on a mean microbatch of a replica ``[layers]``."""
        units, length, _ = self._mean(module)
        count = round(units * self.job.global_batch / (placed.dp * num_microbatches))
        key = (module.name, max(1, count), placed.tp, placed.cp)
        if key not in self._passes:
            each = np.full(key[1], max(1, round(length)))
            times = self.measure(module, each, placed.tp, placed.cp)
            forward = np.array([float((kind.forward_s + kind.forward_comm_s)[0]) for kind in times])
            backward = np.array([float((kind.backward_s + kind.backward_comm_s)[0]) for kind in times])
            self._passes[key] = forward[module.layer_kind], backward[module.layer_kind]
        return self._passes[key]

    def handovers(self, program: Program) -> Handovers:
        """Return measured transfer times of a program on idle links; bytes follow from shapes and layout."""
        return self._truth.handovers(program)

    def layer_traffic(self, module: ModuleSpec, placed: ModuleLayout) -> LayerTraffic:
        """Return measured times of the collectives of each layer with sharded weights."""
        return layer_traffic(module, placed, self._truth.cluster, self.memory.gradient_bytes)

    def trial_s(self, program: Program) -> float:
        """Return the measured iteration time of a program in a trial run, in seconds."""
        _, end, _ = place_program(program, self._truth.price(program))
        return float(end.max())

    def forward_fit(self, module: ModuleSpec, tp: int, cp: int) -> FloatArray:
        """Coefficients of ``a x^2 + b x + c`` for the forward of each layer kind ``[kinds, 3]``, seconds.

        Linear regression over ``PROFILED_TOKENS`` (arXiv:2605.27918, section 4.1).
        """
        key = (module.name, tp, cp)
        if key not in self._fits:
            measured = [self.measure(module, np.array([tokens]), tp, cp) for tokens in PROFILED_TOKENS]
            forward = np.array([[(kind.forward_s + kind.forward_comm_s)[0] for kind in kinds] for kinds in measured])
            self._fits[key] = np.stack([fit_polynomial(PROFILED_TOKENS, times, 2) for times in forward.T])
        return self._fits[key]

    def pack_times(self, module: ModuleSpec, tp: int, cp: int, split: bool = False) -> PackTimes:
        """Return the seconds that each sequence adds to a packed chunk, and the constant of a chunk.

        With ``split`` a separate pass computes weight gradients.
        """
        key = (module.name, tp, cp, split)
        if key not in self._packs:
            lengths, offsets = probes()
            self._packs[key] = pack_times(self.measure_packs(module, lengths, offsets, tp, cp, split))
        return self._packs[key]

    def estimate_units(self, module: ModuleSpec, shapes: SampleShapes, tp: int, cp: int) -> FloatArray:
        """Return the estimated forward seconds of the whole module for each unit separately ``[units]``."""

        def made() -> FloatArray:
            counts = np.bincount(module.layer_kind, minlength=len(module.kinds))
            a, b, c = matmul(counts, self.forward_fit(module, tp, cp))
            lengths = module.lengths(shapes, module.units(shapes)).astype(np.float64)
            exact = np.maximum((a * lengths + b) * lengths + c, 0.0)
            return np.asarray(exact * self.error_factor(module, shapes))

        return self.kept(shapes, ("forward", module.name, tp, cp), made)

    def error_factor(self, module: ModuleSpec, shapes: SampleShapes) -> FloatArray:
        """Return the erroneous over the exact estimate of each unit ``[units]``, for a strategy's own estimates."""

        def made() -> FloatArray:
            units = module.units(shapes)
            lengths = module.lengths(shapes, units)
            ids = shapes.sample_ids[module.owners(shapes, units)]
            factor = sample_error(module.name, ids, self._seed, self.belief_error)
            factor = factor * length_bias(module.name, lengths, self._seed, self.belief_bias)
            if self._smooth and len(factor):
                factor = smoothed_over_lengths(factor, lengths)
            if self._correction.ratios:
                index = [own.name for own in self.job.model.modules].index(module.name)
                factor = factor * self._correction.penalties(shape_classes(lengths, index))
            return factor

        return self.kept(shapes, ("error", module.name), made)

    def kept(self, shapes: SampleShapes, key: tuple[object, ...], make: Callable[[], FloatArray]) -> FloatArray:
        """Return the read-only estimate that ``make`` returns for a batch; those of the last batch are kept."""
        known = self._kept[0] if self._kept else None
        if known is None or known[0] is not shapes:
            known = shapes, {}
            self._kept[:] = [known]
        key = self._smooth, *key
        if key not in known[1]:
            freeze(estimate := make())
            known[1][key] = estimate
        return known[1][key]

    def estimate_samples(self, shapes: SampleShapes, tp: int, cp: int) -> tuple[FloatArray, FloatArray]:
        """Return the estimated forward seconds of each sample: all encoders together, and the LLM ``[samples]``."""
        encoder = np.zeros(len(shapes))
        for module in self.job.model.encoders:
            units = module.units(shapes)
            encoder += shapes.sum_items(units, self.estimate_units(module, shapes, tp, cp))
        return encoder, self.estimate_units(self.job.model.llm, shapes, tp, cp)
