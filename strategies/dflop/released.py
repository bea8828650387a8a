"""The walk of DFLOP's public code over plans (BDAI-Research/DFLOP, 60e86d8, ``data_aware_optimizer.py``).

It differs from the paper's Algorithm 1: the encoder's GPUs grow from 1 to N - 1, L_dp need not divide the batch, memory
is checked once a plan for the largest samples, and a plan has one number of microbatches.
"""

from __future__ import annotations

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.specs.job import Job

from .profiling import DataShapes

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
    batch, encoder_dp, llm_dp = job.global_batch, degrees[:, 2], degrees[:, 5]
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
    """Plans accepted in their order, the last one last: T below 1.1 times the accepted plan's, and fewer microbatches.

    Args:
        seconds: T, in walking order ``[plans]``.
        count: N_mb ``[plans]``.
        fits: whether the largest samples fit memory ``[plans]``.
    """
    accepted: list[int] = []
    for index in np.flatnonzero(fits).tolist():
        best = accepted[-1] if accepted else None
        if best is None or (seconds[index] < SLACK * seconds[best] and count[index] < count[best]):
            accepted.append(index)
    return accepted
