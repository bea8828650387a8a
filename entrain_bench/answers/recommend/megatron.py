"""Limits of unmodified Megatron-LM: reasons against layouts and programs.

Read in NVIDIA/Megatron-LM at commit d98e8a64 (2026-08-22): ``megatron/training/arguments.py``,
``megatron/training/config``, ``megatron/core/transformer/transformer_config.py``, ``pretrain_vlm.py`` and
``examples/multimodal``. Encoders are whole on the LLM's first stage (``add_encoder``, ``pipeline_model_parallel_size =
1``), with its TP, without sequence or context parallelism. They take no virtual stages. LLM stages have equally many
layers, except the first and the last (``num_layers_in_first_pipeline_stage`` and its like, above 0). The schedule is
1F1B over microbatches of equally many samples.
"""

from collections.abc import Iterator

import numpy as np

from entrain_bench.balancing.interleaved import interleaved_program
from entrain_bench.balancing.lpt import arrival_places
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import IntArray
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import FULL
from entrain_bench.specs.module_layers import EAGER


def takes_arrivals(job: Job, program: Program) -> bool:
    """Whether microbatches are samples as they arrive, which need no sampler of their own."""
    llm = job.model.llm_index
    replica, microbatch = arrival_places(
        len(program.shapes), microbatch_size(job, program.layout), program.layout.modules[llm].dp
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
    if job.framework.adapter.rank:
        yield "has no low-rank adapters"
    for name in job.framework.freeze:
        if name not in [module.name for module in model.modules]:
            yield f"has no flag for freeze={name}"
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
    pp = num_ranks(llm) // llm.ranks_per_block
    if not any(np.array_equal(llm.ranks, consecutive_ranks(llm, pp, by_stage=order)) for order in (False, True)):
        yield "replicas are not on consecutive ranks, their stages in order"
    if llm.ep > llm.cp and pp > 1 and np.array_equal(llm.ranks, consecutive_ranks(llm, pp)):
        yield "its expert-parallel groups are of consecutive ranks, which --use-tp-pp-dp-mapping gives to stages"
    blocks = blocks_of_stages(llm)
    if min(blocks) < 1 or len({*blocks[1:-1]}) > 1 or (llm.pp > pp and len({*blocks}) > 1):
        yield f"stages of {'/'.join(map(str, blocks))} layers; those between the first and the last must have as many"
    if job.framework.encoder_optimizers > 1:
        yield f"encoders have one copy of optimizer states (encoder_optimizers={job.framework.encoder_optimizers})"
    if job.framework.recompute_granularity != FULL and any(placed.recompute for placed in layout.modules):
        yield "its recompute_modules=mlp keeps the output of the norm before (recompute_granularity=selective)"
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
    yield from shape_reasons(job, program)
    yield from size_reasons(job, program)
    layout = program.layout
    llm = job.model.llm_index
    assignment = Assignment(tuple(_labels(program, index) for index in range(len(job.model.modules))))
    if layout.modules[llm].stages_per_rank > 1:
        stock = interleaved_program(job.model, program.shapes, layout, assignment)
    else:
        stock = chain_program(job.model, program.shapes, layout, assignment, stages_behind(layout, llm))
    if not np.array_equal(program.lane_actions, stock.lane_actions):
        yield "its order is not 1F1B"


def shape_reasons(job: Job, program: Program) -> Iterator[str]:
    """Yield why a loop that runs the whole model on a microbatch would not run a program's chunks."""
    model = job.model
    if any(program.splits_backward(index) for index in range(len(program.chunks))):
        yield "its backwards are split"
    if program.remade and any(np.any(rows) for rows in program.remade):
        yield "it recomputes by stage or chunk"
    if any(np.any(rows.part > 0) for rows in program.chunks):
        yield "its microbatches are cut into parts"
    labels = [_labels(program, index) for index in range(len(model.modules))]
    for module, label in zip(model.modules, labels, strict=True):
        owner = module.owners(program.shapes, module.units(program.shapes))
        same = [
            np.array_equal(getattr(label, name), getattr(labels[model.llm_index], name)[owner])
            for name in ("replica", "microbatch")
        ]
        if not all(same):
            yield f"{module.name} and {model.llm.name} do not share microbatches"


def size_reasons(job: Job, program: Program) -> Iterator[str]:
    """Yield why a loop whose microbatches have one size would not run a program."""
    samples = np.diff(program.chunks[job.model.llm_index].offsets)
    size = microbatch_size(job, program.layout)
    if np.any(samples != size):
        yield f"its microbatches have {samples.min()} to {samples.max()} samples instead of {size}"


def consecutive_ranks(llm: ModuleLayout, pp: int, *, by_stage: bool = False) -> IntArray:
    """Return ranks ``[dp, stages, ranks_per_block]``, consecutive in each replica, or in each stage."""
    shape = (pp, llm.dp) if by_stage else (llm.dp, pp)
    ranks = np.arange(llm.dp * pp * llm.ranks_per_block).reshape(*shape, -1)
    return np.concatenate([ranks.swapaxes(0, 1) if by_stage else ranks] * (llm.pp // pp), axis=1)


def _labels(program: Program, module: int) -> ModuleAssignment:
    """Replica and microbatch of a module's units, in their order."""
    rows = program.chunks[module]
    order = np.argsort(rows.members, kind="stable")

    def of_units(labels: IntArray) -> IntArray:
        return np.repeat(labels, np.diff(rows.offsets))[order]

    return ModuleAssignment(of_units(rows.replica), of_units(rows.microbatch))


def microbatch_size(job: Job, layout: Layout) -> int:
    """Samples of a microbatch, of equal ones."""
    if not job.free_microbatch_size:
        return job.microbatch_size
    return -(-job.global_batch // (layout.modules[job.model.llm_index].dp * layout.num_microbatches))


def _others(job: Job, layout: Layout) -> list[ModuleLayout]:
    return [placed for index, placed in enumerate(layout.modules) if index != job.model.llm_index]


def num_ranks(placed: ModuleLayout) -> int:
    """Ranks of a replica."""
    return int(np.unique(placed.ranks[0]).size)
