"""Jobs with fixed degrees and microbatch size, derived from a job that leaves them free."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import compress, islice, product

import numpy as np

from entrain_bench.balancing.candidates import Candidate
from entrain_bench.balancing.experts import expert_jobs
from entrain_bench.balancing.planning import average_layer_s, recompute_choices, replica_ranks, widest_tp
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.job import DEFAULT_DEGREES, DEFAULT_MICROBATCH_SIZE, Job
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.sharding import ZERO1

FAR = 3.0  # ratio to the least estimate up to which candidates are considered before drafts correct estimates
MAX_JOBS = 64  # fixed jobs (degrees and microbatch sizes) that a planner is asked about, at most
MAX_CHECKED = 256  # fixed jobs that are checked for memory to find these, at most
CHECKED_LAYOUTS = 2  # layouts of a job and a candidate set that are checked, at most


def by_turns(
    estimated_s: FloatArray, knobs: Sequence[tuple[object, ...]], runs: Callable[[int], bool] = lambda _: True
) -> Iterator[int]:
    """Yield candidates once each: in turn the best remaining one overall and of every value of every knob."""
    values: dict[object, list[int]] = {}
    for index in np.argsort(decisive(estimated_s), kind="stable").tolist():
        for value in (None, *enumerate(knobs[index])):
            values.setdefault(value, []).append(index)
    waiting = [iter(indices) for indices in values.values()]
    taken: set[int] = set()
    while waiting:
        left = []
        for indices in waiting:
            for index in indices:
                if index not in taken:
                    taken.add(index)
                    if runs(index):
                        left.append(indices)
                        yield index
                        break
        waiting = left


def default_job(job: Job) -> Job | None:
    """Return the job with default degrees and size where it leaves them free; None if nothing is free or none fits."""
    asked = job.request
    default = DEFAULT_DEGREES
    request = replace(asked, tp=asked.tp or default.tp, cp=asked.cp or default.cp, dp=asked.dp or default.dp)
    if request == asked and not job.free_microbatch_size:
        return None
    fixed = replace(job, request=request)
    if job.free_microbatch_size:
        fixed = fixed.with_microbatch_size(DEFAULT_MICROBATCH_SIZE)
    try:
        next(fixed.degrees())
    except UserError:
        return None
    return fixed


def fixed_jobs(profile: Profile, samples: SampleShapes, fits: Callable[[Job], bool] = lambda _: True) -> list[Job]:
    """Return jobs with fixed TP, CP, DP and microbatch size, rated by balanced 1F1B and the longest units' times.

    ``fits``: whether a planner has a layout whose states fit memory. If no job fits, the best jobs are returned.
    """
    jobs: list[Job] = []
    ratings_s: list[float] = []
    knobs: list[tuple[object, ...]] = []
    modules = profile.job.model.modules
    longest = [module.lengths(samples, module.units(samples)).max(initial=0) for module in modules]

    @cache
    def longest_s(tp: int, cp: int) -> float:
        given = [(module, np.array([length])) for module, length in zip(modules, longest, strict=True) if length]
        return sum(
            float(profile.layers.layer_s(module, length, widest_tp(module, tp), cp).sum()) for module, length in given
        )

    for sized in profile.each_microbatch_size():
        try:
            degrees = [*sized.job.degrees(of_llm=True)]
        except UserError:
            continue
        layers_s = {width: average_layer_s(sized, samples, *width) for width in {(one.tp, one.cp) for one in degrees}}
        for one in degrees:
            mean_s = sum(float(layer_s.sum()) for layer_s in layers_s[one.tp, one.cp])
            count = sized.job.num_microbatches(one.dp)
            ratings_s.append((count + one.pp - 1) / one.pp * mean_s + longest_s(one.tp, one.cp))
            request = replace(sized.job.request, tp=one.tp, cp=one.cp, dp=one.dp)
            jobs.append(replace(sized.job, request=request))
            knobs.append((one.tp, one.cp, one.pp, one.dp, sized.job.microbatch_size))
    if not jobs:
        # No homogeneous degrees fit: planners with other degrees plan the unmodified job.
        return profile.job.each_microbatch_size()
    near = decisive(np.array(ratings_s)) <= decisive(FAR * min(ratings_s))
    turns = by_turns(np.array(ratings_s), knobs, lambda index: bool(near[index]))
    best = [job for index in islice(turns, MAX_CHECKED) for job in expert_jobs(jobs[index])]
    return [*islice(filter(fits, best), MAX_JOBS)] or best[:MAX_JOBS]


def holds_states(
    profile: Profile, job: Job, sets: Sequence[Callable[[Profile], Iterable[Candidate]]], *, chosen_later: bool
) -> bool:
    """Whether a planner has a layout for a job whose weights and optimizer states fit memory.

    The planner is asked only if that depends on its stages and sharding: if a rank cannot hold the whole LLM, but could
    hold an even share of all replicas that the job asks for.
    """
    limit = job.planning_budget_bytes
    llm = job.model.llm
    tp = job.request.tp or 1
    most = job.cluster.num_ranks // tp

    def whole_bytes(copies: int) -> float:
        placed = ModuleLayout(llm.name, tp, 1, (len(llm.layers),), replica_ranks(copies, 1, tp))
        return float(profile.memory.stage_state_bytes(llm, placed)[0])

    if whole_bytes(most) <= limit:
        return True
    copies = (job.request.dp or 1) * (job.request.cp or 1)
    is_even_least = job.request.sharding in (None, ZERO1) and llm.config.experts is None
    if is_even_least and whole_bytes(copies) * copies / most > limit:
        return False
    for variant, candidates in product(recomputing(job, chosen_later=chosen_later), sets):
        with suppress(UserError):
            for candidate in islice(candidates(profile.for_job(variant)), CHECKED_LAYOUTS):
                if profile.memory.lane_state_bytes(candidate.layout).max() <= limit:
                    return True
    return False


def recomputing(job: Job, *, chosen_later: bool) -> list[Job]:
    """Return the job with every choice of recomputed modules, if the job leaves it free."""
    if job.request.recompute is not None or chosen_later:
        return [job]
    names = [module.name for module in job.model.modules]
    chosen = [tuple(compress(names, again)) for again in recompute_choices(job)]
    return [replace(job, request=replace(job.request, recompute=recompute)) for recompute in chosen]
