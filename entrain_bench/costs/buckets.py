"""Gradients and weights travel in buckets: what of that hides behind the pass that produces or needs them.

Parameters fill buckets in the order in which a backward produces their gradients; inside a layer they are taken as
spread evenly over its time. A bucket's reduce-scatter starts when its last gradient is there and the bucket before is
through (megatron-core 0.19.2, param_and_grad_buffer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray

# Parameters of a bucket: the larger of a constant and a number for each rank that holds the same weights
# (megatron-core 0.19.2, distributed_data_parallel.py).
BUCKET_PARAMETERS = 40_000_000
BUCKET_PARAMETERS_PER_COPY = 1_000_000


def bucket_parameters(parameters: float, copies: int, overlapped: bool) -> FloatArray:
    """Parameters of each bucket in the order of a backward ``[buckets]``; all in one without overlap."""
    size = max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_COPY * copies) if overlapped else parameters
    if not parameters:
        return np.zeros(0)
    full = int(parameters // size)
    rest = parameters - full * size
    return np.array([float(size)] * full + [rest] * (rest > 0))


def _reached_s(
    layer_s: FloatArray, layer_parameters: FloatArray, parameters: FloatArray, begins: bool = False
) -> FloatArray:
    """When a pass is through with the given ascending numbers of parameters ``[passes, points]``.

    With ``begins``, when the next parameter begins instead, which layers without any (frozen ones) may precede.
    """
    layer, inside = _points(layer_parameters.tobytes(), parameters.tobytes(), begins)
    before = np.cumsum(layer_s, axis=1) - layer_s
    return np.asarray(before[:, layer] + inside * layer_s[:, layer])


# Every price of a program asks for the points of each of its stages.
@lru_cache(maxsize=1024)
def _points(layer_parameters: bytes, parameters: bytes, begins: bool) -> tuple[IntArray, FloatArray]:
    """The layer in which each number of parameters is reached, and the share of it that is through by then."""
    held = np.frombuffer(layer_parameters)
    wanted = np.frombuffer(parameters)
    ends = np.cumsum(held)
    layer = np.minimum(np.searchsorted(ends, wanted, side="right" if begins else "left"), len(ends) - 1)
    return layer, (wanted - (ends[layer] - held[layer])) / np.maximum(held[layer], 1.0)


def sync_lag_s(
    layer_s: FloatArray, layer_parameters: FloatArray, parameters: FloatArray, bucket_s: FloatArray
) -> FloatArray:
    """From the end of a backward to the end of the synchronisation of its gradients, links free ``[passes]``.

    Args:
        layer_s: backward time of each layer, first layer first ``[passes, layers]``.
        layer_parameters: of each layer ``[layers]``.
        parameters: of each bucket ``[buckets]``.
        bucket_s: time of each bucket's reduction ``[buckets]``.
    """
    ready = _reached_s(layer_s[:, ::-1], layer_parameters[::-1], np.cumsum(parameters))
    remaining = np.cumsum(bucket_s[::-1])[::-1]
    return np.asarray((ready + remaining).max(axis=1) - layer_s.sum(axis=1))


def gather_stall_s(
    layer_s: FloatArray, layer_parameters: FloatArray, parameters: FloatArray, bucket_s: FloatArray
) -> FloatArray:
    """How long a forward waits in all if each gather is launched when the one before is through ``[passes]``.

    So does megatron-core without ``align_param_gather``, from the first layer on.

    Arguments as for ``sync_lag_s``, of forwards and gathers; buckets are in the order of a backward here as well.
    """
    needed = _needed_s(layer_s, layer_parameters, parameters)
    bucket_s = bucket_s[::-1]
    stalls = np.maximum(bucket_s[1:] - np.diff(needed, axis=1), 0.0)
    return np.asarray(bucket_s[0] + stalls.sum(axis=1))


def gather_lead_s(
    layer_s: FloatArray, layer_parameters: FloatArray, parameters: FloatArray, bucket_s: FloatArray
) -> FloatArray:
    """From the launch of a stage's gathers to the earliest start of a forward that then never waits ``[passes]``.

    Arguments as for ``gather_stall_s``.
    """
    needed = _needed_s(layer_s, layer_parameters, parameters)
    return np.asarray((np.cumsum(bucket_s[::-1]) - needed).max(axis=1))


def _needed_s(layer_s: FloatArray, layer_parameters: FloatArray, parameters: FloatArray) -> FloatArray:
    """When a forward first needs each bucket, the first layers' bucket first ``[passes, buckets]``."""
    parameters = parameters[::-1]
    return _reached_s(layer_s, layer_parameters, np.cumsum(parameters) - parameters, begins=True)


def delayed_s(
    lanes: Sequence[IntArray], num_lanes: int, lead_s: FloatArray, link_s: FloatArray, forward_s: FloatArray
) -> FloatArray:
    """How long gathers that follow each other delay the first forwards of each lane ``[lanes]``.

    ``lanes`` are those of every stage, in the order of a forward. ``lead_s`` goes from the start of a stage's gather to
    the earliest start of its first forward (``forward_s``); ``link_s`` of it occupies the links ``[stages]``.
    """
    launched, free, passed = np.zeros((3, num_lanes))
    for stage_lanes, lead, link, forward in zip(lanes, lead_s, link_s, forward_s, strict=True):
        begin = launched[stage_lanes].max()
        free[stage_lanes] = np.maximum(free[stage_lanes], begin + lead * (link > 0)) + forward
        launched[stage_lanes] = begin + link
        passed[stage_lanes] += forward
    return np.asarray(free - passed)


def trailing_s(
    lanes: Sequence[IntArray], num_lanes: int, lag_s: FloatArray, link_s: FloatArray, backward_s: FloatArray
) -> FloatArray:
    """How long synchronisations go on after the last backward of each lane ``[lanes]``; as ``place_steps`` queues them.

    ``lag_s`` goes from the end of a stage's last backward (``backward_s``) to the end of its synchronisation, links
    free; ``link_s`` of it occupies the links ``[stages]``. ``lanes`` as for ``delayed_s``.
    """
    left = np.zeros(num_lanes)
    ends_s = []
    for stage_lanes, backward in zip(lanes, backward_s, strict=True):
        ends_s.append(-float(left[stage_lanes].min()))
        left[stage_lanes] += backward
    links_free = np.full(num_lanes, -np.inf)
    trailing = np.zeros(num_lanes)
    for stage_lanes, end, lag, link in zip(lanes[::-1], ends_s[::-1], lag_s[::-1], link_s[::-1], strict=True):
        ready = end + lag
        if link:
            ready = max(ready, float(links_free[stage_lanes].max()) + link)
            links_free[stage_lanes] = ready
        trailing[stage_lanes] = np.maximum(trailing[stage_lanes], ready)
    return trailing
