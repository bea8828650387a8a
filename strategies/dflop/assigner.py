"""DFLOP's online microbatch scheduler (arXiv:2603.25120): buckets of equal encoder and LLM duration."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from entrain_bench.arrays import FloatArray, IntArray
from entrain_bench.assignment import Assignment, ModuleAssignment
from entrain_bench.errors import require
from entrain_bench.layout import Layout, ModuleLayout
from entrain_bench.planning import recompute_factor
from entrain_bench.profile import Profile
from entrain_bench.shapes import SampleShapes
from entrain_bench.specs.model import ModuleSpec
from strategies.dflop.balance import balance, deal
from strategies.dflop.correction import Corrector, shape_classes
from strategies.dflop.profiling import belief_factor, encoder_cost, llm_cost, mean_tokens


@dataclass(frozen=True, slots=True)
class DflopAssigner:
    """Packs samples into N_mb x L_dp buckets; a bucket is an LLM microbatch.

    Attributes:
        solver_steps: placements that the solver may try after LPT; 0: LPT only.
    """

    solver_steps: int = 4_000_000
    _correction: Corrector = field(default_factory=Corrector, init=False, compare=False)

    def __post_init__(self) -> None:
        require(self.solver_steps >= 0, "strategy.assigner.solver_steps", self.solver_steps, "at least 0 (0: LPT only)")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Bucket b is microbatch b // L_dp of LLM replica b mod L_dp.

        Encoder microbatch i holds the items of the L_dp buckets with that index. With one DP for both modules they stay
        in their bucket's replica; otherwise they are dealt over the encoder's replicas by LPT.
        """
        model, llm = profile.job.model, layout.modules[-1]
        num_buckets = layout.num_microbatches * llm.dp
        cost = np.zeros((len(shapes), 2))
        item_s = []
        for module, placed in zip(model.modules, layout.modules, strict=True):
            seconds = self.unit_s(module, shapes, placed, layout.num_microbatches, profile)
            if module.is_encoder:
                item_s.append(seconds)
                # A bucket's share of its encoder microbatch: E_dp replicas work on L_dp buckets.
                cost[:, 0] += shapes.sum_items(module.units(shapes), seconds) * (llm.dp / placed.dp)
            else:
                cost[:, 1] += seconds
        bucket = balance(cost, num_buckets, self.solver_steps)
        replica, microbatch = bucket % llm.dp, bucket // llm.dp
        labels = []
        for module, placed, seconds in zip(model.encoders, layout.modules[:-1], item_s, strict=True):
            owner = shapes.item_sample[module.units(shapes)]
            mine = replica[owner]
            if placed.dp != llm.dp:
                by_falling = np.argsort(-seconds, kind="stable")
                mine = deal(by_falling, microbatch[owner], seconds, layout.num_microbatches, placed.dp)
            labels.append(ModuleAssignment(mine, microbatch[owner]))
        return Assignment((*labels, ModuleAssignment(replica, microbatch)))

    def unit_s(
        self, module: ModuleSpec, shapes: SampleShapes, placed: ModuleLayout, num_microbatches: int, profile: Profile
    ) -> FloatArray:
        """Believed seconds of both passes of each unit on one stage ``[units]``, inside an average microbatch."""
        lengths = module.lengths(shapes, module.units(shapes))
        if not len(lengths):
            return np.zeros(0)
        groups = num_microbatches * placed.dp
        if module.is_encoder:
            encoder = encoder_cost(profile, module, mean_tokens(lengths), placed.tp, placed.cp)
            seconds = encoder.seconds(module.forward_flops(lengths), len(lengths) / groups, placed.pp)
        else:
            llm = llm_cost(profile, module, placed.tp, placed.cp)
            seconds = llm.seconds(lengths, float(lengths.sum()) / groups, placed.pp)
        if placed.recompute:
            seconds = seconds * recompute_factor(True)
        penalties = self._correction.penalties(shape_classes(lengths, module.is_encoder))
        return np.asarray(seconds * belief_factor(profile, module, shapes) * penalties)

    def observe(self, classes: IntArray, predicted_s: FloatArray, actual_s: FloatArray) -> None:
        """Feed the correction one iteration's shapes: class, uncorrected prediction and actual time of each.

        The simulator does not call it yet.
        """
        state = self._correction
        for one, predicted, actual in zip(classes.tolist(), predicted_s.tolist(), actual_s.tolist(), strict=True):
            state = state.observe(one, predicted, actual)
        object.__setattr__(self, "_correction", state.end_iteration())
