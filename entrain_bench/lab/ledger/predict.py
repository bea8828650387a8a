"""What the cost model says of a job: seconds of an iteration, memory of its fullest GPU, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.remembered import remembered
from entrain_bench.config.compose import Composer
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.ledger.jobs import LedgerJob
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.simulate.place import place_program
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import Role, build_layers
from entrain_bench.specs.shapes import shapes_from_lists
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.variants import with_cross_entropy, with_gate_kernel, with_norm_kernel

GIB = 2**30
# Rounds of a pipeline after which all further ones take the same time, and microbatches that are few in any case.
ROUNDS = 4
# Cases that are kept while constants change.
MAX_CASES = 4096
# How text becomes tokens; rows state tokens.
TEXT = TokenRules(1, 1, 1, 1, 1.0, 1.0, 1, 1.0, 1.0)

type Change = Callable[[ClusterSpec], ClusterSpec]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the cost model says of a run.

    Attributes:
        seconds: of an iteration.
        gib: highest memory of a GPU.
        fits: whether that is within the budget.
    """

    seconds: float
    gib: float
    fits: bool


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
        name, bandwidths = job.machine
        cluster, fraction = self._cluster(name)
        model, layout = model_of(job), layout_of(job)
        count, step = job.num_microbatches, job.pp
        least = ROUNDS * step + count % step
        counts = (count,) if count <= least + step else (least, least + step)
        programs = tuple(_program(model, layout, job, number) for number in counts)
        rounds = (count - least) // step if len(counts) > 1 else 0
        return Case(model, resized(cluster, job.gpus, dict(bandwidths)), job, programs, rounds, fraction)


def resized(cluster: ClusterSpec, gpus: int, bandwidths: dict[str, float]) -> ClusterSpec:
    """The cluster with as many GPUs, in nodes of the same kind, and other bandwidths of the named tiers.

    Fewer GPUs than a node has are one node, and tiers that join no more than the tier before are left out.
    """
    per_node = min(cluster.gpus_per_node, gpus)
    nodes = -(-gpus // per_node)
    tiers = [
        replace(
            tier,
            num_ranks=min(tier.num_ranks, gpus) if tier is not cluster.tiers[-1] else gpus,
            bandwidth_bytes_per_s=bandwidths.get(tier.name, tier.bandwidth_bytes_per_s),
        )
        for tier in cluster.tiers
    ]
    joined = next(index for index, tier in enumerate(tiers) if tier.num_ranks >= gpus)
    return replace(cluster, num_nodes=nodes, gpus_per_node=per_node, tiers=tuple(tiers[: joined + 1]))


def model_of(job: LedgerJob) -> ModelSpec:
    """The language model of a job."""
    config = job.config
    layers = [*build_layers(config)]
    if job.outputs:
        layers[-1] = build_layers(replace(config, vocab_size=job.outputs))[-1]
    if not job.causal:
        layers = [
            replace(layer, attention=replace(layer.attention, causal=False)) if layer.attention else layer
            for layer in layers
        ]
    model = ModelSpec("ledger", (ModuleSpec("llm", Role.LLM, config, tuple(layers)),), TEXT)
    options = job.framework
    if not job.outputs:
        model = with_cross_entropy(model, options.cross_entropy)
    return with_gate_kernel(with_norm_kernel(model, options.norm_kernel), options.gate_kernel)


def layout_of(job: LedgerJob) -> Layout:
    """Ranks as Megatron-LM numbers them: TP innermost, then CP, DP, PP; virtual stages go round."""
    width, stages = job.tp * job.cp, job.pp * job.vpp
    first = (np.arange(job.pp)[None, :] * job.dp + np.arange(job.dp)[:, None]) * width
    ranks = np.tile(first[:, :, None] + np.arange(width), (1, job.vpp, 1))
    placed = ModuleLayout(
        "llm",
        job.tp,
        job.cp,
        layers_of_stages(job.config.num_layers, stages),
        ranks,
        recompute=job.recompute,
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
        return interleaved_program(model, shapes, layout, assignment)
    return chain_program(model, shapes, layout, assignment, stages_behind(layout))
