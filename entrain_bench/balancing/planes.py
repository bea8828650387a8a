"""Planner of layouts with one plane of ranks for DP and CP together, weights in stages or sharded; by trial runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench.balancing.halving import candidate_key
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import TrialOptions
from entrain_bench.balancing.planning import average_layer_s, recompute_choices, recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import (
    TENSOR_PARALLEL,
    even_layers,
    is_plane_fixed,
    plane_degrees,
    plane_layout,
    without_stages,
)
from entrain_bench.balancing.tuning import Candidates, chosen_layout
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees, Job
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class PlanePlanner(TrialOptions):
    """Plans TP and PP as in a static layout, DP x CP as one plane of groups, and one round per static microbatch.

    So CP and microbatch size of the static layout are what walks the tokens that a rank may hold in a round.

    Attributes:
        sharded: whether weights are sharded over all ranks, in one stage.
        rounds: whether the number of rounds is the layout's; otherwise the assigner of sharded weights chooses it.
    """

    handles_generators: ClassVar[bool] = True

    sharded: bool = False
    rounds: bool = True

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """Return the fastest of the most promising candidates that fit memory.

        Raises:
            UserError: if there is none; says why.
            IncompatibleError: if the job asks for what sharded weights cannot have.
        """
        if self.sharded:
            profile = profile.for_job(sharded_job(profile.job))
        return chosen_layout(profile, self.candidates(profile, make_program), make_program, self.num_trials)

    def candidates(self, profile: Profile, make_program: MakeProgram) -> Candidates:
        """Return candidates of every TP, PP, number of rounds and recomputation, by rising estimate."""
        samples = profile.samples.draw(self.profile_samples)
        batch = profile.samples.draw(profile.job.global_batch)
        known = PlaneEstimates(samples, batch, make_program.draft)
        later = make_program.chooses_recomputation
        return lambda sized: by_estimate(self._offered(sized, known, chosen_later=later))

    def _offered(self, profile: Profile, known: PlaneEstimates, *, chosen_later: bool) -> Iterator[Candidate]:
        job = profile.job
        problem = None
        is_any = False
        for tp, pp, rounds in dict.fromkeys(self._planes(job)):
            for layers, leading in even_layers(job.model, known.layers(profile, tp), pp):
                for recompute in recompute_choices(job, chosen_later=chosen_later):
                    try:
                        layout = plane_layout(job, tp, layers, leading, recompute, rounds, sharded=self.sharded)
                        candidate = known.estimated(profile, layout, own_rounds=self.rounds)
                    except UserError as error:
                        problem = problem or error.with_traceback(None)
                        continue
                    is_any = True
                    yield candidate
        if problem is not None and not is_any:
            raise problem

    def _planes(self, job: Job) -> Iterator[tuple[int, int, int]]:
        """Yield TP, PP and rounds of the static layouts that a request allows."""
        if not self.sharded:
            yield from ((degrees.tp, degrees.pp, job.num_microbatches(degrees.dp)) for degrees in job.degrees())
        elif self.rounds:
            for degrees in sharded_degrees(job):
                yield degrees.tp, 1, job.global_batch // (degrees.dp * samples_at_once(job, degrees.dp))
        else:
            free = replace(job, request=replace(job.request, cp=None, pp=1, dp=None), microbatch_size=1)
            yield from ((tp, 1, 1) for tp in plane_degrees(job, sorted({degrees.tp for degrees in free.degrees()})))


@dataclass(frozen=True, slots=True)
class PlaneEstimates:
    """Layer times and estimates that were computed for earlier layouts.

    Attributes:
        samples: averaged into one shape.
        batch: what programs are estimated on.
        make_program: the strategy's programs.
    """

    samples: SampleShapes
    batch: SampleShapes
    make_program: MakeProgram
    _layer_s: dict[int, list[FloatArray]] = field(default_factory=dict)
    _estimates: dict[tuple[object, ...], tuple[float, int] | UserError] = field(default_factory=dict)

    def layers(self, profile: Profile, tp: int) -> list[FloatArray]:
        """Return seconds of every layer of each module for an average sample at a TP."""
        if tp not in self._layer_s:
            one = profile.for_job(profile.job.with_microbatch_size(1))
            self._layer_s[tp] = average_layer_s(one, self.samples, tp, 1)
        return self._layer_s[tp]

    def estimated(self, profile: Profile, layout: Layout, *, own_rounds: bool) -> Candidate:
        """The layout with the believed seconds of the batch's program, whose rounds it has unless it has its own.

        Recomputation lengthens the program of stages by its share of an average sample. With sharded weights memory
        decides on widths and rounds, so each choice of recomputation has a program of its own.

        Raises:
            UserError: if there is no program.
        """
        again = [placed.recompute for placed in layout.modules]
        if any(again) and not layout.modules[0].sharded:
            plain = replace(layout, modules=tuple(replace(placed, recompute=False) for placed in layout.modules))
            module_s = np.array([float(layer_s.sum()) for layer_s in self.layers(profile, layout.modules[0].tp)])
            slower = float((module_s * [recompute_factor(recompute) for recompute in again]).sum() / module_s.sum())
            return Candidate(self.estimated(profile, plain, own_rounds=own_rounds).estimated_s * slower, layout)
        key = candidate_key(layout)
        if key not in self._estimates:
            try:
                program = self.make_program(self.batch, layout)
                rounds = 1 + int(program.chunks[program.model.llm_index].microbatch.max())
                self._estimates[key] = packed_iteration_s(program, profile), rounds
            except UserError as error:
                self._estimates[key] = error.with_traceback(None)
        estimate = self._estimates[key]
        if isinstance(estimate, UserError):
            raise estimate
        return Candidate(estimate[0], layout if own_rounds else replace(layout, num_microbatches=estimate[1]))


def sharded_job(job: Job) -> Job:
    """The job ``without_stages``.

    Raises:
        IncompatibleError: if it asks for stages, or for optimizer states shared by parts of the ranks.
    """
    asked = job.request
    if asked.pp not in (None, 1):
        raise IncompatibleError(f"layout.pp={asked.pp}: must be 1 or null with sharded weights")
    if job.framework.encoder_optimizers > 1:
        raise IncompatibleError(
            f"encoder_optimizers={job.framework.encoder_optimizers}: must be 1 with sharded weights"
        )
    job = without_stages(job)
    if is_plane_fixed(asked := job.request) and not plane_degrees(job, TENSOR_PARALLEL):
        tps = [asked.tp] if asked.tp else [tp for tp in TENSOR_PARALLEL if job.cluster.gpus_per_node % tp == 0]
        allowed = " or ".join(str(job.cluster.num_ranks // (tp * (asked.cp or 1))) for tp in tps)
        raise IncompatibleError(
            f"layout.dp={asked.dp}: must be null or {allowed} with layout.cp={asked.cp} and sharded weights, "
            "which have no stages"
        )
    return job


def sharded_degrees(job: Job) -> list[Degrees]:
    """Every (TP, CP, DP) of one stage that uses all ranks, its DP a multiple of the requested one.

    Raises:
        UserError: if there is none; says why.
    """
    asked = job.request
    job.check_request()
    dp = asked.dp if is_plane_fixed(asked) else None
    free = replace(job, request=replace(asked, pp=1, dp=dp), microbatch_size=1)
    fitting = [
        degrees
        for degrees in free.degrees()
        if degrees.dp % (asked.dp or 1) == 0
        and (job.global_batch // degrees.dp) % samples_at_once(job, degrees.dp) == 0
    ]
    if not fitting:
        raise UserError(
            f"layout.dp={asked.dp} microbatch_size={job.microbatch_size}: no layout fits. With sharded weights DP is "
            f"{job.cluster.num_ranks} / (TP x CP); it must be a multiple of layout.dp, and microbatch_size must divide "
            f"global_batch={job.global_batch} / DP"
        )
    return fitting


def samples_at_once(job: Job, dp: int) -> int:
    """Return samples per microbatch of a replica: the job's size, or all samples of the replica if it has fewer."""
    return min(job.microbatch_size, job.global_batch // dp)
