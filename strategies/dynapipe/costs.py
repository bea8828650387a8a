"""DynaPipe's estimates of a microbatch: seconds and bytes on every stage of a replica's chain.

The paper interpolates profiled times of a layer over batch and padded length (arXiv:2311.10418, section 3). Samples are
packed here, so a layer's time is a quadratic of each sequence's length, and what is left at length 0 once a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.chunk_estimates import stages_s
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import stages_behind
from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import BoolArray, FloatArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class SampleCosts:
    """Believed costs of an iteration's samples.

    Attributes:
        sample_s: forward through the whole module, but for what a microbatch takes once ``[modules, samples]``.
        fixed_s: what a microbatch with anything for the module takes once ``[modules]``.
        present: whether a sample has anything for the module ``[modules, samples]``.
        forward: seconds of a forward on each stage of the chain for a second of the module ``[stages, modules]``.
        backward: likewise of a backward.
        kept_bytes: what a sample keeps on a rank of each stage from forward to backward ``[stages, samples]``.
        working_bytes: what it needs while a pass runs, likewise.
        available_bytes: what planners may use beside states ``[stages]``.
    """

    sample_s: FloatArray
    fixed_s: FloatArray
    present: BoolArray
    forward: FloatArray
    backward: FloatArray
    kept_bytes: FloatArray
    working_bytes: FloatArray
    available_bytes: FloatArray

    @property
    def num_stages(self) -> int:
        """Stages of the chain: lanes of a replica."""
        return len(self.forward)


def believed_costs(profile: Profile, shapes: SampleShapes, layout: Layout) -> SampleCosts:
    """Costs of the samples under a layout.

    Raises:
        IncompatibleError: if the modules form no chain, or differ in DP.
    """
    model = profile.job.model
    behind = stages_behind(layout, model.llm_index)
    if len({placed.dp for placed in layout.modules}) > 1:
        raise IncompatibleError("strategy: DynaPipe replicates whole pipelines, so all modules need the same DP")
    num_stages = 1 + max(int(stages.max()) for stages in behind)
    shape = num_stages, len(model.modules)
    forward = np.zeros(shape)
    backward = np.zeros(shape)
    kept = np.zeros((num_stages, len(shapes)))
    working = np.zeros((num_stages, len(shapes)))
    states = np.zeros(num_stages)
    lane_states = profile.memory.lane_state_bytes(layout)
    seconds = []
    fixed = []
    present = []
    for index, (module, placed) in enumerate(zip(model.modules, layout.modules, strict=True)):
        units = module.units(shapes)
        owner = module.owners(shapes, units)
        variable, once = unit_costs(module, placed, shapes, profile)
        tokens = np.bincount(owner, weights=module.lengths(shapes, units), minlength=len(shapes))
        seconds.append(np.bincount(owner, weights=variable, minlength=len(shapes)))
        fixed.append(once)
        present.append(tokens > 0)
        place = num_stages - 1 - behind[index]
        share, needed = _shares(module, placed, shapes, profile)
        forward[place, index] = share
        # Of three forwards' worth of products, recomputation adds a fourth.
        backward[place, index] = share * (3.0 * recompute_factor(placed.recompute) - 1.0) * needed
        keeps, needs = profile.memory.token_bytes(module, placed)
        kept[place] += keeps[:, None] * tokens
        working[place] = np.maximum(working[place], needs[:, None] * tokens)
        states[place] = lane_states[layout.blocks[index].first_lane()[0]]
    available = np.maximum(profile.job.planning_budget_bytes - states, 0.0)
    return SampleCosts(
        np.array(seconds), np.array(fixed), np.array(present), forward, backward, kept, working, available
    )


def unit_costs(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, profile: Profile
) -> tuple[FloatArray, float]:
    """Forward seconds of each unit through the whole module ``[units]``, and of what a microbatch takes once."""
    units = module.units(shapes)
    counts = np.bincount(module.layer_kind, minlength=len(module.kinds))
    a, b, c = matmul(counts, profile.layers.forward_fit(module, placed.tp, placed.cp))
    lengths = module.lengths(shapes, units).astype(np.float64)
    exact = np.maximum((a * lengths + b) * lengths, 0.0)
    return np.asarray(exact * profile.estimates.error_factor(module, shapes)), max(float(c), 0.0)


def _shares(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, profile: Profile
) -> tuple[FloatArray, FloatArray]:
    """Share of a module's forward on each stage, and of a full backward's products that are needed ``[stages]``."""
    units = module.units(shapes)
    zero = np.zeros(1, np.int64)
    together = Chunks(zero, zero, zero, np.array([0, len(units)]), units)
    forward, needed = stages_s(module, placed, shapes, together, profile)
    total = float(forward.sum())
    return (forward[0] / total if total > 0 else np.zeros(placed.pp)), needed
