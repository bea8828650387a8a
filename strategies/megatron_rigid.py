"""Megatron-LM set up by rules of thumb, nothing measured and nothing searched.

The baseline of DistTrain's, DFLOP's and DIP's papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, fastest_in_trials
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.planning import partition_layers, place_chain, place_cuts, recompute_choices, spread_blocks
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees, Job
from entrain_bench.specs.parse import Count, OneOf, at_least


@dataclass(frozen=True, slots=True)
class RigidPlanner:
    """Takes the requested degrees, and sets free ones by rules of thumb.

    TP is the widest that a node and the heads allow, CP the least, PP the fewest stages that fit memory, DP the rest.
    Recomputation comes last, where no number of stages fits without.

    Attributes:
        placement: ``leading_stages``: encoders have their own first stages of a replica, generators their own last
            ones. ``first_stage``: encoders are on the first LLM stage, generators on the last. ``interleaved``: the
            layers of encoder and LLM are one chain, cut into chunks of equal parameters that cycle over the ranks.
        virtual_stages: chunks of a rank with ``interleaved``.
        outer_stages: stages of the encoders, and of the generators, where they have their own.
        recompute: whether all modules recompute; None: if nothing fits otherwise. ``layout.recompute`` goes before it.
    """

    handles_generators: ClassVar[bool] = True
    placement: Annotated[str, OneOf(("leading_stages", "first_stage", "interleaved"))] = "leading_stages"
    outer_stages: Count = 1
    virtual_stages: Annotated[int, at_least(2)] = 2
    recompute: bool | None = None

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The layout with the fewest stages that fit memory, at the widest TP and the least CP."""

        def candidates(sized: Profile) -> list[Candidate]:
            degrees = [*sized.job.degrees()]
            widest = max(one.tp for one in degrees)
            least = min(one.cp for one in degrees)
            chosen = sorted((one for one in degrees if (one.tp, one.cp) == (widest, least)), key=lambda one: one.pp)
            # The place in this order is the estimate: the first that fits is taken.
            choices = [
                Candidate(float(place), layout)
                for place, (again, one) in enumerate(product(self._recompute(sized.job), chosen))
                for layout in self._layouts(sized.job, one, again)
            ]
            if not choices:
                stages = ", ".join(str(one.pp) for one in chosen)
                raise UserError(
                    f"strategy.planner.placement={self.placement} outer_stages={self.outer_stages}: model="
                    f"{sized.job.model.name} cannot be spread evenly over {stages} stages (tp={widest} cp={least})"
                )
            return choices

        return fastest_in_trials(profile, candidates, make_program, num_trials=1)

    def _recompute(self, job: Job) -> list[tuple[bool, ...]]:
        """The choices of recomputing modules, in the order in which they are tried."""
        if job.request.recompute is not None:
            return recompute_choices(job)
        again = [False, True] if self.recompute is None else [self.recompute]
        return [(recompute,) * len(job.model.modules) for recompute in again]

    def _layouts(self, job: Job, degrees: Degrees, recompute: Sequence[bool]) -> Iterator[Layout]:
        """The layout with these degrees; none if a stage would have no block."""
        if self.placement == "interleaved":
            yield from _interleaved(job, degrees, recompute, self.virtual_stages)
            return
        model = job.model
        leading = self.placement == "leading_stages"
        outer = self.outer_stages if leading else 0
        llm_stages = degrees.pp - outer * (bool(model.encoders) + bool(model.generators))
        if llm_stages < 1:
            return
        layers = []
        for index, module in enumerate(model.modules):
            stages = llm_stages if index == model.llm_index else max(outer, 1)
            split = (len(module.layers),) if stages == 1 else spread_blocks(len(module.layers), stages)
            if split is None:
                return
            layers.append(split)
        yield place_chain(job, degrees, layers, recompute, leading)


def _interleaved(job: Job, degrees: Degrees, recompute: Sequence[bool], virtual_stages: int) -> Iterator[Layout]:
    """One chain of layers in chunks of nearly equal parameters, chunk i on rank i modulo PP: interleaved 1F1B."""
    model = job.model
    if len(model.modules) > 2 or model.generators:
        raise IncompatibleError(
            f"strategy.planner.placement=interleaved: model={model.name} has {len(model.modules)} modules; allowed are "
            "an LLM and one encoder"
        )
    parameters = [np.array([layer.parameters for layer in module.layers], np.float64) for module in model.modules]
    count = degrees.pp * virtual_stages
    if degrees.pp < 2 or count > sum(map(len, parameters)):
        return
    yield place_cuts(job, degrees, partition_layers(np.concatenate(parameters), count), recompute)
