"""Strategies that Megatron-LM runs unmodified, and its flags for a plan.

Read in NVIDIA/Megatron-LM at commit d98e8a64 (2026-08-22): ``megatron/training/arguments.py``,
``megatron/training/config``, ``megatron/core/transformer/transformer_config.py``, ``pretrain_vlm.py`` and
``examples/multimodal``. Encoders are whole on the LLM's first stage (``add_encoder``, ``pipeline_model_parallel_size =
1``), with its TP, without sequence or context parallelism, and take no virtual stages; LLM stages have as many layers,
but for the first and the last (``num_layers_in_first_pipeline_stage`` and its like, above 0); the schedule is 1F1B over
microbatches of so many samples.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from entrain_bench.answers.recommend.recommendation import Recommendation
from entrain_bench.answers.recommend.strategy_race import StrategyRace
from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.lpt import arrival_places
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import IntArray
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.framework import BF16
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import FULL, ModelSpec
from entrain_bench.specs.module_layers import EAGER, FUSED, Experts

NAME = "Megatron-LM"
FRAMEWORKS = ("megatron",)
INDENT = "  "
# The key of a strategy's YAML with the overrides under which it may run; without the key it may not.
KEY = "within_megatron"
# Encoders as Megatron-LM's multimodal code runs them.
OVERRIDES = ("encoder_sp=false", "encoder_cp=false")


def recomputation(model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return the modules that Megatron-LM's flags can recompute: none, the LLM, all."""
    every = tuple(module.name for module in model.modules)
    llm_alone = {} if every == (model.llm.name,) else {f" recomputing {model.llm.name}": (model.llm.name,)}
    return {"": (), **llm_alone, " recomputing": every}


def flags(job: Job, layout: Layout, microbatch_size: int) -> list[str]:
    """The flags of a layout that is not refused, in the order of a launch script."""
    framework = job.framework
    llm = layout.modules[job.model.llm_index]
    pp = _num_ranks(llm) // llm.ranks_per_block
    flags = [
        f"--tensor-model-parallel-size {llm.tp}",
        f"--pipeline-model-parallel-size {pp}",
        f"--context-parallel-size {llm.cp}",
    ]
    if llm.ep > 1:
        # Experts have the TP of attention, as by default; tokens are exchanged by an all-to-all.
        flags.append(f"--expert-model-parallel-size {llm.ep}")
    flags += [*_expert_flags(job.model.llm.config.experts)]
    if pp > 1 and llm.dp > 1 and np.array_equal(llm.ranks, _ranks(llm, pp)):
        flags.append("--use-tp-pp-dp-mapping")
    flags += [*_stage_flags(blocks_of_stages(llm), pp)]
    flags += [f"--micro-batch-size {microbatch_size}", f"--global-batch-size {job.global_batch}"]
    if llm.recompute:
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
        flags += ["--recompute-vision"] if any(placed.recompute for placed in _others(job, layout)) else []
    gathers = framework.overlap_param_gather and framework.distributed_optimizer
    switches = {
        "--sequence-parallel": framework.sequence_parallel and llm.tp > 1,
        "--use-distributed-optimizer": framework.distributed_optimizer,
        "--overlap-grad-reduce": framework.overlap_grad_reduce,
        "--overlap-param-gather": gathers,
        "--no-align-param-gather": gathers and not framework.align_param_gather,
        "--freeze-LM": job.model.llm.name in framework.freeze,
        "--freeze-ViT": any(module.name in framework.freeze for module in job.model.encoders),
        "--bf16": True,
        "--grad-reduce-in-bf16": framework.grad_dtype == BF16,
        "--cross-entropy-loss-fusion": framework.cross_entropy == FUSED,
        "--cross-entropy-fusion-impl te": framework.cross_entropy == FUSED,
    }
    return [*flags, *(flag for flag, is_on in switches.items() if is_on)]


def takes_arrivals(job: Job, program: Program) -> bool:
    """Whether microbatches are samples as they arrive, which need no sampler of their own."""
    llm = job.model.llm_index
    replica, microbatch = arrival_places(
        len(program.shapes), _size(job, program.layout), program.layout.modules[llm].dp
    )
    labels = _labels(program, llm)
    return np.array_equal(labels.replica, replica) and np.array_equal(labels.microbatch, microbatch)


def blocks_of_stages(llm: ModuleLayout) -> tuple[int, ...]:
    """Transformer layers of each stage: without embedding and head."""
    layers = [*llm.layers_per_stage]
    layers[0] -= 1
    layers[-1] -= 1
    return tuple(layers)


def layout_reasons(job: Job, layout: Layout) -> Iterator[str]:
    """Yield why Megatron-LM cannot take a layout; nothing if it can."""
    model = job.model
    llm = layout.modules[job.model.llm_index]
    if model.generators:
        yield f"has no place for a generator ({model.generators[0].name})"
    for placed in layout.modules:
        if placed.scatters or placed.offload:
            yield f"{placed.module} is {'sharded' if placed.scatters else 'offloaded'}"
        if (placed.tp, placed.cp, placed.dp) != (llm.tp, llm.cp, llm.dp):
            yield f"{placed.module} has TP {placed.tp}, CP {placed.cp}, DP {placed.dp} of its own"
    for placed in _others(job, layout):
        if placed.pp > 1 or not np.array_equal(placed.ranks[:, 0], llm.ranks[:, 0]):
            yield f"{placed.module} is not whole on the first stage of {llm.module}"
    if llm.stages_per_rank > 1 and model.encoders:
        yield "virtual stages have no place for an encoder"
    alone = [placed.module for placed in _others(job, layout) if placed.recompute]
    if alone and not llm.recompute:
        yield f"{alone[0]} recomputes alone; its flags recompute the LLM, too"
    pp = _num_ranks(llm) // llm.ranks_per_block
    if not any(np.array_equal(llm.ranks, _ranks(llm, pp, by_stage=order)) for order in (False, True)):
        yield "replicas are not on consecutive ranks, their stages in order"
    if llm.ep > llm.cp and pp > 1 and np.array_equal(llm.ranks, _ranks(llm, pp)):
        yield "its expert-parallel groups are of consecutive ranks, which --use-tp-pp-dp-mapping gives to stages"
    blocks = blocks_of_stages(llm)
    if min(blocks) < 1 or len({*blocks[1:-1]}) > 1 or (llm.pp > pp and len({*blocks}) > 1):
        yield f"stages of {'/'.join(map(str, blocks))} layers; all but the first and the last must have as many"
    if job.framework.encoder_optimizers > 1:
        yield f"encoders have one copy of optimizer states (encoder_optimizers={job.framework.encoder_optimizers})"
    if job.framework.recompute_granularity != FULL and any(placed.recompute for placed in layout.modules):
        yield "its recompute_modules=mlp keeps what the norm before makes (recompute_granularity=selective)"
    if job.framework.p2p != "blocking" and llm.pp == pp > 1:
        yield f"1F1B waits for its transfers (p2p={job.framework.p2p})"
    if job.framework.cross_entropy == EAGER:
        yield f"its loss is computed on shards of the vocabulary (cross_entropy={EAGER})"
    experts = model.llm.config.experts
    if experts is not None and experts.visual_count:
        yield "experts of a modality of their own are no flag"
    if job.framework.tp_overlap:
        yield f"tp_overlap={job.framework.tp_overlap:g} is no flag"


def program_reasons(job: Job, program: Program) -> Iterator[str]:
    """Yield why Megatron-LM would not run a program so; nothing if it would."""
    model = job.model
    llm = job.model.llm_index
    if any(program.splits_backward(index) for index in range(len(program.chunks))):
        yield "its backwards are split"
    if program.remade and any(np.any(rows) for rows in program.remade):
        yield "it recomputes by stage or chunk"
    if any(np.any(rows.part > 0) for rows in program.chunks):
        yield "its microbatches are cut into parts"
    samples = np.diff(program.chunks[llm].offsets)
    size = _size(job, program.layout)
    if np.any(samples != size):
        yield f"its microbatches have {samples.min()} to {samples.max()} samples instead of {size}"
    labels = [_labels(program, index) for index in range(len(model.modules))]
    for module, label in zip(model.modules, labels, strict=True):
        owner = module.owners(program.shapes, module.units(program.shapes))
        same = [
            np.array_equal(getattr(label, name), getattr(labels[llm], name)[owner])
            for name in ("replica", "microbatch")
        ]
        if not all(same):
            yield f"{module.name} and {model.llm.name} do not share microbatches"
    layout = program.layout
    assignment = Assignment(tuple(labels))
    if layout.modules[llm].stages_per_rank > 1:
        stock = interleaved_program(model, program.shapes, layout, assignment)
    else:
        stock = chain_program(model, program.shapes, layout, assignment, stages_behind(layout, llm))
    if not np.array_equal(program.lane_actions, stock.lane_actions):
        yield "its order is not 1F1B"


def _stage_flags(blocks: tuple[int, ...], pp: int) -> Iterator[str]:
    if len(blocks) > pp:
        yield f"--num-layers-per-virtual-pipeline-stage {blocks[0]}"
    elif len({*blocks}) > 1:
        yield f"--decoder-first-pipeline-num-layers {blocks[0]}"
        yield f"--decoder-last-pipeline-num-layers {blocks[-1]}"


def _ranks(llm: ModuleLayout, pp: int, *, by_stage: bool = False) -> IntArray:
    """Consecutive ranks of replicas, or of stages, in which every rank holds as many stages as in the layout."""
    shape = (pp, llm.dp) if by_stage else (llm.dp, pp)
    ranks = np.arange(llm.dp * pp * llm.ranks_per_block).reshape(*shape, -1)
    return np.concatenate([ranks.swapaxes(0, 1) if by_stage else ranks] * (llm.pp // pp), axis=1)


def _expert_flags(experts: Experts | None) -> Iterator[str]:
    if experts is None:
        return
    yield f"--num-experts {experts.count}"
    yield f"--moe-router-topk {experts.top_k}"
    yield f"--moe-ffn-hidden-size {experts.ffn_hidden_size}"
    if experts.shared_ffn_hidden_size:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_ffn_hidden_size}"
    yield "--moe-grouped-gemm"
    yield "--moe-token-dispatcher-type alltoall"


def _labels(program: Program, module: int) -> ModuleAssignment:
    """Replica and microbatch of a module's units, in their order."""
    rows = program.chunks[module]
    order = np.argsort(rows.members, kind="stable")

    def of_units(labels: IntArray) -> IntArray:
        return np.repeat(labels, np.diff(rows.offsets))[order]

    return ModuleAssignment(of_units(rows.replica), of_units(rows.microbatch))


def _size(job: Job, layout: Layout) -> int:
    if not job.free_microbatch_size:
        return job.microbatch_size
    return -(-job.global_batch // (layout.modules[job.model.llm_index].dp * layout.num_microbatches))


def _others(job: Job, layout: Layout) -> list[ModuleLayout]:
    return [placed for index, placed in enumerate(layout.modules) if index != job.model.llm_index]


def _num_ranks(placed: ModuleLayout) -> int:
    return int(np.unique(placed.ranks[0]).size)


def variants_within(names: Mapping[str, Sequence[str]], model: ModelSpec | None) -> dict[str, tuple[str, ...]]:
    """Return the overrides of strategies that Megatron-LM may run, by name; ``names`` has those that each needs.

    Each is considered with everything that it can recompute of a model; None leaves that as it is.
    """
    modules = recomputation(model) if model else {"": None}
    again = {
        suffix: [] if names is None else [f"layout.recompute=[{','.join(names)}]"] for suffix, names in modules.items()
    }
    return {
        f"{name}{suffix}": (f"strategy={name}", *overrides, *recompute)
        for name, overrides in names.items()
        for suffix, recompute in again.items()
    }


def refusal(runner: StrategyRace, name: str, seed: int) -> str:
    """Why Megatron-LM does not run what a strategy plans at a seed; empty if it does."""
    job = prepare(runner.config(name, seed)).job
    layout = next(layout_reasons(job, runner.plan(name).layout), "")
    reason = layout or next(program_reasons(*_program(runner, name, seed)), "")
    return reason and f"{NAME} does not run it: {reason}"


def flag_lines(runner: StrategyRace, answer: Recommendation, path: Path, width: int) -> Iterator[str]:
    """Yield Megatron-LM's flags for the plan in a file, and how its microbatches are had."""
    plan = answer.plan
    job, program = _program(runner, answer.best, runner.first_seed)
    yield f"Flags of {NAME}"
    # A flag and its value stay in one line.
    joined = " ".join(flag.replace(" ", "\0") for flag in flags(job, plan.layout, plan.job.microbatch_size))
    for line in textwrap.wrap(joined, width - 2 * len(INDENT), break_on_hyphens=False):
        yield INDENT + line.replace("\0", " ")
    feed = f"Microbatches: --dataloader-type external, BalancedBatchSampler.from_plan(shapes, '{path}')."
    if takes_arrivals(job, program):
        feed = "Samples as they arrive."
    yield from textwrap.wrap(feed, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
    yield ""


def _program(runner: StrategyRace, name: str, seed: int) -> tuple[Job, Program]:
    config = runner.config(name, seed)
    setting = prepare(config)
    shapes = setting.source.batch(0, config.global_batch, seed)
    return setting.job, setting.strategy.program(shapes, runner.plan(name).layout, setting.profile)
