"""Candidates of planners: by estimate, those that fit memory, and the fastest of them on trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from itertools import chain, count, islice, product

import numpy as np

from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import OutOfMemoryError, UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Job
from entrain_bench.specs.shapes import SampleShapes

# Batches profiled to check memory; fewer if they are so large that samples abound.
MEMORY_BATCHES = 16
MEMORY_SAMPLES = 65_536
# Maximum number of candidates after the first that fits, among which others with its degrees are searched.
MAX_RECOMPUTING = 4
ENOUGH = 0.9  # share of memory up to which only the deciding batches are checked


def heaviest(batches: Sequence[SampleShapes], job: Job) -> list[int]:
    """Return the indices of batches with a module's longest unit, most tokens, or most tokens in a microbatch."""
    chosen: set[int] = set()
    for module in job.model.modules:
        weights = []
        for batch in batches:
            units = module.units(batch)
            lengths = module.lengths(batch, units)
            of_sample = np.bincount(module.owners(batch, units), lengths, minlength=len(batch))
            together = np.add.reduceat(of_sample, np.arange(0, len(batch), job.microbatch_size))
            weights.append((lengths.max(initial=0), lengths.sum(), together.max()))
        chosen |= {*np.argmax(np.array(weights, np.float64), axis=0).tolist()}
    return sorted(chosen)


def check_memory(
    profile: Profile, layout: Layout, make_program: MakeProgram, batches: Iterable[SampleShapes] | None = None
) -> float:
    """Return the most bytes of a rank in programs of batches (profiled ones by default); or ``OutOfMemoryError``."""
    job = profile.job
    draft = make_program.draft
    limit = job.planning_budget_bytes
    states = profile.memory.lane_state_bytes(layout)
    need = 0.0

    def check(peak: FloatArray, what: str = "") -> None:
        nonlocal need
        need = max(need, float(peak.max()))
        if need > limit:
            what = what or f"with {states[peak.argmax()] / 2**30:.1f} GiB of states"
            described = "; ".join(f"{name} {text}" for name, text in layout.describe().items())
            raise OutOfMemoryError(
                f"layout {described}: a rank needs {need / 2**30:.1f} GiB ({what}), {(need - limit) / 2**30:.1f} GiB "
                f"more than planners may use of the budget of {job.memory_budget_bytes / 2**30:.1f} GiB"
            )

    def run(batch: SampleShapes) -> None:
        peak = profile.memory.peak_bytes(draft(batch, layout))
        if draft is not make_program and peak.max() > limit:
            peak = profile.memory.peak_bytes(make_program(batch, layout))
        check(peak)

    check(states, "weights, gradients and optimizer states alone")
    if batches is not None:
        for batch in batches:
            run(batch)
        return need
    drawn = [profile.samples.draw(job.global_batch)]
    places = [profile.samples.state]
    run(drawn[0])
    for _ in range(1, max(1, min(MEMORY_BATCHES, MEMORY_SAMPLES // job.global_batch))):
        drawn.append(profile.samples.draw(job.global_batch))
        places.append(profile.samples.state)
    deciding = heaviest(drawn, job)
    with suppress(UserError):
        for index in sorted(range(1, len(drawn)), key=lambda index: index not in deciding):
            if index in deciding or need > ENOUGH * limit:
                run(drawn[index])
        return need
    # The next layout is checked on the batches after the first that refuses this one.
    need = float(states.max())
    for batch, place in zip(drawn, places, strict=True):
        profile.samples.restore(place)
        run(batch)
    return need


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that a planner considers."""

    estimated_s: float  # the planner's estimate of the iteration time
    layout: Layout
    knobs: tuple[object, ...] = ()  # values of the layout's knobs (``list_knobs``)


def list_knobs(layout: Layout, llm_index: int, kind: int) -> tuple[object, ...]:
    """Return the values of a layout's knobs: those of the LLM, of the other modules, and the candidate set."""
    llm = layout.modules[llm_index]
    others = [module for index, module in enumerate(layout.modules) if index != llm_index]
    recompute = tuple(module.recompute for module in layout.modules)
    widths = tuple((module.tp, module.cp) for module in others)
    stages = tuple(module.pp for module in others)
    replicas = llm.dp if llm.ep == 1 else (llm.dp, llm.ep)
    return llm.tp, llm.cp, llm.pp, replicas, llm.dp * layout.num_microbatches, recompute, widths, stages, kind


@dataclass(frozen=True, slots=True)
class Draft:
    """A candidate that is not placed on ranks yet. Placing takes long on many ranks."""

    least_s: float  # lower bound of its estimate
    place: Callable[[], Candidate | Draft]  # makes the candidate, or a draft with a better estimate


def rising_candidates(drafts: Iterable[Draft], most_s: float = np.inf) -> Iterator[Candidate]:
    """Yield the drafts' candidates by rising estimate up to ``most_s``; place a draft only when it is next."""
    queue = list[tuple[float, int, Draft | Candidate]]()
    for number, draft in enumerate(drafts):
        heappush(queue, (decisive(draft.least_s), number, draft))
    while queue and queue[0][0] <= decisive(most_s):
        _, number, entry = heappop(queue)
        if isinstance(entry, Candidate):
            yield entry
        else:
            placed = entry.place()
            seconds = placed.estimated_s if isinstance(placed, Candidate) else placed.least_s
            heappush(queue, (decisive(seconds), number, placed))


def listed_once(candidates: Callable[[Profile], Iterable[Candidate]]) -> Callable[[Profile], Iterator[Candidate]]:
    """Return the same candidates, each made once for a job: the tuner asks for the first ones again and again."""
    known: dict[tuple[object, ...], tuple[list[Candidate], Iterator[Candidate]]] = {}

    def listed(profile: Profile) -> Iterator[Candidate]:
        job = profile.job
        key = job.request, job.microbatch_size, job.free_microbatch_size
        if key not in known:
            known[key] = [], iter(candidates(profile))
        made, others = known[key]
        for place in count():
            if place == len(made):
                try:
                    made += islice(others, 1)
                except UserError:
                    # The next caller gets the same error.
                    del known[key]
                    raise
            if place == len(made):
                return
            yield made[place]

    return listed


def by_estimate(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates by rising estimate; equal estimates (``decisive``) keep their order."""
    return sorted(candidates, key=lambda c: decisive(c.estimated_s))


def fastest_in_trials(
    profile: Profile,
    candidates: Callable[[Profile], Iterable[Candidate]],
    make_program: MakeProgram,
    num_trials: int,
    others: Sequence[Callable[[Profile], Iterable[Candidate]]] = (),
) -> Layout:
    """Return the layout that runs one profiled batch fastest, among the best candidates that fit memory.

    ``candidates`` come by rising estimate. Every microbatch size and each of ``others`` (other estimates) gets as many
    of the ``num_trials`` as another. ``UserError`` says why there is no candidate, or none fits.
    """
    each_size = _each_size(profile, (candidates, *others))
    num_trials = num_trials if num_trials == 1 else num_trials * (1 + len(others))
    refused: list[UserError] = []
    if num_trials == 1:
        rising = merge(*each_size, key=lambda c: decisive(c.estimated_s))
        fitting = _recomputing(profile, iter(rising), make_program, refused)
    else:
        fitting = _by_trial(profile, each_size, make_program, num_trials, refused)
    for candidate in fitting:
        return candidate.layout
    raise refused[-1]


def _recomputing(
    profile: Profile, rising: Iterator[Candidate], make_program: MakeProgram, refused: list[UserError]
) -> Iterator[Candidate]:
    """Yield the first candidate that fits memory; if better ones did not, the fastest of its degrees in a trial."""
    for first in islice(_fitting(profile, rising, make_program, refused), 1):
        if not refused:
            yield first
            return
        alike = (other for other in islice(rising, MAX_RECOMPUTING) if _degrees(other.layout) == _degrees(first.layout))
        offered = [first, *_fitting(profile, alike, make_program, refused)]
        if len(offered) > 1:
            batch = profile.samples.draw(profile.job.global_batch)
            seconds = [decisive(profile.trial_s(make_program(batch, candidate.layout))) for candidate in offered]
            first = offered[int(np.argmin(seconds))]
        yield first


def _degrees(layout: Layout) -> tuple[object, ...]:
    """Key shared by layouts that differ only in recomputation and in the layers of stages."""
    degrees = [(placed.tp, placed.cp, placed.pp, placed.dp, placed.sharding) for placed in layout.modules]
    return layout.num_microbatches, *degrees


def _by_trial(
    profile: Profile,
    each_size: list[Iterator[Candidate]],
    make_program: MakeProgram,
    num_trials: int,
    refused: list[UserError],
) -> Iterator[Candidate]:
    """Yield candidates that fit memory: the best estimates by trial time on one batch, then the next ones, by turns."""
    batch = profile.samples.draw(profile.job.global_batch)
    share = -(-num_trials // len(each_size))
    runnable = [_fitting(profile, some, make_program, refused, [batch]) for some in each_size]
    while tried := [
        (decisive(profile.trial_s(make_program(batch, candidate.layout))), candidate)
        for some in runnable
        for candidate in islice(some, share)
    ]:
        by_time = (tried[index][1] for index in np.argsort([seconds for seconds, _ in tried], kind="stable"))
        yield from _fitting(profile, by_time, make_program, refused)


def _each_size(profile: Profile, sets: Sequence[Callable[[Profile], Iterable[Candidate]]]) -> list[Iterator[Candidate]]:
    """Return the candidates of every set and microbatch size; raise the first problem if there is no candidate."""
    streams: list[Iterator[Candidate]] = []
    problems: list[UserError] = []
    for candidates, sized in product(sets, profile.each_microbatch_size()):
        try:
            rising = iter(candidates(sized))
            streams += [chain([first], rising) for first in islice(rising, 1)]
        except UserError as error:
            problems.append(error)
    if not streams:
        raise [*problems, too_few_layers(profile.job)][0]
    return streams


def too_few_layers(job: Job) -> UserError:
    """The error for a job for which a planner has no candidate, and no other reason."""
    return UserError(f"layout: model={job.model.name} has too few layers for the stages of a replica. Lower layout.pp")


def _fitting(
    profile: Profile,
    candidates: Iterable[Candidate],
    make_program: MakeProgram,
    refused: list[UserError],
    batches: Sequence[SampleShapes] | None = None,
) -> Iterator[Candidate]:
    """Yield candidates whose programs fit memory; append the errors of the others to ``refused``."""
    for candidate in candidates:
        try:
            check_memory(profile, candidate.layout, make_program, batches)
        except UserError as error:
            # Its frames would keep a program each.
            refused.append(error.with_traceback(None))
        else:
            yield candidate
