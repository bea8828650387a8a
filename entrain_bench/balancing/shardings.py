"""The kinds of sharding that planners take, and the job that a requested kind makes of a job."""

from dataclasses import replace

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Job
from entrain_bench.specs.sharding import ZERO1


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


def _name(planner: object) -> str:
    return type(planner).__name__
