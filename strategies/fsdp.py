"""Fully sharded data parallelism (FSDP, ZeRO-3), and VeOmni's balance of encoders on it.

Every rank runs the whole model on samples of its own, as in torch 2.13 (``torch.distributed.fsdp.fully_shard``). A
micro-step takes as long as its slowest replica, because all gather weights together. In VeOmni (ByteDance-Seed/VeOmni,
pull request 425) ranks deal out the items of a micro-step, encode, and send the results to where the samples are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.lpt import arrival_places, longest_first_by_row
from entrain_bench.balancing.options import TrialOptions
from entrain_bench.balancing.planning import mean_length, place_chain, recompute_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import step_assignment
from entrain_bench.balancing.rounds import FULLY_SHARDED, PlanePlanner, samples_at_once, sharded_degrees, sharded_job
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import between
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class FsdpPlanner(TrialOptions):
    """One stage, weights sharded over all data- and context-parallel ranks; TP, CP and recomputation by trial runs.

    Another ``layout.sharding`` shares out less (ZeRO-1: plain data parallelism), or inside nodes.

    DP is the number of ranks over TP x CP: ``layout.dp`` if CP is fixed, too, otherwise a multiple of it.

    Attributes:
        widths: whether layouts whose samples may take CP groups of any width compete as well.
    """

    handles_generators: ClassVar[bool] = True
    shardings: ClassVar[tuple[str, ...]] = FULLY_SHARDED
    widths: bool = False

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory; ``IncompatibleError`` for stages."""
        profile = profile.for_job(sharded_job(profile.job))
        samples = profile.samples.draw(self.profile_samples)
        later = make_program.chooses_recomputation
        others = []
        if self.widths:
            wide = PlanePlanner(profile_samples=self.profile_samples, num_trials=self.num_trials, sharded=True)
            others = [wide.candidates(profile, make_program)]
        return chosen_layout(
            profile,
            lambda sized: by_estimate(_candidates(sized, samples, chosen_later=later)),
            make_program,
            self.num_trials,
            others,
        )


def _candidates(profile: Profile, samples: SampleShapes, *, chosen_later: bool) -> Iterator[Candidate]:
    """Every choice of degrees and recomputation, with the time of average micro-steps and the optimizer's."""
    job = profile.job
    whole = [(len(module.layers),) for module in job.model.modules]
    for degrees in sharded_degrees(job):
        for recompute in recompute_choices(job, chosen_later=chosen_later):
            own_job = job.with_microbatch_size(samples_at_once(job, degrees.dp))
            layout = place_chain(own_job, degrees, whole, recompute, leading=False)
            each_s = sum(
                micro_step_s(profile.for_job(own_job), module, placed, samples)
                for module, placed in zip(job.model.modules, layout.modules, strict=True)
            )
            yield Candidate(layout.num_microbatches * each_s + profile.programs.step_s(layout), layout)


def micro_step_s(profile: Profile, module: ModuleSpec, placed: ModuleLayout, samples: SampleShapes) -> float:
    """Seconds of a module on a microbatch of average samples; a layer takes the longer of computation and traffic."""
    lengths = module.lengths(samples, module.units(samples))
    if not len(lengths):
        return 0.0
    count = max(1, round(profile.job.microbatch_size * len(lengths) / len(samples)))
    times = profile.layers.measure(module, np.full(count, mean_length(lengths)), placed.tp, placed.cp)
    kinds = [(one.forward_s + one.forward_comm_s, one.backward_s + one.backward_comm_s, one.again_s) for one in times]
    forward, backward, once_more = np.array(kinds)[module.layer_kind, :, 0].T
    again = np.array([placed.recompute and layer.recomputed and layer.backward_share > 0 for layer in module.layers])
    traffic = profile.layers.traffic(module, placed)
    gather_s = traffic.gather_s * (not placed.keeps_weights)
    forward_s = np.maximum(forward, gather_s).sum()
    return float(forward_s + np.maximum(backward + again * once_more, traffic.again_s + traffic.scatter_s).sum())


@dataclass(frozen=True, slots=True)
class EncoderBalance:
    """Samples in order of arrival; each encoder's items over all replicas, longest first, in every micro-step.

    With groups of several widths, items take those that end first by estimated seconds, for any exponent. Adjacent
    replicas of the LLM join into one where that ends sooner.

    Attributes:
        cost_exponent: power of an item's tokens that counts as its cost; 2 is VeOmni's, 1 takes the encoder as linear.
    """

    handles_widths: ClassVar[bool] = True
    cost_exponent: Annotated[int, between(1, 2, "1 or 2")] = 2

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every item and sample; ``IncompatibleError`` if encoder and LLM differ in DP."""
        job = profile.job
        if layout.modules[0].widths:
            return step_assignment(shapes, layout, profile, balanced=[module.name for module in job.model.encoders])
        *encoders, llm = layout.modules
        replica, microbatch = arrival_places(len(shapes), job.microbatch_size, llm.dp)
        modules = []
        for module, placed in zip(job.model.encoders, encoders, strict=True):
            if placed.dp != llm.dp:
                raise IncompatibleError(
                    f"layout: {placed.module} has dp={placed.dp}, {llm.module} has dp={llm.dp}: must be equal, "
                    f"because items are balanced over the LLM's replicas"
                )
            units = module.units(shapes)
            step = microbatch[shapes.item_sample[units]]
            tokens = module.lengths(shapes, units)
            cost = (tokens**self.cost_exponent).astype(float)
            modules.append(ModuleAssignment(longest_first_by_row(cost, step, placed.dp), step))
        return Assignment((*modules, ModuleAssignment(replica, microbatch)))
