"""The kinds of sharding that planners take, and the job that a requested kind makes of a job."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from entrain_bench.balancing.variants import Variant
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Job
from entrain_bench.specs.sharding import HYBRID, ZERO1


def shardings(planner: object) -> tuple[str, ...]:
    """Return the values of ``layout.sharding`` that a planner takes, its own first; ZeRO-1 if it states none."""
    return getattr(planner, "shardings", (ZERO1,))


def job_for(job: Job, planner: object) -> Job:
    """The job as a planner takes it: in one stage if it asks for more than the planner's ZeRO-1 shares out.

    ``IncompatibleError`` for a kind that the planner does not take, or stages.
    """
    asked = job.request.sharding
    allowed = shardings(planner)
    if asked is not None and asked not in allowed:
        names = " or ".join(("null", *allowed))
        raise IncompatibleError(f"layout.sharding={asked}: must be {names} with strategy/planner {_name(planner)}")
    if asked in (None, ZERO1) or allowed[0] != ZERO1:
        return job
    if job.request.pp not in (None, 1):
        raise IncompatibleError(f"layout.pp={job.request.pp}: must be 1 or null with layout.sharding={asked}")
    return replace(job, request=replace(job.request, pp=1))


def check_sharding(layout: Layout, job: Job, planner: object) -> None:
    """Raise ``IncompatibleError`` for a layout whose modules are not sharded as the job asks."""
    asked = job.request.sharding
    for placed in layout.modules:
        if asked not in (None, placed.sharding):
            raise IncompatibleError(
                f"layout.sharding={asked}: {_name(planner)} gives {placed.module} {placed.sharding}; "
                f"must be null or {placed.sharding}"
            )


def sharded_as(placed: ModuleLayout, kind: str, ranks_of_node: int) -> ModuleLayout:
    """Return a module's layout with another kind of sharding."""
    nodes = max(1, placed.ranks.size // ranks_of_node) if kind == HYBRID else 1
    return replace(placed, sharding=kind, nodes=nodes, ep=1 if kind == HYBRID else placed.ep)


def sharding_variants(job: Job, planner: object) -> Iterator[Variant]:
    """Yield the other kinds of sharding that a planner takes, for plans in one stage, if the job leaves it free."""
    if (
        job.request.sharding is not None
        or not job.framework.distributed_optimizer
        or job.framework.encoder_optimizers > 1
    ):
        return
    for kind in shardings(planner)[1:]:
        if kind != HYBRID or job.cluster.num_nodes > 1:
            yield Variant("layout.sharding", kind, partial(_with_sharding, kind, job.cluster.gpus_per_node))


def _with_sharding(kind: str, ranks_of_node: int, layout: Layout) -> Layout:
    if not layout.is_one_stage:
        return layout
    return replace(layout, modules=tuple(sharded_as(placed, kind, ranks_of_node) for placed in layout.modules))


def job_sharded_as(job: Job, planner: object, layout: Layout) -> Job:
    """The job that asks a planner for a plan's kind of sharding, unless it is the planner's own."""
    kind = layout.modules[0].sharding
    if kind == shardings(planner)[0]:
        return job
    return job_for(replace(job, request=replace(job.request, sharding=kind)), planner)


def _name(planner: object) -> str:
    return type(planner).__name__
