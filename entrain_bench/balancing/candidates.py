"""Candidates of planners: by estimate, those that fit memory, and the fastest of them on trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, merge
from itertools import chain, islice, product

import numpy as np

from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import OutOfMemoryError, UserError
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Job
from entrain_bench.specs.shapes import SampleShapes

# Batches profiled to check memory; fewer if they are so large that samples abound.
MEMORY_BATCHES = 16
MEMORY_SAMPLES = 65_536
# Candidates behind the first that fits memory, at most, among which others with its degrees are looked for.
MAX_RECOMPUTING = 4
# Share of the memory up to which the batches that decide are the only ones that are checked.
ENOUGH = 0.9


def heaviest(batches: Sequence[SampleShapes], job: Job) -> list[int]:
    """Return the indices of batches with a module's longest unit, most tokens, or most tokens in a microbatch.

    Microbatches count as samples arrive. Of equal batches the first; in order.
    """
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
    """Return the bytes that the neediest rank needs at most in programs of a layout; ``OutOfMemoryError`` if too many.

    All of some global batches are checked. Of ``MEMORY_BATCHES`` profiled ones, by default, those that decide are
    (``heaviest``), the others only if these leave little: a program takes as long to make as most of a plan. The
    executors charge the true need of every batch; ``Job.planning_budget_bytes`` leaves a margin for heavier batches.
    """
    job = profile.job
    memory = profile.memory
    draft = make_program.draft
    limit = job.planning_budget_bytes
    states = memory.lane_state_bytes(layout)
    alone = float(states.max()), "weights, gradients and optimizer states alone"
    need, what = alone

    def exceeds(batch: SampleShapes) -> bool:
        nonlocal need, what
        peak = memory.peak_bytes(draft(batch, layout))
        if draft is not make_program and peak.max() > limit:
            peak = memory.peak_bytes(make_program(batch, layout))
        if peak.max() > need:
            need = float(peak.max())
            what = f"with {states[peak.argmax()] / 2**30:.1f} GiB of states"
        return need > limit

    def profiled_exceed() -> bool:
        nonlocal need, what
        drawn = [profile.samples.draw(job.global_batch)]
        count = max(1, min(MEMORY_BATCHES, MEMORY_SAMPLES // job.global_batch))
        if exceeds(drawn[0]):
            return True
        places = [profile.samples.state]
        for _ in range(count - 1):
            drawn.append(profile.samples.draw(job.global_batch))
            places.append(profile.samples.state)
        deciding = [index for index in heaviest(drawn, job) if index]
        others = [index for index in range(1, count) if index not in deciding]
        # One by one, each only if those before it fit.
        exceeding = chain(
            (exceeds(drawn[index]) for index in deciding),
            (exceeds(drawn[index]) for index in others if need > ENOUGH * limit),
        )
        try:
            if not any(exceeding):
                return False
        except UserError:
            pass
        # The next layout is checked on the batches after the first that refuses this one.
        need, what = alone
        for batch, place in zip(drawn, places, strict=True):
            profile.samples.restore(place)
            if exceeds(batch):
                break
        return True

    if need <= limit:
        _ = profiled_exceed() if batches is None else any(map(exceeds, batches))
    if need > limit:
        described = "; ".join(f"{name} {text}" for name, text in layout.describe().items())
        raise OutOfMemoryError(
            f"layout {described}: a rank needs {need / 2**30:.1f} GiB ({what}), {(need - limit) / 2**30:.1f} GiB more "
            f"than planners may use of the budget of {job.memory_budget_bytes / 2**30:.1f} GiB"
        )
    return need


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that a planner considers."""

    estimated_s: float  # the planner's estimate of the iteration time
    layout: Layout


@dataclass(frozen=True, slots=True)
class Draft:
    """A candidate that is not placed on ranks yet. Placing takes long on many ranks."""

    least_s: float  # what its estimate cannot fall below
    place: Callable[[], Candidate | Draft]  # makes the candidate, or a draft of which more is known


def rising_candidates(drafts: Iterable[Draft], most_s: float = np.inf) -> Iterator[Candidate]:
    """Yield the drafts' candidates by rising estimate up to ``most_s``; place a draft only when it is next."""
    queue: list[tuple[float, int, Draft | Candidate]] = [
        (decisive(draft.least_s), number, draft) for number, draft in enumerate(drafts)
    ]
    heapify(queue)
    while queue and queue[0][0] <= decisive(most_s):
        _, number, entry = heappop(queue)
        if isinstance(entry, Candidate):
            yield entry
        else:
            placed = entry.place()
            seconds = placed.estimated_s if isinstance(placed, Candidate) else placed.least_s
            heappush(queue, (decisive(seconds), number, placed))


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

    ``candidates`` come by rising estimate, for a profile whose job has a microbatch size. Where that is free, every
    size gets as many trials as another, for estimates that are linear in the samples do not tell sizes apart; so does
    each of ``others``, further sets whose estimates do not compare with the first's. ``num_trials`` counts layouts, of
    all sizes together; one is the best estimate, taken without trial. If memory refuses better estimates, the layouts
    that follow and differ in recomputation alone have a trial, too (``_recomputing``).

    Raises:
        UserError: why there is no candidate, or none fits.
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


class Remembered:
    """A ``MakeProgram`` that remembers its last program, so that a trial runs the program that was checked."""

    def __init__(self, make: MakeProgram) -> None:
        self._make = make
        self._last: tuple[SampleShapes, Layout, Program] | None = None

    def __call__(self, shapes: SampleShapes, layout: Layout) -> Program:
        """Return the program of a batch."""
        if self._last is None or self._last[0] is not shapes or self._last[1] is not layout:
            self._last = shapes, layout, self._make(shapes, layout)
        return self._last[2]

    @cached_property
    def draft(self) -> Remembered:
        """The draft of the maker, remembered; this object if it has no quicker draft."""
        draft = self._make.draft
        return self if draft is self._make else Remembered(draft)

    @property
    def chooses_recomputation(self) -> bool:
        """Whether the maker chooses recomputation."""
        return self._make.chooses_recomputation


def _recomputing(
    profile: Profile, rising: Iterator[Candidate], make_program: MakeProgram, refused: list[UserError]
) -> Iterator[Candidate]:
    """Yield the first candidate that fits memory, or a later one that recomputes differently and runs a batch faster.

    Estimates look at the slowest stage and do not tell which recomputation costs least. A batch that is a percent
    heavier decides whether memory refuses the best estimate; it must not decide between 6 s and 7 s.
    """
    for first in _fitting(profile, rising, make_program, refused):
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
        return


def _degrees(layout: Layout) -> tuple[object, ...]:
    """Key shared by layouts that differ only in recomputation and in the layers of stages."""
    return layout.num_microbatches, tuple(
        (placed.tp, placed.cp, placed.pp, placed.dp, placed.sharded) for placed in layout.modules
    )


def _by_trial(
    profile: Profile,
    each_size: list[Iterator[Candidate]],
    make_program: MakeProgram,
    num_trials: int,
    refused: list[UserError],
) -> Iterator[Candidate]:
    """Yield candidates that fit memory: the best estimates by trial time, then the next estimates by trial time.

    What is tried fits on the batch it is tried on; only the fastest is checked on more.
    """
    batch = profile.samples.draw(profile.job.global_batch)
    make_program = Remembered(make_program)
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
    problem: UserError | None = None
    for candidates, sized in product(sets, profile.each_microbatch_size()):
        try:
            rising = iter(candidates(sized))
            streams += [chain([first], rising) for first in islice(rising, 1)]
        except UserError as error:
            problem = problem or error
    if not streams:
        name = profile.job.model.name
        raise problem or UserError(
            f"layout: model={name} has too few layers for the stages of a replica. Lower layout.pp"
        )
    return streams


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
