"""The search space: every (TP, CP, PP, DP) of the LLM with every grid of the encoders, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError, UserError, require
from entrain_bench.program.boundary import is_integer_ratio
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout
from entrain_bench.specs.job import Degrees, Job, divisors
from entrain_bench.specs.model import ModuleSpec

# Ranks of all layouts of a search together.
MAX_PLACED_RANKS = 2**28


@dataclass(frozen=True, slots=True)
class Pair:
    """Degrees of the encoders, which share one grid, and of the LLM."""

    encoder: Degrees
    llm: Degrees


def colocated_pairs(job: Job, encoder_tp: int | None = None) -> list[Pair]:
    """Pairs that both use all ranks; encoder PP = CP = 1 and an integer DP ratio (arXiv:2605.27678, section 5).

    Args:
        job: the job; its request binds the LLM.
        encoder_tp: TP of the encoders; None tries every degree.

    Raises:
        UserError: if none meets the request.
    """
    _check_request(job)
    ranks = job.cluster.num_ranks
    pairs = []
    for llm in _llm_degrees(job, ranks):
        if job.request.pp not in (None, llm.pp):
            continue
        for tp in _encoder_degrees(job, encoder_tp):
            dp, rest = divmod(ranks, tp)
            if not rest and is_integer_ratio(dp, llm.dp):
                pairs.append(Pair(Degrees(tp, 1, 1, dp), llm))
    return _some(job, pairs)


def island_sizes(job: Job) -> list[int]:
    """Ranks an encoder island may have: a part of a node or whole nodes, at most half of the cluster."""
    node = job.cluster.gpus_per_node
    half = job.cluster.num_ranks // 2
    return [size for size in range(1, half + 1) if size % node == 0 or node % size == 0]


def noncolocated_pairs(
    job: Job, encoder_ranks: int | None, max_encoder_pp: int | None, encoder_tp: int | None = None
) -> list[Pair]:
    """Pairs that together use all ranks; encoder CP = 1 and an integer DP ratio.

    Args:
        job: the job; ``request.pp`` counts the stages of both.
        encoder_ranks: size of the encoder island; None tries every one of ``island_sizes``.
        max_encoder_pp: most encoder stages; None sets no limit but the layers.
        encoder_tp: TP of the encoders; None tries every degree.

    Raises:
        UserError: if none meets the request.
    """
    _check_request(job)
    layers = min(len(module.layers) for module in job.model.encoders)
    most = min(layers, max_encoder_pp or layers)
    pairs = []
    for size in [encoder_ranks] if encoder_ranks else island_sizes(job):
        for llm in _llm_degrees(job, job.cluster.num_ranks - size):
            for tp, pp in product(_encoder_degrees(job, encoder_tp), range(1, most + 1)):
                dp, rest = divmod(size, tp * pp)
                if rest or not is_integer_ratio(dp, llm.dp) or job.request.pp not in (None, pp + llm.pp):
                    continue
                pairs.append(Pair(Degrees(tp, 1, pp, dp), llm))
    return _some(job, pairs)


def place_pair(
    job: Job, pair: Pair, layers: Sequence[tuple[int, ...]], recompute: Sequence[bool], *, colocated: bool
) -> Layout:
    """Both modules on consecutive ranks, replica after replica, TP innermost, then CP, then stages.

    Colocated, both start at rank 0, so that the encoder replicas that feed an LLM replica are neighbours on its ranks
    (or the other way round). Otherwise the module with the wider TP comes first, so that every block is aligned.

    Args:
        job: the job.
        pair: degrees of encoders and LLM.
        layers: layers of each stage, for every module of the model.
        recompute: modules that recompute their activations.
        colocated: whether the modules share their ranks.
    """
    encoder, llm = _grid(pair.encoder), _grid(pair.llm)
    if not colocated and pair.encoder.tp > pair.llm.tp:
        llm = llm + encoder.size
    elif not colocated:
        encoder = encoder + llm.size
    modules = []
    for module, split, again in zip(job.model.modules, layers, recompute, strict=True):
        degrees, ranks = (pair.encoder, encoder) if module.is_encoder else (pair.llm, llm)
        modules.append(ModuleLayout(module.name, degrees.tp, degrees.cp, split, ranks, again))
    layout = Layout(tuple(modules), job.num_microbatches(pair.llm.dp))
    check_layout(layout, job.model, job.cluster)
    return layout


def _grid(degrees: Degrees) -> IntArray:
    shape = (degrees.dp, degrees.pp, degrees.tp * degrees.cp)
    return np.arange(degrees.dp * degrees.pp * degrees.tp * degrees.cp).reshape(shape)


def _llm_degrees(job: Job, ranks: int) -> Iterator[Degrees]:
    """Degrees of the LLM on that many ranks, within the request for TP, CP and DP."""
    asked = job.request
    tps = [asked.tp] if asked.tp else _tensor_degrees(job, [job.model.llm])
    cps = [asked.cp] if asked.cp else [2**i for i in range(ranks.bit_length())]
    batches, uneven = divmod(job.global_batch, job.microbatch_size)
    if uneven:
        return
    dps = [asked.dp] if asked.dp else divisors(batches)
    for tp, cp in product(tps, cps):
        for dp in dps:
            pp, rest = divmod(ranks, tp * cp * dp)
            if not rest and batches % dp == 0 and 1 <= pp <= len(job.model.llm.layers):
                yield Degrees(tp, cp, pp, dp)


def _tensor_degrees(job: Job, modules: Sequence[ModuleSpec]) -> list[int]:
    """Tensor-parallel degrees inside a node that divide heads and feed-forward width of all the modules."""
    sizes = [job.cluster.gpus_per_node]
    for module in modules:
        config = module.config
        sizes += [config.num_heads, config.num_kv_heads, config.ffn_hidden_size]
    return [tp for tp in range(1, min(sizes) + 1) if all(size % tp == 0 for size in sizes)]


def _encoder_degrees(job: Job, encoder_tp: int | None) -> list[int]:
    """Degrees of the encoders, or the one asked for."""
    degrees = _tensor_degrees(job, job.model.encoders)
    if encoder_tp is None:
        return degrees
    require(encoder_tp in degrees, "strategy.planner.encoder_tp", encoder_tp, f"null or one of {degrees}")
    return [encoder_tp]


def _check_request(job: Job) -> None:
    if not job.model.encoders:
        raise IncompatibleError(f"model={job.model.name}: has no encoder to give degrees of its own")
    node, asked = job.cluster.gpus_per_node, job.request
    if asked.tp:
        require(node % asked.tp == 0, "layout.tp", asked.tp, f"a divisor of the {node} ranks of a node")
    if asked.dp:
        job.num_microbatches(asked.dp)


def _some(job: Job, pairs: list[Pair]) -> list[Pair]:
    if not pairs:
        asked = job.request
        wanted = " ".join(f"layout.{n}={getattr(asked, n)}" for n in ("tp", "cp", "pp", "dp") if getattr(asked, n))
        raise UserError(
            f"{wanted or 'layout'}: no degrees of encoder and LLM with an integer ratio of DP use the "
            f"{job.cluster.num_ranks} ranks of cluster={job.cluster.name} with dp x microbatch_size="
            f"{job.microbatch_size} dividing global_batch={job.global_batch}"
        )
    placed = len(pairs) * job.cluster.num_ranks
    if placed > MAX_PLACED_RANKS:
        raise UserError(
            f"layout: {len(pairs)} degrees of encoder and LLM on the {job.cluster.num_ranks} ranks of "
            f"cluster={job.cluster.name} are more than can be searched; fix layout.tp, layout.cp or layout.dp"
        )
    return pairs
