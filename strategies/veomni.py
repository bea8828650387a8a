"""VeOmni's balance of encoders (ByteDance-Seed/VeOmni, pull request 425): items change ranks within a micro-step.

The ranks of a data-parallel group deal out the items of a micro-step, encode, and send the results back to where the
samples are. The LLM's samples stay where they arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from entrain_bench.balancing.lpt import arrival_places, longest_first_by_row
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import step_assignment
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import between
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class EncoderBalance:
    """Samples in order of arrival; each encoder's items over all replicas, longest first, in every micro-step.

    Of groups of several widths, items take those that end first by believed seconds, whatever the exponent, and
    neighbouring replicas of the LLM join into one where that ends sooner.

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
