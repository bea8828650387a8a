"""Predictions of the ledger's rows by the cost model: seconds of an iteration, memory of the fullest GPU, and its fit.

All microbatches of a replica are alike, and so are all replicas. So one replica is simulated, with so few microbatches
that what each further round of a pipeline takes follows from the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import UserError
from entrain_bench.base.remembered import remembered
from entrain_bench.config.compose import Composer
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.ledger.jobs import EAGER, OK, OOM, Book, LedgerJob, LedgerRow, Machine, jobs_for
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.columns import covered_per_stage, recompute_chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.simulate.executor import place_program
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import with_options
from entrain_bench.specs.layer import Layer
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import Role, build_layers
from entrain_bench.specs.shapes import shapes_from_lists
from entrain_bench.specs.tokens import TokenRules

GIB = 2**30
# Rounds of a pipeline after which all further ones take the same time, and microbatches that are few in any case.
ROUNDS = 4
# Bytes that blocks of PyTorch's operators move besides, forward and backward, and keep: of a hidden state with two
# RMSNorms in fp32 (LLaMA's code); of one with biases, copies of heads and dropout (BERT), of whose scores scale, mask
# and dropout, too.
EAGER_RMSNORM = 64, 152, 8
EAGER_LAYERNORM = 42, 44, 0
EAGER_SCORE = 13, 9, 2
EAGER_KERNELS = 10
# Cases that are kept while constants change.
MAX_CASES = 4096
# How text becomes tokens; rows state tokens.
TEXT = TokenRules(1, 1, 1, 1, 1.0, 1.0, 1, 1.0, 1.0)
# Whether a run fits, if that depends on what its row leaves open.
OPEN = "open"

type Change = Callable[[ClusterSpec], ClusterSpec]
# Title, headings and rows.
type Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of an iteration, highest memory of a GPU in GiB, and whether that is within the budget."""

    seconds: float
    gib: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A job's programs and what they run on.

    The first program has the least microbatches that tell, the second one round more. ``rounds`` are left out of the
    first. A program may use ``memory_fraction`` of a device's memory.
    """

    model: ModelSpec
    cluster: ClusterSpec
    job: LedgerJob
    programs: tuple[Program, ...]
    rounds: int
    memory_fraction: float

    def predict(self, change: Change | None = None) -> Prediction:
        """The prediction, on the cluster as it is or changed."""
        cluster = change(self.cluster) if change else self.cluster
        truth = CostTruth(self.model, cluster, self.job.framework)
        seconds = [_iteration_s(truth, program) for program in self.programs]
        total = seconds[0] + self.rounds * (seconds[-1] - seconds[0])
        peak = float(truth.memory.peak_bytes(self.programs[0]).max())
        return Prediction(total, peak / GIB, peak <= self.memory_fraction * cluster.device.memory_bytes)


def _iteration_s(truth: CostTruth, program: Program) -> float:
    _, end, _ = place_program(program, truth.charge(program))
    return float(end.max())


class Cases:
    """Cases by their job, each made once; clusters are composed once a choice."""

    def __init__(self, composer: Composer) -> None:
        self._composer = composer
        self._clusters: dict[str, tuple[ClusterSpec, float]] = {}
        self._cases: dict[LedgerJob, Case] = {}

    def case(self, job: LedgerJob) -> Case:
        """The programs of a job; ``UserError`` for one that the suite refuses."""
        return remembered(self._cases, job, lambda: self._make(job), MAX_CASES)

    def _make(self, job: LedgerJob) -> Case:
        name = job.machine.cluster
        if name not in self._clusters:
            run = self._composer.run((f"cluster={name}",))
            self._clusters[name] = ClusterSpec.from_config(run.cluster), run.memory_fraction
        cluster, fraction = self._clusters[name]
        config = job.config
        layers = build_layers(config)
        if job.framework.kernels == EAGER:
            layers = tuple(eager_block(layer, job) if layer.attention else layer for layer in layers)
        model = ModelSpec("ledger", (ModuleSpec("llm", Role.LLM, config, layers),), TEXT)
        model = with_options(model, job.framework)
        layout = make_layout(job)
        count = job.num_microbatches
        least = ROUNDS * job.pp + count % job.pp
        counts = (count,) if count <= least + job.pp else (least, least + job.pp)
        programs = tuple(_program(model, layout, job, number) for number in counts)
        rounds = (count - least) // job.pp if len(counts) > 1 else 0
        return Case(model, make_cluster(job.machine, cluster, job.gpus), job, programs, rounds, fraction)


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


def make_cluster(machine: Machine, cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """As many GPUs in nodes of a machine, whose choice of cluster is given.

    Fewer GPUs than a node has are one node, and tiers that join no more than the tier before are left out.
    """
    per_node = min(cluster.gpus_per_node, gpus)
    inside = cluster.tiers[:-1]
    sizes = [min(tier.num_ranks, per_node) for tier in inside[:-1]] + [per_node] * bool(inside) + [gpus]
    tiers = [
        replace(
            tier,
            num_ranks=size,
            bandwidth_bytes_per_s=machine.bandwidth.get(tier.name, tier.bandwidth_bytes_per_s),
        )
        for tier, size in zip(cluster.tiers, sizes, strict=True)
    ]
    joined = next(index for index, tier in enumerate(tiers) if tier.num_ranks >= gpus)
    return replace(cluster, num_nodes=-(-gpus // per_node), gpus_per_node=per_node, tiers=tuple(tiers[: joined + 1]))


def make_layout(job: LedgerJob) -> Layout:
    """Ranks as Megatron-LM numbers them: TP innermost, then CP, DP, PP; virtual stages go round."""
    width = job.tp * job.cp
    first = (np.arange(job.pp)[None, :] * job.dp + np.arange(job.dp)[:, None]) * width
    ranks = np.tile(first[:, :, None] + np.arange(width), (1, job.vpp, 1))
    blocks = job.config.num_layers
    layers = layers_of_stages(blocks, job.pp * job.vpp)
    whole = job.recompute >= blocks
    placed = ModuleLayout("llm", job.tp, job.cp, layers, ranks, recompute=whole, sharded=job.sharded)
    return Layout((placed,), job.num_microbatches)


def layers_of_stages(blocks: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, embedding and head included.

    Blocks are spread evenly. If they do not divide, but do with embedding and head counted, those count, as in
    megatron-core (``account_for_embedding_in_pipeline_split``); otherwise the first stages have one more.
    """
    if stages > 1 and blocks % stages and (blocks + 2) % stages == 0:
        return ((blocks + 2) // stages,) * stages
    layers = blocks // stages + (np.arange(stages) < blocks % stages)
    layers[0] += 1
    layers[-1] += 1
    return tuple(layers.tolist())


def _program(model: ModelSpec, layout: Layout, job: LedgerJob, count: int) -> Program:
    """The program of one replica; the others, which do the same, have no actions but steps."""
    shapes = shapes_from_lists((), [(job.sequence_tokens, [])] * (count * job.microbatch_size))
    microbatch = np.arange(len(shapes)) // job.microbatch_size
    assignment = Assignment((ModuleAssignment(np.zeros_like(microbatch), microbatch),))
    if job.vpp > 1:
        program = interleaved_program(model, shapes, layout, assignment)
    else:
        program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    (placed,) = layout.modules
    if not job.recompute or placed.recompute:
        return program
    most = covered_per_stage(model.llm, placed.layers_per_stage)
    return recompute_chunks(program, [np.tile(np.minimum(most, job.recompute), (len(program.chunks[0]), 1))])


@dataclass(frozen=True, slots=True)
class Range:
    """Least and greatest possible value of a quantity; equal if a row leaves nothing open."""

    low: float
    high: float

    def nearest(self, value: float) -> float:
        """The value of the range that is nearest to one."""
        return min(max(value, self.low), self.high)

    @property
    def middle(self) -> float:
        """The geometric mean of both ends."""
        return sqrt(self.low * self.high)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The prediction of a row, of an iteration and of a GPU's highest memory, or the reason why there is none.

    ``fits`` is ``ok``, ``oom``, or ``open`` if that depends on what the row leaves open.
    """

    row: LedgerRow
    reason: str = ""
    seconds: Range | None = None
    gib: Range | None = None
    fits: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row and the cases that it may be; none, and a reason, if it is not predicted."""

    row: LedgerRow
    cases: tuple[Case, ...] = ()
    reason: str = ""

    def outcome(self, predict: Callable[[Case], Prediction]) -> Outcome:
        """Return the outcome of the row, given a function that predicts a case.

        Of a run that fitted, cases that do not fit are no candidates, unless none fits.
        """
        if self.reason:
            return Outcome(self.row, self.reason)
        candidates = [predict(case) for case in self.cases]
        fitting = [prediction for prediction in candidates if prediction.fits]
        fits = OK if len(fitting) == len(candidates) else OPEN if fitting else OOM
        if self.row.outcome == OK and fitting:
            candidates = fitting
            fits = OK
        seconds = [prediction.seconds for prediction in candidates]
        gib = [prediction.gib for prediction in candidates]
        return Outcome(self.row, "", Range(min(seconds), max(seconds)), Range(min(gib), max(gib)), fits)


def make_entries(rows: Iterable[LedgerRow], book: Book, cases: Cases) -> Iterator[Entry]:
    """Every row with its cases."""
    for row in rows:
        try:
            yield Entry(row, tuple(cases.case(job) for job in jobs_for(row, book)))
        except UserError as error:
            yield Entry(row, reason=str(error))


def remember_predictions(change: Change | None) -> Callable[[Case], Prediction]:
    """A function that predicts each case once, on unchanged or changed clusters: many rows are the same job."""
    known: dict[int, Prediction] = {}

    def predict(case: Case) -> Prediction:
        if id(case) not in known:
            known[id(case)] = case.predict(change)
        return known[id(case)]

    return predict


def predict_entries(entries: Iterable[Entry], change: Change | None = None) -> list[Outcome]:
    """Return the outcome of every row on unchanged or changed clusters; equal jobs are predicted once."""
    predict = remember_predictions(change)
    return [entry.outcome(predict) for entry in entries]
