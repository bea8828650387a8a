"""Expert parallelism of layouts: the degree that a job asks for, that of a rule, and those that the tuner tries."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from entrain_bench.balancing.variants import Variant
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Job, divisors
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.sharding import HYBRID


def expert_degrees(job: Job, placed: ModuleLayout, module: ModuleSpec) -> list[int]:
    """Return the degrees of expert parallelism that a module's experts and ranks can have, rising."""
    experts = module.config.experts
    if experts is None or placed.sharding == HYBRID or placed.widths or placed.offload:
        return [1]
    if placed.tp > 1 and not job.framework.sequence_parallel:
        # Megatron-LM does so, too: otherwise ranks of a TP group would send the same tokens.
        return [1]
    copies = placed.dp * placed.cp
    return [ep for ep in divisors(copies) if experts.count % ep == 0 and (ep % placed.cp == 0 or placed.cp % ep == 0)]


def usual_degree(job: Job, placed: ModuleLayout, module: ModuleSpec) -> int:
    """Return the widest degree whose groups lie inside a node each; 1 if there is none."""
    node = job.cluster.gpus_per_node
    return max(ep for ep in expert_degrees(job, placed, module) if _is_inside(replace(placed, ep=ep), node))


def _is_inside(placed: ModuleLayout, ranks_of_node: int) -> bool:
    """Whether the ranks of every expert-parallel group are in one node."""
    groups = placed.expert_groups
    return groups is None or not np.any(groups // ranks_of_node != groups[:, :1] // ranks_of_node)


def with_experts(job: Job, placed: ModuleLayout, module: ModuleSpec) -> ModuleLayout:
    """Return a module's layout with the requested degree, or the usual one; unchanged without experts."""
    if module.config.experts is None:
        return placed
    return replace(placed, ep=job.request.ep or usual_degree(job, placed, module))


def expert_variants(job: Job) -> Iterator[Variant]:
    """Yield every degree of expert parallelism as a variant of a plan, if the job leaves it free."""
    experts = job.model.llm.config.experts
    if experts is None or job.request.ep is not None:
        return
    for degree in divisors(experts.count):
        if degree <= job.cluster.num_ranks:
            yield Variant("layout.ep", degree, partial(_with_degree, job, degree))


def expert_jobs(job: Job) -> list[Job]:
    """Return the job with the usual degree of expert parallelism, and with the widest one that its ranks can have."""
    experts = job.model.llm.config.experts
    asked = job.request
    if experts is None or asked.ep is not None or not asked.dp:
        return [job]
    copies = asked.dp * (asked.cp or 1)
    widest = max(ep for ep in divisors(copies) if (experts.count % ep == 0 and ep % (asked.cp or 1) == 0) or ep == 1)
    return [job] if widest == 1 else [job, replace(job, request=replace(asked, ep=widest))]


def _with_degree(job: Job, degree: int, layout: Layout) -> Layout:
    index = job.model.llm_index
    placed = layout.modules[index]
    if degree not in expert_degrees(job, placed, job.model.llm):
        return layout
    modules = [replace(one, ep=degree) if place == index else one for place, one in enumerate(layout.modules)]
    return replace(layout, modules=tuple(modules))
