"""Predictions of the ledger's rows by the cost model: seconds of an iteration, memory of the fullest GPU, and its fit.

All microbatches of a replica are equal, and so are all replicas. So one replica is simulated with few microbatches; the
time of each further pipeline round follows from a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.planning import spread_blocks
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.ledger.jobs import (
    EAGER,
    OK,
    OOM,
    TEXT_ALONE,
    USERS,
    Book,
    LedgerJob,
    LedgerRow,
    jobs_for,
)
from entrain_bench.program import Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.columns import covered_per_stage, recompute_chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.simulate.executor import place_program
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import BF16, with_options
from entrain_bench.specs.layer import Layer
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import Role, build_layers
from entrain_bench.specs.shapes import shapes_from_lists
from entrain_bench.specs.sharding import ZERO1, ZERO3
from entrain_bench.specs.tokens import TokenRules

# Rounds of a pipeline after which all further ones take the same time, and microbatches that are few in any case.
ROUNDS = 4
# Additional bytes that blocks of PyTorch's operators move in forward and backward, and keep. LLaMA: of a hidden state
# with two RMSNorms in fp32. BERT: of one with biases, copies of heads, dropout, and of scores with scale, mask,
# dropout.
EAGER_RMSNORM = 64, 152, 8
EAGER_LAYERNORM = 42, 44, 0
EAGER_SCORE = 13, 9, 2
EAGER_KERNELS = 10
# How text becomes tokens; rows state tokens.
TEXT = TokenRules(1, 1, 1, 1, 1.0, 1.0, 1, 1.0, 1.0)
IMAGE = "image"  # modality of the items of encoders
# Whether a run fits, if that depends on open values of its row.
OPEN = "open"
# Columns of the prediction of a row; None if there is none.
PREDICTED = (
    *("predicted_s", "ratio", "middle_ratio", "predicted_gib", "memory_ratio"),
    *("predicted_outcome", "status", "reason", "least_predicted_s", "greatest_predicted_s"),
)

type Change = Callable[[ClusterSpec], ClusterSpec]
# Least and greatest possible value of a quantity; equal if a row leaves nothing open.
type Interval = tuple[float, float]


class Prediction(NamedTuple):
    """Seconds of an iteration, highest memory of a GPU in GiB, and whether that is within the budget."""

    seconds: float
    gib: float
    fits: bool


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A job's programs with their cluster and cost model.

    The first program has the fewest microbatches that suffice, the second one pipeline round more. ``rounds`` is the
    number that the first omits. A program may use ``memory_fraction`` of a device's memory.
    """

    model: ModelSpec
    cluster: ClusterSpec
    job: LedgerJob
    programs: tuple[Program, ...]
    rounds: int
    memory_fraction: float

    def predict(self, change: Change | None = None) -> Prediction:
        """Return the prediction, on the unmodified or a changed cluster."""
        cluster = change(self.cluster) if change else self.cluster
        truth = CostTruth(self.model, cluster, self.job.framework)
        seconds = [float(place_program(program, truth.charge(program))[1].max()) for program in self.programs]
        total = seconds[0] + self.rounds * (seconds[-1] - seconds[0])
        peak = float(truth.memory.peak_bytes(self.programs[0]).max())
        return Prediction(total, peak / 2**30, peak <= self.memory_fraction * cluster.device.memory_bytes)


def case_maker(composer: Composer) -> Callable[[LedgerJob], Case]:
    """Return a function that makes the case of a job, cached; it raises ``UserError`` for a refused job."""
    compose = cache(lambda name: composer.run((f"cluster={name}",)))

    @cache
    def make(job: LedgerJob) -> Case:
        run = compose(job.cluster)
        layers = build_layers(job.config)
        if job.framework.kernels == EAGER:
            layers = tuple(eager_block(layer, job) if layer.attention else layer for layer in layers)
        modules = [ModuleSpec("llm", Role.LLM, job.config, layers)]
        if job.encoder:
            modules.insert(0, ModuleSpec("encoder", Role.ENCODER, job.encoder, build_layers(job.encoder)))
        model = ModelSpec("ledger", tuple(modules), TEXT)
        model = with_options(model, job.framework)
        count = job.num_microbatches
        least = ROUNDS * job.pp + count % job.pp
        counts = (count,) if count <= least + job.pp else (least, least + job.pp)
        programs = tuple(_program(model, job, number) for number in counts)
        cluster = make_cluster(ClusterSpec.from_config(run.cluster), job.gpus, dict(job.bandwidth))
        if job.framework.precision != BF16:
            job.framework.check_device(cluster.device)
        if job.allocated:
            cluster = replace(cluster, device=replace(cluster.device, allocator_reserve=0.0))
        rounds = (count - least) // job.pp if len(counts) > 1 else 0
        return Case(model, cluster, job, programs, rounds, run.memory_fraction)

    return make


def eager_block(block: Layer, job: LedgerJob) -> Layer:
    """A block whose RMSNorms are PyTorch's operators in fp32, or, with LayerNorms, a BERT's with dropout."""
    config = job.config
    hidden = config.hidden_size
    scores = config.num_heads * job.sequence_tokens
    forward, backward, kept = EAGER_LAYERNORM if config.norm_bias else EAGER_RMSNORM
    forward_scores, backward_scores, kept_scores = EAGER_SCORE if config.norm_bias else (0, 0, 0)
    moved = block.elementwise_bytes_per_token
    return replace(
        block,
        attention=block.attention and replace(block.attention, causal=not config.norm_bias),
        elementwise_bytes_per_token=moved + forward * hidden + forward_scores * scores,
        backward_elementwise_bytes_per_token=2 * moved + backward * hidden + backward_scores * scores,
        replicated_elementwise_bytes_per_token=block.replicated_elementwise_bytes_per_token + forward * hidden,
        num_elementwise_kernels=block.num_elementwise_kernels + EAGER_KERNELS,
        activation_bytes_per_token=block.activation_bytes_per_token + kept * hidden + kept_scores * scores,
        replicated_bytes_per_token=block.replicated_bytes_per_token + kept * hidden,
    )


def make_cluster(cluster: ClusterSpec, gpus: int, bandwidth: dict[str, float]) -> ClusterSpec:
    """Return the cluster with ``num_gpus`` GPUs and the ``bandwidth`` of tiers, in bytes per second.

    Fewer GPUs than a node has are one node, and tiers that join no more than the tier before are left out.
    """
    per_node = min(cluster.gpus_per_node, gpus)
    tiers = []
    for tier in cluster.tiers:
        inside = tier is not cluster.tiers[-1]
        size = per_node if inside and tier is cluster.tiers[-2] else min(tier.num_ranks, per_node) if inside else gpus
        rate = bandwidth.get(tier.name, tier.bandwidth_bytes_per_s)
        tiers.append(replace(tier, num_ranks=size, bandwidth_bytes_per_s=rate))
        if size >= gpus:
            break
    return replace(cluster, num_nodes=-(-gpus // per_node), gpus_per_node=per_node, tiers=tuple(tiers))


def make_layout(job: LedgerJob) -> Layout:
    """Ranks as Megatron-LM numbers them: TP innermost, then CP, DP, PP; virtual stages go round."""
    ranks = np.arange(job.gpus).reshape(job.pp, job.dp, job.tp * job.cp).transpose(1, 0, 2)
    layers = layers_of_stages(job.config.num_layers, job.pp * job.vpp)
    whole = job.recompute >= job.config.num_layers
    placed = np.ascontiguousarray(np.tile(ranks, (1, job.vpp, 1)))
    module = ModuleLayout(
        "llm", job.tp, job.cp, layers, placed, recompute=whole, sharding=ZERO3 if job.sharded else ZERO1, ep=job.ep
    )
    if not job.encoder:
        return Layout((module,), job.num_microbatches)
    first = np.ascontiguousarray(placed[:, :1])
    whole_encoder = (job.encoder.num_layers + 2,)
    encoder = replace(module, module="encoder", layers_per_stage=whole_encoder, ranks=first, ep=1)
    return Layout((encoder, module), job.num_microbatches)


def layers_of_stages(blocks: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, embedding and head included.

    Blocks are spread evenly. If they do not divide, but do with embedding and head counted, those count, as in
    megatron-core (``account_for_embedding_in_pipeline_split``); otherwise the first stages have one more.
    """
    if stages > 1 and blocks % stages and (blocks + 2) % stages == 0:
        return ((blocks + 2) // stages,) * stages
    layers = spread_blocks(blocks + 2, stages)
    assert layers is not None
    return layers


def _program(model: ModelSpec, job: LedgerJob, count: int) -> Program:
    """Return the program of the replicas that exchange tokens of experts, usually one; others only have steps."""
    layout = make_layout(job)
    placed = layout.modules[-1]
    replicas = placed.expert_span
    items = [(IMAGE, job.item_tokens, job.projected_tokens)] * job.items
    text_tokens = job.sequence_tokens - job.items * job.projected_tokens
    modalities = (IMAGE,) if job.encoder else ()
    shapes = shapes_from_lists(modalities, [(text_tokens, items)] * (replicas * count * job.microbatch_size))
    replica, microbatch = divmod(np.arange(len(shapes)) // job.microbatch_size, count)
    assignment = same_microbatches(model, shapes, replica, microbatch, microbatch)
    if job.vpp > 1:
        program = interleaved_program(model, shapes, layout, assignment)
    else:
        program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    if not job.recompute or placed.recompute:
        return program
    remade = [
        np.zeros((len(rows), each.pp), np.int64) for rows, each in zip(program.chunks, layout.modules, strict=True)
    ]
    remade[-1] += np.minimum(covered_per_stage(model.llm, placed.layers_per_stage), job.recompute)
    return recompute_chunks(program, remade)


class Outcome(NamedTuple):
    """The prediction of a row: of an iteration, of a GPU's highest memory, and whether it fits (``OPEN`` if open)."""

    seconds: Interval
    gib: Interval
    fits: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A row and the cases that it may be; none, and a reason, if it is not predicted.

    ``kind`` is that of its model. ``fitted``: constants are fitted to it, as to all dense models of fitted sources.
    ``sets``: the constant of its device alone that is fitted to it.
    """

    row: LedgerRow
    cases: tuple[Case, ...] = ()
    reason: str = ""
    kind: str = ""
    fitted: bool = False
    sets: str = ""

    def outcome(self, predict: Callable[[Case], Prediction]) -> Outcome:
        """Return the outcome of the row, given a function that predicts a case.

        Of a run that fitted, cases that do not fit are no candidates, unless none fits.
        """
        candidates = [predict(case) for case in self.cases]
        fitting = [prediction for prediction in candidates if prediction.fits]
        fits = OK if len(fitting) == len(candidates) else OPEN if fitting else OOM
        if self.row.outcome == OK and fitting:
            candidates = fitting
            fits = OK
        seconds, gib, _ = zip(*candidates, strict=True)
        return Outcome((min(seconds), max(seconds)), (min(gib), max(gib)), fits)

    def line(self, predict: Callable[[Case], Prediction]) -> dict[str, Any]:
        """Return all fields of the row and its prediction; ``row`` is the line of its file.

        ``predicted_s`` and ``predicted_gib`` are the values in the predicted range that are nearest to the published
        ones; where nothing is published, the middle of the range. ``ratio`` and ``memory_ratio`` are predicted over
        published values, and ``middle_ratio`` is that of the middle of the range.
        """
        row = self.row
        published_s = row.published_s
        peak_gib = row.peak_memory_gib
        line: dict[str, Any] = row._asdict() | {"row": row.line, "published_gib": peak_gib}
        line |= {"kind": self.kind, "fitted": self.fitted, "sets": self.sets}
        if not self.cases:
            unknown = {"predicted_outcome": "", "status": "left out", "reason": self.reason}
            return line | dict.fromkeys(PREDICTED) | unknown
        seconds, gib, fits = self.outcome(predict)
        predicted_s = nearest(seconds, published_s)
        predicted_gib = nearest(gib, peak_gib)
        return line | {
            "predicted_s": predicted_s,
            "ratio": predicted_s / published_s if published_s else None,
            "middle_ratio": nearest(seconds) / published_s if published_s else None,
            "predicted_gib": predicted_gib,
            "memory_ratio": predicted_gib / peak_gib if peak_gib and row.outcome == OK else None,
            "predicted_outcome": fits,
            "status": "predicted",
            "reason": "",
            "least_predicted_s": seconds[0],
            "greatest_predicted_s": seconds[1],
        }


def nearest(ends: Interval, value: float | None = None) -> float:
    """The value of a range that is nearest to one; without one, the geometric mean of both ends."""
    low, high = ends
    return min(max(value, low), high) if value else sqrt(low * high)


def comparable(row: LedgerRow, book: Book) -> LedgerRow:
    """Return the row without its time if its source says that the time is not that of a usual run."""
    source = book.sources.get(row.source)
    return row._replace(published_s=None) if source and source.untimed and source.untimed in row.note else row


def make_entries(rows: Iterable[LedgerRow], book: Book, make: Callable[[LedgerJob], Case]) -> Iterator[Entry]:
    """Every row with its cases."""
    for row in (comparable(row, book) for row in rows):
        try:
            cases = tuple(map(make, jobs_for(row, book)))
            source = book.sources.get(row.source, book.sources[USERS])
            kind = cases[0].job.kind
            is_dense = kind == TEXT_ALONE
            fitted = source.fitted and is_dense
            yield Entry(row, cases, kind=kind, fitted=fitted, sets=source.sets if is_dense else "")
        except UserError as error:
            yield Entry(row, reason=str(error))


def predictor(change: Change | None = None) -> Callable[[Case], Prediction]:
    """A function that predicts each case once, on unchanged or changed clusters: many rows are the same job."""
    return cache(lambda case: case.predict(change))
