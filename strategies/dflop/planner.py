"""DFLOP's data-aware 3D parallelism optimizer (arXiv:2603.25120, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray, IntArray
from entrain_bench.costs.memory import OPTIMIZER_BYTES, WEIGHT_BYTES
from entrain_bench.errors import OutOfMemoryError, UserError, require
from entrain_bench.layout import Layout
from entrain_bench.planning import (
    Candidate,
    fastest_that_fits,
    partition_layers,
    recompute_factor,
)
from entrain_bench.profile import Profile
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.strategy import Compose
from strategies.dflop.profiling import MeanShapes, encoder_cost, layer_s, llm_cost, mean_shapes
from strategies.dflop.space import Plan, enumerate_degrees, pipeline_s, place_plan

# Estimates evaluated at once, to bound memory.
BLOCK = 1 << 21
# Recomputation of the encoder and of the LLM.
RECOMPUTE = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True, slots=True)
class Estimates:
    """What Algorithm 1 computes for plans and microbatch numbers i = 1, 2, ..., without recomputation ``[plans, i]``.

    Attributes:
        encoder_s, llm_s: E_dur and L_dur.
        encoder_act, llm_act: bytes a microbatch keeps on a rank ``[2, plans, i]``; second row with recomputation.
        encoder_state, llm_state: bytes of weights, gradients and optimizer states of a rank ``[plans, 1]``.
    """

    encoder_s: FloatArray
    llm_s: FloatArray
    encoder_act: FloatArray
    llm_act: FloatArray
    encoder_state: FloatArray
    llm_state: FloatArray


@dataclass(frozen=True, slots=True)
class DflopPlanner:
    """Every split of the GPUs and factorization, by T at mean shapes under the paper's memory constraint.

    Attributes:
        profile_samples: samples the data profiler averages.
        slack: 0: the paper's least T. Above: the plan with fewest microbatches among those whose T is below 1 + slack
            times the least; 0.1 is the released code's rule without its dependence on order.
        single_rank_communicator: whether everything between encoder and LLM passes through one rank, as in the paper.
    """

    profile_samples: int = 10_000
    slack: float = 0.0
    single_rank_communicator: bool = True

    def __post_init__(self) -> None:
        require(self.profile_samples >= 1, "strategy.planner.profile_samples", self.profile_samples, "at least 1")
        require(self.slack >= 0, "strategy.planner.slack", self.slack, "at least 0")

    def plan(self, profile: Profile, compose: Compose) -> Layout:
        """The plan with the least T whose programs fit memory."""
        shapes = mean_shapes(profile, profile.draw(self.profile_samples))
        problem: UserError | None = None
        for seconds, plan, recompute in self.rank(profile, shapes):
            try:
                return fastest_that_fits(profile, [self.build(profile, shapes, seconds, plan, recompute)], compose)
            except UserError as error:
                problem = error
        raise problem or OutOfMemoryError(
            f"layout: no split of cluster={profile.job.cluster.name} between encoder and LLM holds an average "
            f"microbatch within {profile.job.memory_budget_bytes / 2**30:.1f} GiB a rank (strategy.planner dflop)"
        )

    def rank(self, profile: Profile, shapes: MeanShapes) -> Iterator[tuple[float, Plan, tuple[bool, bool]]]:
        """Plans in order of preference, with the recomputation of encoder and LLM.

        For every split, factorization and recomputation choice the N_mb with the least T, the smallest N_mb within the
        slack, and the largest N_mb as a resort if real batches do not fit. Ties go to less recomputation, then to the
        order of enumeration.
        """
        degrees = enumerate_degrees(profile.job)
        blocks = [(rows, i, totals) for rows, i, totals in self.totals(profile, shapes, degrees)]
        least = min(float(totals.min(initial=np.inf)) for _, _, totals in blocks)
        found: list[tuple[IntArray, ...]] = []
        for rows, i, totals in blocks:
            for choice, total in enumerate(totals):
                best, fits = total.argmin(axis=1), np.isfinite(total)
                near = (total <= (1 + self.slack) * least) & fits
                last = fits.shape[1] - 1 - fits[:, ::-1].argmax(axis=1)
                first = np.where(near.any(axis=1), near.argmax(axis=1), best)
                picks = np.unique(
                    np.stack([np.tile(np.arange(len(rows)), 3), np.concatenate([best, first, last])]), axis=1
                )
                row, pick = picks[:, fits[tuple(picks)]]
                found.append((rows[row], i[pick], total[row, pick], np.full(len(row), choice)))
        row, count, seconds, choices = (np.concatenate(column) for column in zip(*found, strict=True))
        outside = seconds > (1 + self.slack) * least
        preferred = np.where(outside | (self.slack == 0), 0, count)
        for index in np.lexsort((row, choices, seconds, preferred, outside)):
            theta = (*degrees[row[index]].tolist(), int(count[index]))
            yield float(seconds[index]), Plan(*theta), RECOMPUTE[choices[index]]

    def totals(
        self, profile: Profile, shapes: MeanShapes, degrees: IntArray
    ) -> Iterator[tuple[IntArray, IntArray, FloatArray]]:
        """Rows of ``degrees``, numbers of microbatches, and T ``[recomputations, plans, i]``, infinite if over memory.

        ``state_E + (E_pp + L_pp) act_E`` and ``state_L + L_pp act_L`` must stay within the planning budget.
        """
        limit = profile.job.planning_budget_bytes
        for rows, i, estimates in self.estimates(profile, shapes, degrees):
            _, encoder_pp, _, _, llm_pp, llm_dp = (column[:, None] for column in degrees[rows].T)
            totals = np.empty((len(RECOMPUTE), len(rows), len(i)))
            for total, (encoder, llm) in zip(totals, RECOMPUTE, strict=True):
                encoder_need = estimates.encoder_state + (encoder_pp + llm_pp) * estimates.encoder_act[int(encoder)]
                llm_need = estimates.llm_state + llm_pp * estimates.llm_act[int(llm)]
                fits = (i <= profile.job.global_batch // llm_dp) & (encoder_need <= limit) & (llm_need <= limit)
                encoder_s = estimates.encoder_s * recompute_factor(encoder)
                llm_s = estimates.llm_s * recompute_factor(llm)
                total[:] = np.where(fits, pipeline_s(i, encoder_pp, llm_pp, encoder_s, llm_s), np.inf)
            yield rows, i, totals

    def estimates(
        self, profile: Profile, shapes: MeanShapes, degrees: IntArray
    ) -> Iterator[tuple[IntArray, IntArray, Estimates]]:
        """Rows of ``degrees``, microbatch numbers and estimates, in blocks with one TP a module."""
        job = profile.job
        batch = job.global_batch
        sharded = job.distributed_optimizer
        *encoders, llm = job.model.modules
        for encoder_tp, llm_tp in np.unique(degrees[:, [0, 3]], axis=0).tolist():
            tables = [
                encoder_cost(profile, module, tokens, encoder_tp)
                for module, tokens in zip(encoders, shapes.item_tokens, strict=True)
            ]
            llm_table = llm_cost(profile, llm, llm_tp)
            same = np.flatnonzero((degrees[:, 0] == encoder_tp) & (degrees[:, 3] == llm_tp))
            for rows in np.array_split(same, -(-len(same) * batch // BLOCK)):
                _, encoder_pp, encoder_dp, _, llm_pp, llm_dp = (column[:, None] for column in degrees[rows].T)
                i = np.arange(1, batch // int(llm_dp.min()) + 1)
                encoder_s = np.zeros((len(rows), len(i)))
                encoder_act = np.zeros((2, len(rows), len(i)))
                encoder_state = np.zeros((len(rows), 1))
                for table, module, items, tokens in zip(
                    tables, encoders, shapes.items, shapes.item_tokens, strict=True
                ):
                    b = items * batch / (i * encoder_dp)
                    # A replica that works at all works on a whole item.
                    whole = np.maximum(b, 1.0) if items else b
                    flops = float(module.forward_flops(np.array([tokens]))[0])
                    encoder_s += table.seconds(flops * whole, whole, encoder_pp)
                    encoder_act += activation_bytes(module, whole * tokens, encoder_tp * encoder_pp)
                    encoder_state += state_bytes(module, encoder_tp * encoder_pp, encoder_dp if sharded else 1)
                sequences = batch / (i * llm_dp)
                packed = shapes.sequence_tokens * sequences
                each = np.array([shapes.sequence_tokens])
                llm_s = llm_table.seconds(each, packed, llm_pp) * sequences
                yield (
                    rows,
                    i,
                    Estimates(
                        encoder_s,
                        llm_s,
                        encoder_act,
                        activation_bytes(llm, packed, llm_tp * llm_pp),
                        encoder_state,
                        state_bytes(llm, llm_tp * llm_pp, llm_dp if sharded else 1),
                    ),
                )

    def build(
        self, profile: Profile, shapes: MeanShapes, seconds: float, plan: Plan, recompute: tuple[bool, bool]
    ) -> Candidate:
        """The layout of a plan; layers are split so that the slowest stage is fastest on a mean microbatch."""
        batch, layers = profile.job.global_batch, []
        for index, module in enumerate(profile.job.model.modules):
            if module.is_encoder:
                count = shapes.items[index] * batch / (plan.num_microbatches * plan.encoder_dp)
                tokens, tp, pp = shapes.item_tokens[index], plan.encoder_tp, plan.encoder_pp
            else:
                count = batch / (plan.num_microbatches * plan.llm_dp)
                tokens, tp, pp = shapes.sequence_tokens, plan.llm_tp, plan.llm_pp
            lengths = np.full(max(1, round(count)), tokens)
            layers.append(partition_layers(layer_s(profile, module, lengths, tp), pp))
        layout = place_plan(profile.job, plan, layers, recompute, self.single_rank_communicator)
        return Candidate(seconds, layout)


def state_bytes(module: ModuleSpec, shards: IntArray, optimizer_shards: IntArray | int) -> FloatArray:
    """Weights, gradients and optimizer states of a rank if parameters spread evenly over TP x PP ``shards``."""
    return np.asarray(module.parameters / shards * (WEIGHT_BYTES + OPTIMIZER_BYTES / np.asarray(optimizer_shards)))


def activation_bytes(module: ModuleSpec, tokens: FloatArray, shards: IntArray) -> FloatArray:
    """What a microbatch keeps on a rank if layers spread evenly, without and with recomputation ``[2, ...]``."""
    kept = sum(layer.activation_bytes_per_token for layer in module.layers)
    inputs = sum(layer.input_bytes_per_token for layer in module.layers)
    return np.stack([tokens * kept / shards, tokens * inputs / shards])
