"""Predictions of a job by the cost model: seconds of an iteration, memory of its fullest GPU, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.remembered import remembered
from entrain_bench.config.compose import Composer
from entrain_bench.costs.roofline import ELEMENTWISE_BACKWARD
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.ledger.book import Machine
from entrain_bench.lab.ledger.jobs import LedgerJob
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.program.recomputed_layers import covered_per_stage, recompute_chunks
from entrain_bench.simulate.executor import place_program
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.layer import BF16_BYTES, Layer
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import Role, build_layers, language_head
from entrain_bench.specs.shapes import shapes_from_lists
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.variants import with_options

GIB = 2**30
# Rounds of a pipeline after which all further ones take the same time, and microbatches that are few in any case.
ROUNDS = 4
# Kernels on scores that eager attention has besides: scale and mask. Dropouts of a block: of scores, and of the results
# of attention and MLP; each reads a value in 16 bits, writes it, and a byte of its mask.
EAGER_KERNELS = 2
DROPOUTS = 3
DROPOUT_BYTES = 2 * BF16_BYTES + 1
# Queries, keys, values and the results of attention.
HEAD_COPIES = 4
# Cases that are kept while constants change.
MAX_CASES = 4096
# How text becomes tokens; rows state tokens.
TEXT = TokenRules(1, 1, 1, 1, 1.0, 1.0, 1, 1.0, 1.0)

type Change = Callable[[ClusterSpec], ClusterSpec]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The cost model's prediction of a run.

    Attributes:
        seconds: of an iteration.
        gib: highest memory of a GPU.
        fits: whether that is within the budget.
    """

    seconds: float
    gib: float
    fits: bool


class Predictable(Protocol):
    """A run that the cost model can predict."""

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster of the case, as configured."""
        ...

    def predict(self, change: Change | None = None) -> Prediction:
        """The prediction, on the cluster as it is or changed."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """A job's programs and what they run on.

    All microbatches of a replica are alike, and so are all replicas, so one replica is simulated, with so few
    microbatches that what each further round of a pipeline takes follows from the difference.

    Attributes:
        model: the model.
        cluster: as its choice describes it.
        framework: how the trainer runs it.
        programs: with the least microbatches that tell, and with one round more; one if there are no more.
        rounds: that are left out of the first.
        budget_bytes: memory that a program may use.
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
        seconds = [iteration_s(truth, program) for program in self.programs]
        total = seconds[0] + self.rounds * (seconds[-1] - seconds[0])
        peak = float(truth.memory.peak_bytes(self.programs[0]).max())
        return Prediction(total, peak / GIB, peak <= self.memory_fraction * cluster.device.memory_bytes)


def iteration_s(truth: CostTruth, program: Program) -> float:
    """Seconds of an iteration of a program, memory aside."""
    _, end, _ = place_program(program, truth.charge(program))
    return float(end.max())


class Cases:
    """Cases by their job, each made once; clusters are composed once a choice."""

    def __init__(self, composer: Composer) -> None:
        self._composer = composer
        self._clusters: dict[str, tuple[ClusterSpec, float]] = {}
        self._cases: dict[LedgerJob, Case] = {}

    def of(self, job: LedgerJob) -> Case:
        """The programs of a job; ``UserError`` for one that the suite refuses."""
        return remembered(self._cases, job, lambda: self._made(job), MAX_CASES)

    def _cluster(self, name: str) -> tuple[ClusterSpec, float]:
        if name not in self._clusters:
            config = self._composer.run((f"cluster={name}",))
            self._clusters[name] = ClusterSpec.from_config(config.cluster), config.memory_fraction
        return self._clusters[name]

    def _made(self, job: LedgerJob) -> Case:
        cluster, fraction = self._cluster(job.machine.cluster)
        model = model_of(job)
        layout = layout_of(job)
        count = job.num_microbatches
        step = job.pp
        least = ROUNDS * step + count % step
        counts = (count,) if count <= least + step else (least, least + step)
        programs = tuple(_program(model, layout, job, number) for number in counts)
        rounds = (count - least) // step if len(counts) > 1 else 0
        return Case(model, cluster_of(job.machine, cluster, job.gpus), job, programs, rounds, fraction)


def cluster_of(machine: Machine, cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """As many GPUs in nodes of a machine, whose choice of cluster is given.

    Fewer GPUs than a node has are one node, and tiers that join no more than the tier before are left out.
    """
    per_node = min(machine.gpus_per_node or cluster.gpus_per_node, gpus)
    inside = [tier for tier in cluster.tiers[:-1] if not machine.tiers or tier.name in machine.tiers]
    # Without other tiers of a node the last of them joins it.
    sizes = [min(tier.num_ranks, per_node) for tier in inside[:-1]] + [per_node] * bool(inside) + [gpus]
    tiers = [
        replace(
            tier,
            num_ranks=size,
            bandwidth_bytes_per_s=machine.bandwidth.get(tier.name, tier.bandwidth_bytes_per_s),
        )
        for tier, size in zip([*inside, cluster.tiers[-1]], sizes, strict=True)
    ]
    joined = next(index for index, tier in enumerate(tiers) if tier.num_ranks >= gpus)
    return replace(
        cluster,
        num_nodes=-(-gpus // per_node),
        gpus_per_node=per_node,
        device=replace(cluster.device, **machine.device),
        tiers=tuple(tiers[: joined + 1]),
    )


def model_of(job: LedgerJob) -> ModelSpec:
    """The language model of a job."""
    config = job.config
    layers = [
        replace(layer, **_of_attention(job, layer), **_of_products(job, layer)) if layer.attention else layer
        for layer in build_layers(config)
    ]
    model = ModelSpec("ledger", (ModuleSpec("llm", Role.LLM, config, tuple(layers)),), TEXT)
    model = with_options(model, job.framework)
    *first, last = model.llm.layers
    if job.outputs:
        last = language_head(replace(config, vocab_size=job.outputs), job.framework.cross_entropy)
    added = {layer.kind: _with_accumulation(job, layer) for layer in (*first, last)}
    return replace(model, modules=(replace(model.llm, layers=tuple(added[layer.kind] for layer in (*first, last))),))


def _of_products(job: LedgerJob, layer: Layer) -> dict[str, Any]:
    """A job's changes to a block's products, and to communication and inputs of the column-parallel ones.

    Without sequence parallelism PyTorch's products each all-reduce their input gradient. With it they keep the gathered
    inputs, of which megatron-core keeps a rank's part.
    """
    config = job.config
    options = job.framework
    inputs, output, up, down = layer.gemms
    query = config.num_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    widths = (inputs.n,) if options.fused_qkv else (query, key_value, key_value)
    gates = 1 if options.fused_gates or not config.gated_mlp else 2
    columns = *(replace(inputs, n=width) for width in widths), *([replace(up, n=up.n // gates)] * gates)
    changes: dict[str, Any] = {"gemms": (*columns[: len(widths)], output, *columns[len(widths) :], down)}
    if not options.async_products and options.sequence_parallel:
        kept = layer.num_gathers * BF16_BYTES * config.hidden_size
        changes["whole_bytes_per_token"] = layer.whole_bytes_per_token + kept
        changes["replicated_bytes_per_token"] = layer.replicated_bytes_per_token - kept
    elif not options.async_products:
        changes["num_gathers"] = len(columns)
    return changes


def _with_accumulation(job: LedgerJob, layer: Layer) -> Layer:
    """A layer whose backward adds gradients to those of microbatches before, on average over an iteration.

    Microbatches of a job have one number of tokens, so bytes of a parameter are bytes of tokens. Sharded weights add
    gradients in their reduce-scatter.
    """
    later = 0.0 if job.sharded else (job.num_microbatches - 1) / job.num_microbatches
    tokens = job.microbatch_size * job.sequence_tokens / job.cp
    # Elementwise bytes of a layer that gathers its results are not divided by TP, its parameters are.
    parameters = layer.parameters * layer.split_parts(job.tp) / job.tp
    moved = job.framework.accumulation_bytes * parameters * later / tokens
    back = layer.backward_elementwise_bytes_per_token
    if back is None:
        back = ELEMENTWISE_BACKWARD * layer.elementwise_bytes_per_token
    return replace(layer, backward_elementwise_bytes_per_token=back + moved) if moved else layer


def _of_attention(job: LedgerJob, layer: Layer) -> dict[str, Any]:
    """A job's changes to a layer with attention: its mask, and kernels that others fuse.

    Eager attention scales and masks scores in kernels of their own. Dropout is another kernel, of scores and of the
    results of attention and MLP. All read and write what they work on in both passes, dropout a byte of its mask, too;
    what dropout leaves of the scores is kept. Sequences of a job have one length, so scores are bytes of tokens.
    """
    if layer.attention is None:
        return {}
    config = job.config
    options = job.framework
    scores = config.num_heads * job.sequence_tokens
    hidden = config.hidden_size
    biased = options.eager_blocks and config.linear_bias
    kernels = EAGER_KERNELS * job.eager_scores + DROPOUTS * job.dropout + HEAD_COPIES * options.eager_blocks + biased
    whole = job.dropout * (DROPOUTS - 1) * DROPOUT_BYTES * hidden
    moved = scores * DROPOUT_BYTES * job.dropout + whole
    moved += 2 * BF16_BYTES * HEAD_COPIES * hidden * options.eager_blocks
    # The mask is added in forward alone.
    scaled = scores * 2 * BF16_BYTES * job.eager_scores
    biases = BF16_BYTES * sum(gemm.n for gemm in layer.gemms) * biased
    back = layer.backward_elementwise_bytes_per_token
    if back is None:
        back = ELEMENTWISE_BACKWARD * layer.elementwise_bytes_per_token
    return {
        "attention": replace(layer.attention, causal=job.causal),
        "activation_bytes_per_token": layer.activation_bytes_per_token + BF16_BYTES * scores * job.dropout,
        "elementwise_bytes_per_token": layer.elementwise_bytes_per_token
        + (moved + EAGER_KERNELS * scaled + 2 * BF16_BYTES * layer.gemms[2].n * biased),
        "replicated_elementwise_bytes_per_token": layer.replicated_elementwise_bytes_per_token + whole,
        "backward_elementwise_bytes_per_token": back + moved + scaled + biases,
        "num_elementwise_kernels": layer.num_elementwise_kernels + kernels,
    }


def layout_of(job: LedgerJob) -> Layout:
    """Ranks as Megatron-LM numbers them: TP innermost, then CP, DP, PP; virtual stages go round."""
    width = job.tp * job.cp
    stages = job.pp * job.vpp
    first = (np.arange(job.pp)[None, :] * job.dp + np.arange(job.dp)[:, None]) * width
    ranks = np.tile(first[:, :, None] + np.arange(width), (1, job.vpp, 1))
    placed = ModuleLayout(
        "llm",
        job.tp,
        job.cp,
        layers_of_stages(job.config.num_layers, stages),
        ranks,
        recompute=job.recompute >= job.config.num_layers,
        sharded=job.sharded,
    )
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
