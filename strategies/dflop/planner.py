"""DFLOP's data-aware 3D parallelism optimizer (arXiv:2603.25120, Algorithm 1).

The public code (BDAI-Research/DFLOP, 60e86d8, ``data_aware_optimizer.py``) walks over the plans differently: L_dp need
not divide the batch, memory is checked once a plan for the largest samples, and a plan has one number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Annotated, NamedTuple

import numpy as np

from entrain_bench.balancing.candidates import Candidate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import TrialOptions
from entrain_bench.balancing.planning import (
    Island,
    named_degrees,
    partition_layers,
    place_islands,
    recompute_choices,
    recompute_factor,
    slowest_stages_s,
    tensor_degrees,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError, UserError, require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Job
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import Count, OneOf

from .assigner import DataShapes, data_shapes, encoder_cost, llm_cost

# A plan may be this much slower than the accepted one if it has fewer microbatches.
SLACK = 1.1
# Factor of a rank's estimated need, which is compared with all of a device's memory.
BUFFER = 1.25
# Estimates evaluated at once, to bound memory.
BLOCK = 1 << 21


class DflopDegrees(NamedTuple):
    """Theta: degrees of the encoder and of the LLM, and LLM microbatches of a replica."""

    encoder_tp: int
    encoder_pp: int
    encoder_dp: int
    llm_tp: int
    llm_pp: int
    llm_dp: int
    num_microbatches: int


def enumerate_degrees(job: Job, any_dp: bool = False) -> IntArray:
    """Every (E_tp, E_pp, E_dp, L_tp, L_pp, L_dp) that uses all GPUs and meets the request ``[plans, 6]``.

    ``layout.tp`` and ``layout.dp`` are the LLM's, ``layout.pp`` counts the stages of both. Neither DP exceeds the
    global batch; L_dp divides it unless ``any_dp``. ``UserError`` says why there is none.
    """
    asked = job.request
    ranks = job.cluster.num_ranks
    if not job.model.encoders:
        raise IncompatibleError(
            f"model={job.model.name}: has no encoder, but strategy/planner=dflop splits GPUs between encoder and LLM"
        )
    if (asked.cp or 1) > 1:
        raise IncompatibleError(f"layout.cp={asked.cp}: must be 1 or null with strategy/planner=dflop")
    node = job.cluster.gpus_per_node
    batch = job.global_batch
    if asked.tp:
        require(node % asked.tp == 0, "layout.tp", asked.tp, f"a divisor of the {node} ranks of a node")
    if asked.dp:
        require(batch % asked.dp == 0, "layout.dp", asked.dp, f"a divisor of global_batch={batch}")
    tps = tensor_degrees(job, job.model.encoders)
    encoder = _degrees(ranks, tps, min(len(m.layers) for m in job.model.encoders), np.arange(1, batch + 1))
    tps = [asked.tp] if asked.tp else tensor_degrees(job, [job.model.llm])
    dps = np.arange(1, batch + 1)
    dps = np.array([asked.dp]) if asked.dp else dps if any_dp else dps[batch % dps == 0]
    llm = _degrees(ranks, tps, len(job.model.llm.layers), dps)
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for one in encoder:
        by_size.setdefault(prod(one), []).append(one)
    rows = [one + row for row in llm for one in by_size.get(ranks - prod(row), ())]
    plans = np.array(rows, np.int64).reshape(-1, 6)
    if asked.pp:
        plans = plans[plans[:, 1] + plans[:, 4] == asked.pp]
    if not len(plans):
        raise UserError(
            f"{named_degrees(replace(asked, cp=None))}: no split of the {ranks} ranks of cluster={job.cluster.name} "
            f"between encoder and LLM has at most one stage a layer and a DP that suits global_batch={batch}"
        )
    return plans


def _degrees(ranks: int, tps: list[int], max_pp: int, dps: IntArray) -> list[tuple[int, ...]]:
    """Every (tp, pp, dp) on fewer than all ranks."""
    return [
        (tp, pp, dp)
        for tp in tps
        for pp in range(1, min(max_pp, (ranks - 1) // tp) + 1)
        for dp in dps[dps * (tp * pp) < ranks].tolist()
    ]


def microbatches(job: Job, shapes: DataShapes, degrees: IntArray) -> IntArray:
    """N_mb of each plan: the least whose mean microbatch is no larger than the largest sample ``[plans]``."""
    batch = job.global_batch
    encoder_dp = degrees[:, 2]
    llm_dp = degrees[:, 5]
    least = np.ones(len(degrees), np.int64)
    # ceil(mean batch / (DP most)), but the comparison itself decides where rounding is in doubt.
    for mean, most, dp in (
        *((mean, most, encoder_dp) for mean, most in zip(shapes.items, shapes.most_items, strict=True)),
        (float(shapes.sequence_tokens), shapes.most_sequence_tokens, llm_dp),
    ):
        if mean > 0:
            m = np.maximum(1, np.ceil(mean * batch / (most * dp)).astype(np.int64) - 1)
            while np.any(over := mean * (batch / (m * dp)) > most):
                m = m + over
            least = np.maximum(least, m)
    possible = least * np.maximum(encoder_dp, llm_dp) <= batch
    return np.where(possible, least, batch // llm_dp)


def accepted_plans(seconds: FloatArray, count: IntArray, fits: BoolArray) -> list[int]:
    """Plans accepted in walking order: T below 1.1 times the accepted plan's, and fewer microbatches."""
    accepted: list[int] = []
    for index in np.flatnonzero(fits).tolist():
        best = accepted[-1] if accepted else None
        if best is None or (seconds[index] < SLACK * seconds[best] and count[index] < count[best]):
            accepted.append(index)
    return accepted


@dataclass(frozen=True, slots=True)
class PlanEstimates:
    """Results of Algorithm 1 for plans and numbers of microbatches, without recomputation ``[plans, numbers]``."""

    # E_dur and L_dur.
    encoder_s: FloatArray
    llm_s: FloatArray
    # Bytes a microbatch keeps on a rank ``[2, plans, numbers]``; second row with recomputation.
    encoder_act: FloatArray
    llm_act: FloatArray
    # Bytes of weights, gradients and optimizer states of a rank ``[plans, 1]``.
    encoder_state: FloatArray
    llm_state: FloatArray


@dataclass(frozen=True, slots=True)
class DflopPlanner(TrialOptions):
    """Every split of the GPUs and factorization, by T at mean shapes under the paper's memory constraint.

    Attributes:
        microbatches: ``paper``: a plan's N_mb is that of least T, and the plan of least T is taken. ``released``: the
            walk of the public code, which recomputes every layer unless ``layout.recompute`` says else.
        num_microbatches: N_mb of an LLM replica; None: as ``microbatches`` says.
        whole_layers: whether a stage's duration counts that it holds whole layers; the paper's divides by PP.
        communicator: when one rank gathers and scatters all data between encoder and LLM: ``unequal_dp``, where their
            DP differs, as in section 4 of the paper; ``always``, as in the public code; or ``never``.
    """

    profile_samples: Count = 10_000
    microbatches: Annotated[str, OneOf(("paper", "released"))] = "paper"
    whole_layers: bool = True
    communicator: Annotated[str, OneOf(("unequal_dp", "always", "never"))] = "unequal_dp"
    num_trials: Count = 1
    num_microbatches: Count | None = None

    def __post_init__(self) -> None:
        given = self.num_microbatches
        allowed = "null with strategy.planner.microbatches=released, whose walk chooses it"
        require(given is None or self.microbatches == "paper", "strategy.planner.num_microbatches", given, allowed)

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The plan with the least T whose programs fit memory."""
        shapes = data_shapes(profile, profile.samples.draw(self.profile_samples))

        def offered(sized: Profile, planner: DflopPlanner = self) -> Iterator[Candidate]:
            candidate = None
            for ranked in planner.rank(sized, shapes):
                candidate = self.build(sized, shapes, *ranked)
                yield candidate
            if candidate is None:
                raise OutOfMemoryError(
                    f"layout: no split of cluster={profile.job.cluster.name} between encoder and LLM holds an average "
                    f"microbatch within {profile.job.memory_budget_bytes / 2**30:.1f} GiB a rank (strategy.planner "
                    "dflop)"
                )

        # N_mb is part of a plan: the job's microbatch size decides nothing.
        if profile.tuning_budget is None or self.num_microbatches or self.microbatches == "released":
            profile = profile.for_job(profile.job.with_microbatch_size(profile.job.microbatch_size))

        def walked(sized: Profile) -> Iterator[Candidate]:
            # Where the microbatch size is a knob, so is N_mb; the plan of the paper's rule comes first.
            ranked = offered(sized)
            dp = sized.job.request.dp
            yield from islice(ranked, 1)
            if profile.job.free_microbatch_size and dp:
                ranked = offered(sized, replace(self, num_microbatches=sized.job.num_microbatches(dp)))
            yield from ranked

        return chosen_layout(profile, offered, make_program, self.num_trials, quick=walked)

    def rank(self, profile: Profile, shapes: DataShapes) -> Iterator[tuple[float, DflopDegrees, tuple[bool, ...]]]:
        """Plans in order of preference, with the recomputation of encoder and LLM.

        ``paper``: by T, then less recomputation, with the N_mb of least T, and with the largest N_mb as a resort.
        ``released``: the plan that the walk accepted last, those it replaced, then all others by T.
        """
        if self.microbatches == "released":
            yield from self._walk(profile, shapes)
            return
        degrees = enumerate_degrees(profile.job)
        recompute = recompute_choices(profile.job, profile.job.model.module_groups)
        ranking: list[tuple[IntArray, ...]] = []
        for rows, i, totals in self.totals(profile, shapes, degrees):
            for choice, total in enumerate(totals):
                usable = np.isfinite(total)
                last = usable.shape[1] - 1 - usable[:, ::-1].argmax(axis=1)
                picks = np.stack([np.tile(np.arange(len(rows)), 2), np.concatenate([total.argmin(axis=1), last])])
                picks = np.unique(picks, axis=1)
                row, pick = picks[:, usable[tuple(picks)]]
                ranking.append((rows[row], i[pick], total[row, pick], np.full(len(row), choice)))
        row, count, seconds, choices = (np.concatenate(column) for column in zip(*ranking, strict=True))
        for index in np.lexsort((row, choices, seconds)):
            plan = DflopDegrees._make((*degrees[row[index]].tolist(), int(count[index])))
            yield float(seconds[index]), plan, recompute[choices[index]]

    def _walk(self, profile: Profile, shapes: DataShapes) -> Iterator[tuple[float, DflopDegrees, tuple[bool, ...]]]:
        """The public code's preference."""
        degrees = enumerate_degrees(profile.job, any_dp=True)
        encoder_tp, encoder_pp, encoder_dp, llm_tp, llm_pp, _ = degrees.T
        # By GPUs, TP, then PP of the encoder, then of the LLM.
        degrees = degrees[np.lexsort((llm_pp, llm_tp, encoder_pp, encoder_tp, encoder_tp * encoder_pp * encoder_dp))]
        count = microbatches(profile.job, shapes, degrees)
        again: tuple[bool, ...] = (True, True)
        if profile.job.request.recompute is not None:
            again = recompute_choices(profile.job, profile.job.model.module_groups)[0]
        seconds = np.zeros(len(degrees))
        fits = np.zeros(len(degrees), np.bool_)
        for rows, _, estimates in self.estimates(profile, shapes, degrees, count):
            _, encoder_pp, _, _, llm_pp, _ = degrees[rows].T
            encoder_s = estimates.encoder_s[:, 0] * recompute_factor(again[0])
            llm_s = estimates.llm_s[:, 0] * recompute_factor(again[1])
            seconds[rows] = decisive((count[rows] + encoder_pp + llm_pp - 1) * np.maximum(encoder_s, llm_s))
            fits[rows] = self._largest_fit(profile, shapes, degrees[rows], estimates, again)
        accepted = accepted_plans(seconds, count, fits)
        others = np.argsort(seconds, kind="stable")
        for index in (*accepted[::-1], *others[fits[others] & ~np.isin(others, accepted)].tolist()):
            yield float(seconds[index]), DflopDegrees._make((*degrees[index].tolist(), int(count[index]))), again

    @staticmethod
    def _largest_fit(
        profile: Profile, shapes: DataShapes, degrees: IntArray, estimates: PlanEstimates, again: tuple[bool, ...]
    ) -> BoolArray:
        """Whether the largest samples fit memory by the public code's reckoning, on the largest stages ``[plans]``."""
        *encoders, llm = profile.job.model.modules
        encoder_tp, encoder_pp, encoder_dp, llm_tp, llm_pp, llm_dp = degrees.T
        encoder_act = np.zeros(len(degrees))
        for module, most, tokens in zip(encoders, shapes.most_items, shapes.item_tokens, strict=True):
            largest = most * tokens * llm_dp / encoder_dp
            encoder_act += activation_bytes(module, largest, encoder_tp * encoder_pp)[int(again[0])]
        llm_act = activation_bytes(llm, shapes.most_sequence_tokens, llm_tp * llm_pp)[int(again[1])]
        encoder_need = estimates.encoder_state[:, 0] + (encoder_pp + llm_pp) * encoder_act
        llm_need = estimates.llm_state[:, 0] + llm_pp * llm_act
        # The largest stage holds more layers than the mean one.
        most_layers = max((len(module.layers) for module in encoders), default=1)
        encoder_need *= -(-most_layers // encoder_pp) * encoder_pp / most_layers
        llm_need *= -(-len(llm.layers) // llm_pp) * llm_pp / len(llm.layers)
        limit = profile.job.cluster.device.memory_bytes / BUFFER
        return np.asarray((encoder_need <= limit) & (llm_need <= limit))

    def totals(
        self, profile: Profile, shapes: DataShapes, degrees: IntArray
    ) -> Iterator[tuple[IntArray, IntArray, FloatArray]]:
        """Rows of ``degrees``, numbers of microbatches, and T ``[recomputations, plans, i]``, infinite if over memory.

        T = (N_mb + E_pp + L_pp - 1) max(E_dur, L_dur); ``state_E + (E_pp + L_pp) act_E``, ``state_L + L_pp act_L`` fit.
        """
        limit = profile.job.planning_budget_bytes
        choices = recompute_choices(profile.job, profile.job.model.module_groups)
        given = self.num_microbatches
        counts = None if given is None else np.full(len(degrees), given)
        for rows, i, estimates in self.estimates(profile, shapes, degrees, counts):
            _, encoder_pp, _, _, llm_pp, llm_dp = (column[:, None] for column in degrees[rows].T)
            totals = np.empty((len(choices), len(rows), i.shape[1]))
            for total, (encoder, llm) in zip(totals, choices, strict=True):
                encoder_need = estimates.encoder_state + (encoder_pp + llm_pp) * estimates.encoder_act[int(encoder)]
                llm_need = estimates.llm_state + llm_pp * estimates.llm_act[int(llm)]
                fits = (i <= profile.job.global_batch // llm_dp) & (encoder_need <= limit) & (llm_need <= limit)
                encoder_s = estimates.encoder_s * recompute_factor(encoder)
                llm_s = estimates.llm_s * recompute_factor(llm)
                seconds = (i + encoder_pp + llm_pp - 1) * np.maximum(encoder_s, llm_s)
                total[:] = np.where(fits, decisive(seconds), np.inf)
            yield rows, i[0], totals

    def estimates(
        self, profile: Profile, shapes: DataShapes, degrees: IntArray, counts: IntArray | None = None
    ) -> Iterator[tuple[IntArray, IntArray, PlanEstimates]]:
        """Rows of ``degrees``, numbers of microbatches (``counts``, or 1, 2, ...), estimates; in blocks of one TP."""
        job = profile.job
        batch = job.global_batch

        def state_bytes(module: ModuleSpec, dp: IntArray, shards: IntArray) -> FloatArray:
            learning = module.learning_parameters / shards * profile.memory.parameter_bytes(dp)
            return np.asarray(learning + module.frozen_parameters / shards * BF16_BYTES)

        *encoders, llm = job.model.modules
        means = [np.full(1, tokens) for tokens in (*shapes.item_tokens, shapes.sequence_tokens)]
        for encoder_tp, llm_tp in np.unique(degrees[:, [0, 3]], axis=0).tolist():
            tables = [
                encoder_cost(profile, module, tokens, encoder_tp)
                for module, tokens in zip(encoders, shapes.item_tokens, strict=True)
            ]
            llm_table = llm_cost(profile, llm, llm_tp)
            uneven = [
                self._unevenness(profile.layers.layer_s(module, mean, encoder_tp if module.is_encoder else llm_tp, 1))
                for module, mean in zip(job.model.modules, means, strict=True)
            ]
            same = np.flatnonzero((degrees[:, 0] == encoder_tp) & (degrees[:, 3] == llm_tp))
            for rows in np.array_split(same, -(-len(same) * (batch if counts is None else 1) // BLOCK)):
                _, encoder_pp, encoder_dp, _, llm_pp, llm_dp = (column[:, None] for column in degrees[rows].T)
                most = batch // int(llm_dp.min())
                i = np.arange(1, most + 1)[None] if counts is None else counts[rows][:, None]
                encoder_s = np.zeros((len(rows), i.shape[1]))
                encoder_act = np.zeros((2, len(rows), i.shape[1]))
                encoder_state = np.zeros((len(rows), 1))
                sequences = batch / (i * llm_dp)
                packed = shapes.sequence_tokens * sequences
                for table, module, items, tokens, factor in zip(
                    tables, encoders, shapes.items, shapes.item_tokens, uneven[:-1], strict=True
                ):
                    b = items * batch / (i * encoder_dp)
                    # A replica that works at all works on a whole item.
                    whole = np.maximum(b, 1.0) if items else b
                    flops = float(module.forward_flops(np.array([tokens]))[0])
                    encoder_s += table.seconds(flops * whole, whole, encoder_pp) * factor[encoder_pp - 1]
                    encoder_act += activation_bytes(module, whole * tokens, encoder_tp * encoder_pp)
                    encoder_state += state_bytes(module, encoder_dp, encoder_tp * encoder_pp)
                length = np.array([shapes.sequence_tokens])
                llm_s = llm_table.seconds(length, packed, llm_pp) * sequences * uneven[-1][llm_pp - 1]
                llm_act = activation_bytes(llm, packed, llm_tp * llm_pp)
                llm_state = state_bytes(llm, llm_dp, llm_tp * llm_pp)
                yield rows, i, PlanEstimates(encoder_s, llm_s, encoder_act, llm_act, encoder_state, llm_state)

    def _unevenness(self, layer_s: FloatArray) -> FloatArray:
        """Slowest over mean stage for 1, 2, ... stages ``[layers]``."""
        if not self.whole_layers:
            return np.ones(len(layer_s))
        return slowest_stages_s(layer_s) * np.arange(1, len(layer_s) + 1) / layer_s.sum()

    def build(
        self, profile: Profile, shapes: DataShapes, seconds: float, plan: DflopDegrees, recompute: tuple[bool, ...]
    ) -> Candidate:
        """The layout of a plan; layers are split so that the slowest stage is fastest on a mean microbatch."""
        job = profile.job
        islands = []
        units = zip((*shapes.items, 1.0), (*shapes.item_tokens, shapes.sequence_tokens), strict=True)
        for module, (per_sample, tokens) in zip(job.model.modules, units, strict=True):
            tp, pp, dp = plan[:3] if module.is_encoder else plan[3:6]
            count = per_sample * job.global_batch / (plan.num_microbatches * dp)
            layer_s = profile.layers.layer_s(module, np.full(max(1, round(count)), tokens), tp, 1)
            islands.append(Island(tp, 1, dp, partition_layers(layer_s, pp), recompute[not module.is_encoder]))
        unequal = self.communicator == "unequal_dp" and plan.encoder_dp != plan.llm_dp
        layout = place_islands(job, islands, plan.num_microbatches, unequal or self.communicator == "always")
        return Candidate(seconds, layout)


def activation_bytes(module: ModuleSpec, tokens: FloatArray | int, shards: IntArray) -> FloatArray:
    """Bytes that a microbatch keeps on a rank with evenly spread layers, without and with recomputation."""
    kept = sum(layer.activation_bytes_per_token for layer in module.layers)
    inputs = sum(layer.remade_from_bytes_per_token for layer in module.layers)
    return np.stack([tokens * kept / shards, tokens * inputs / shards])
