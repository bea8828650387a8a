"""Successive halving of candidate layouts on batches that are the same for all strategies; simulations are counted."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np

from entrain_bench.balancing.candidates import Remembered, check_memory, heaviest
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import UserError
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import MAX_SAMPLES
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# Batches drawn; fewer if they are so large that samples abound.
NUM_BATCHES = 24
MAX_DRAWN = 65_536
# Strata of the drawn batches, of each of which the middle batch is simulated: for drafts, and in the last round.
DRAFT_STRATA = 3
LAST_STRATA = 4
# Samples of a batch that counts as one simulated batch; larger ones count as several.
COUNTED_SAMPLES = 8192
# Shares of the budget: drafts on one batch; candidates with further draft batches; candidates in the last round.
DRAFTS, SECOND, LAST = 1 / 2, 1 / 8, 1 / 16
# Estimates at most so many times the least are considered.
FAR = 3.0
# Candidates that are tried for each draft, should most exceed memory.
MAX_REFUSED = 4


@dataclass(frozen=True, slots=True)
class TuningBatches:
    """The batches that decide, the same for all candidates and strategies.

    Attributes:
        drawn: all batches.
        drafts: the middle batch of each of ``DRAFT_STRATA``, the middle stratum first.
        last: the middle batch of each of ``LAST_STRATA``.
    """

    drawn: tuple[SampleShapes, ...]
    drafts: tuple[int, ...]
    last: tuple[int, ...]


def tuning_batches(profile: Profile) -> TuningBatches:
    """Draw batches from the profile's tuning stream and sort them into strata by their longest units."""
    size = profile.job.global_batch
    count = max(1, min(NUM_BATCHES, MAX_DRAWN // size, MAX_SAMPLES // size))
    drawn = profile.tuning_batches(count)
    order = _by_longest_unit(drawn, profile.job.model)
    low, middle, *high = _middles(order, DRAFT_STRATA)
    return TuningBatches(drawn, tuple(dict.fromkeys((middle, low, *high))), tuple(_middles(order, LAST_STRATA)))


def _by_longest_unit(batches: Sequence[SampleShapes], model: ModelSpec) -> list[int]:
    """Batches by rising length of their longest units, relative to the mean batch, summed over modules."""
    longest = np.array(
        [[module.lengths(each, module.units(each)).max(initial=0) for module in model.modules] for each in batches],
        np.float64,
    )
    relative = longest / np.maximum(longest.mean(axis=0), 1.0)
    return [int(index) for index in np.argsort(decisive(relative.sum(axis=1)), kind="stable")]


def _middles(order: Sequence[int], strata: int) -> list[int]:
    return [order[(2 * stratum + 1) * len(order) // (2 * strata)] for stratum in range(strata)]


@dataclass(frozen=True, slots=True)
class Offer[What]:
    """What is considered at an estimate, with the values of its knobs."""

    estimated_s: float
    knobs: tuple[object, ...]
    what: What


def _always(_: object) -> bool:
    return True


def by_turns[What](
    offers: Sequence[Offer[What]], runs: Callable[[Offer[What]], bool] = _always
) -> Iterator[Offer[What]]:
    """Offers that run, each once: by turns the best that is left of all and of every value of every knob.

    Values take their turns by rising best estimate; equal estimates go by index. An offer that does not run costs its
    value no turn: the best estimates of a value often are those that exceed memory.

    Args:
        offers: in any order.
        runs: whether an offer can be taken; asked once of each until the caller stops.
    """
    rising = sorted(range(len(offers)), key=lambda index: decisive(offers[index].estimated_s))
    values: dict[object, list[int]] = {}
    for index in rising:
        for value in (None, *enumerate(offers[index].knobs)):
            values.setdefault(value, []).append(index)
    waiting = [iter(indices) for indices in values.values()]
    taken: set[int] = set()
    while waiting:
        left = []
        for indices in waiting:
            for index in indices:
                if index not in taken:
                    taken.add(index)
                    if runs(offers[index]):
                        left.append(indices)
                        yield offers[index]
                        break
        waiting = left


@dataclass(frozen=True, slots=True)
class _Makers:
    """Full and quick programs of a strategy, the last of each remembered; a ``MakeProgram``."""

    full: Remembered
    draft: Remembered

    def __call__(self, shapes: SampleShapes, layout: Layout) -> Program:
        return self.full(shapes, layout)


@dataclass
class Trials:
    """Simulations of candidates on the tuning batches; each is counted once.

    Attributes:
        profile: what the strategy knows, for the job as it was given.
        simulated: simulated batches so far.
        refused: why candidates cannot run.
    """

    profile: Profile
    make_program: MakeProgram
    batches: TuningBatches
    simulated: int = 0
    refused: list[UserError] = field(default_factory=list)
    _known: dict[tuple[object, ...], float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        full = Remembered(self.make_program)
        own: MakeProgram = getattr(self.make_program, "draft", self.make_program)
        self._makers = _Makers(full, full if own is self.make_program else Remembered(own))

    @cached_property
    def weight(self) -> int:
        """Simulated batches that one batch of the job counts as."""
        return -(-self.profile.job.global_batch // COUNTED_SAMPLES)

    def seconds(self, layout: Layout, index: int, *, draft: bool) -> float | None:
        """Measured iteration time of a candidate on a batch; None if it cannot run there or exceeds memory.

        Args:
            layout: the candidate.
            index: of the batch.
            draft: whether the scheduler's quick programs do.
        """
        make = self._makers.draft if draft else self._makers.full
        quick = make is not self._makers.full
        key = (*content_of(layout), index, quick)
        if key not in self._known:
            shapes = self.batches.drawn[index]
            try:
                checked: MakeProgram = self._makers if quick else make
                check_memory(self.profile, layout, checked, [shapes])
                self._known[key] = decisive(self.profile.trial_s(make(shapes, layout)))
                self.simulated += self.weight
            except UserError as error:
                # Its frames would keep a program each.
                self.refused.append(error.with_traceback(None))
                self._known[key] = None
        return self._known[key]

    def mean_s(self, layout: Layout, indices: Sequence[int], *, draft: bool) -> float | None:
        """Mean of ``seconds`` over batches; None if one of them is."""
        found = []
        for index in indices:
            seconds = self.seconds(layout, index, draft=draft)
            if seconds is None:
                return None
            found.append(seconds)
        return decisive(sum(found) / len(found))

    def fits(self, layout: Layout) -> bool:
        """Whether a candidate fits memory on the heaviest of all batches."""
        job = self.profile.under(layout).job
        try:
            chosen = [self.batches.drawn[index] for index in heaviest(self.batches.drawn, job)]
            check_memory(self.profile, layout, self._makers, chosen)
        except UserError as error:
            self.refused.append(error.with_traceback(None))
            return False
        return True


def content_of(layout: Layout) -> tuple[object, ...]:
    """What candidates differ in."""
    return layout.content, layout.num_microbatches, layout.split_backward


def nearest[What](offers: Sequence[Offer[What]], to: Offer[What]) -> int:
    """The offer that differs from another in the fewest knobs; of several the one with the least estimate."""
    return min(
        range(len(offers)),
        key=lambda index: (
            sum(one != other for one, other in zip(offers[index].knobs, to.knobs, strict=True)),
            decisive(offers[index].estimated_s),
        ),
    )


def _drafted(
    trials: Trials, offers: Sequence[Offer[Layout]], num_drafts: int
) -> tuple[list[tuple[float, Offer[Layout]]], list[Offer[Layout]]]:
    """Drafts that run, the fastest first, and what was not tried.

    Half of them are taken by turns; the others are nearest to the fastest so far, each in turn. Of each half at most
    ``MAX_REFUSED`` times as many are tried, until one runs.
    """
    drafted: list[tuple[float, Offer[Layout]]] = []
    tried: set[int] = set()
    far: set[int] = set()

    def runs(offer: Offer[Layout]) -> bool:
        # Estimates of candidates that cannot run say nothing.
        least_s = min((each.estimated_s for _, each in drafted), default=np.inf)
        if decisive(offer.estimated_s) > decisive(FAR * least_s):
            far.add(id(offer))
            return False
        tried.add(id(offer))
        seconds = trials.seconds(offer.what, trials.batches.drafts[0], draft=True)
        if seconds is not None:
            insort(drafted, (seconds, offer), key=lambda each: each[0])
        return seconds is not None or is_over()

    def is_over() -> bool:
        return bool(drafted) and (len(drafted) >= most or len(tried) >= MAX_REFUSED * most)

    most = -(-num_drafts // 2)
    next((None for _ in by_turns(offers, runs) if is_over()), None)
    most = num_drafts
    waiting = [offer for offer in offers if id(offer) not in tried | far]
    while waiting and drafted and not is_over():
        runs(waiting.pop(nearest(waiting, drafted[0][1])))
    return drafted, [offer for offer in offers if id(offer) not in tried]


def halved(
    trials: Trials, offers: Sequence[Offer[Layout]], budget: int, entered: Sequence[Layout] = ()
) -> list[Layout]:
    """The finalists of successive halving, the fastest first.

    Args:
        trials: simulates.
        offers: candidates.
        budget: simulated batches, for ``entered`` as well.
        entered: layouts that are in the last round in any case, before others that are as fast.
    """
    count = max(1, budget // trials.weight)
    first, others = trials.batches.drafts[0], trials.batches.drafts[1:]
    drafted, untried = _drafted(trials, offers, max(1, int(count * DRAFTS)))
    second = drafted[: int(count * SECOND)] if others else []
    most = max(1, int(count * LAST) - len(entered))
    timed = [(trials.mean_s(offer.what, (first, *others), draft=True), offer) for _, offer in second]
    ranked = sorted(((seconds, offer) for seconds, offer in timed if seconds is not None), key=lambda each: each[0])
    finalists = list(islice((o.what for _, o in ranked if trials.fits(o.what)), most))
    if not finalists:
        rest = (offer for offer in (*(offer for _, offer in drafted[len(second) :]), *by_turns(untried)))
        finalists = list(islice((offer.what for offer in rest if trials.fits(offer.what)), 1))
    finalists = [*{content_of(layout): layout for layout in (*entered, *finalists)}.values()]
    if len(finalists) < 2:
        return finalists
    last = [(trials.mean_s(layout, trials.batches.last, draft=False), layout) for layout in finalists]
    return [layout for _, layout in sorted(((s, own) for s, own in last if s is not None), key=lambda each: each[0])]
