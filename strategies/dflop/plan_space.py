"""Search space of DFLOP's optimizer (arXiv:2603.25120, Algorithm 1): splits of the GPUs and factorizations.

The public code (BDAI-Research/DFLOP, 60e86d8, ``data_aware_optimizer.py``) walks over them differently: the encoder's
GPUs grow from 1 to N - 1, L_dp need not divide the batch, memory is checked once a plan for the largest samples, and a
plan has one number of microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.planning import Island, place_islands, tensor_degrees
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError, UserError, require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Job

from .profiling import DataShapes


@dataclass(frozen=True, slots=True)
class DflopDegrees:
    """Theta: degrees of the encoder and of the LLM, and LLM microbatches of a replica."""

    encoder_tp: int
    encoder_pp: int
    encoder_dp: int
    llm_tp: int
    llm_pp: int
    llm_dp: int
    num_microbatches: int


def pipeline_s(
    num_microbatches: IntArray | int,
    encoder_pp: IntArray | int,
    llm_pp: IntArray | int,
    encoder_s: FloatArray | float,
    llm_s: FloatArray | float,
) -> FloatArray:
    """T = (N_mb + E_pp + L_pp - 1) max(E_dur, L_dur) (broadcasts)."""
    return np.asarray((num_microbatches + encoder_pp + llm_pp - 1) * np.maximum(encoder_s, llm_s))


def enumerate_degrees(job: Job, any_dp: bool = False) -> IntArray:
    """Every (E_tp, E_pp, E_dp, L_tp, L_pp, L_dp) that uses all GPUs and meets the request ``[plans, 6]``.

    ``layout.tp`` and ``layout.dp`` are the LLM's, ``layout.pp`` counts the stages of both. Neither DP exceeds the
    global batch; L_dp divides it unless ``any_dp``.

    Raises:
        UserError: if there is none; says why.
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
    rest = ranks - llm.prod(axis=1)
    order = np.argsort(encoder.prod(axis=1), kind="stable")
    sizes = encoder.prod(axis=1)[order]
    low = np.searchsorted(sizes, rest)
    high = np.searchsorted(sizes, rest, side="right")
    row = np.repeat(np.arange(len(llm)), high - low)
    within = np.arange(len(row)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    plans = np.concatenate([encoder[order][low[row] + within], llm[row]], axis=1)
    if asked.pp:
        plans = plans[plans[:, 1] + plans[:, 4] == asked.pp]
    if not len(plans):
        wanted = " ".join(f"layout.{n}={getattr(asked, n)}" for n in ("tp", "pp", "dp") if getattr(asked, n))
        raise UserError(
            f"{wanted or 'layout'}: no split of the {ranks} ranks of cluster={job.cluster.name} between encoder and "
            f"LLM has at most one stage a layer and a DP that suits global_batch={batch}"
        )
    return plans


def _degrees(ranks: int, tps: list[int], max_pp: int, dps: IntArray) -> IntArray:
    """Every (tp, pp, dp) on fewer than all ranks ``[rows, 3]``."""
    rows = [
        (tp, pp, int(dp))
        for tp in tps
        for pp in range(1, min(max_pp, (ranks - 1) // tp) + 1)
        for dp in dps[dps * (tp * pp) < ranks]
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


def place_plan(
    job: Job, plan: DflopDegrees, layers: list[tuple[int, ...]], recompute: tuple[bool, ...], single_rank: bool
) -> Layout:
    """The layout of a plan; ``layers`` are those of each stage, for every module, ``recompute`` is by group."""
    islands = []
    for module, split in zip(job.model.modules, layers, strict=True):
        encoder = module.is_encoder
        tp, dp = (plan.encoder_tp, plan.encoder_dp) if encoder else (plan.llm_tp, plan.llm_dp)
        islands.append(Island(tp, 1, dp, split, recompute[0 if encoder else 1]))
    return place_islands(job, islands, plan.num_microbatches, single_rank)


# A plan may be this much slower than the accepted one if it has fewer microbatches.
SLACK = 1.1
# What a rank is believed to need is multiplied by this and compared with all of a device's memory.
BUFFER = 1.25


def walking_order(degrees: IntArray) -> IntArray:
    """Plans in the order in which the code sees them ``[plans]``: GPUs, TP, then PP of the encoder, then of the LLM."""
    encoder_tp, encoder_pp, encoder_dp, llm_tp, llm_pp, _ = degrees.T
    return np.lexsort((llm_pp, llm_tp, encoder_pp, encoder_tp, encoder_tp * encoder_pp * encoder_dp))


def microbatches(job: Job, shapes: DataShapes, degrees: IntArray) -> IntArray:
    """N_mb of each plan: the least whose mean microbatch is no larger than the largest profiled sample ``[plans]``.

    It must leave every encoder and LLM replica a sample a microbatch on average; a plan that cannot takes the most that
    the LLM's replicas can, int(GBS / L_dp).
    """
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
