"""One tuner for every strategy: it walks the knobs that a job leaves free and simulates the most promising candidates.

A planner answers for fixed knobs with its best estimates. The tuner keeps the best estimates of every value of every
knob, so that estimates that err between values drop none, and halves the candidates successively on batches that are
the same for all strategies. Its budget counts simulated batches, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice, product

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Remembered, check_memory, fastest_in_trials, heaviest
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.planning import average_layer_s, recompute_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import DEFAULT_DEGREES, DEFAULT_MICROBATCH_SIZE, MAX_SAMPLES, Job
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

type Candidates = Callable[[Profile], Iterable[Candidate]]
"""A planner's candidates for a job, by rising estimate."""

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
# Fixed jobs (degrees and microbatch sizes) that a planner is asked about, at most.
MAX_JOBS = 64
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
    return np.argsort(decisive(relative.sum(axis=1)), kind="stable").tolist()


def _middles(order: Sequence[int], strata: int) -> list[int]:
    return [order[(2 * stratum + 1) * len(order) // (2 * strata)] for stratum in range(strata)]


@dataclass(frozen=True, slots=True)
class Offer:
    """What is considered at an estimate, with the values of its knobs."""

    estimated_s: float
    knobs: tuple[object, ...]
    layout: Layout | None = None
    job: Job | None = None


def by_turns(offers: Sequence[Offer]) -> Iterator[Offer]:
    """Every offer once: by turns the best that is left of all and of every value of every knob.

    Values take their turns by rising best estimate; equal estimates go by index.
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
            index = next((index for index in indices if index not in taken), None)
            if index is not None:
                taken.add(index)
                left.append(indices)
                yield offers[index]
        waiting = left


@dataclass(frozen=True, slots=True)
class _Makers:
    """Full and quick programs of a strategy, the last of each remembered; a ``MakeProgram``."""

    full: Remembered
    draft: MakeProgram

    def __call__(self, shapes: SampleShapes, layout: Layout) -> object:
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
        make: MakeProgram = self._makers.draft if draft else self._makers.full
        quick = make is not self._makers.full
        key = (*content_of(layout), index, quick)
        if key not in self._known:
            shapes = self.batches.drawn[index]
            try:
                check_memory(self.profile, layout, self._makers if quick else make, [shapes])
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


def halved(trials: Trials, offers: Sequence[Offer], budget: int, entered: Sequence[Layout] = ()) -> list[Layout]:
    """The finalists of successive halving, the fastest first.

    Args:
        trials: simulates.
        offers: candidates.
        budget: simulated batches, for ``entered`` as well.
        entered: layouts that are in the last round in any case, before others that are as fast.
    """
    count = max(1, budget // trials.weight)
    first, others = trials.batches.drafts[0], trials.batches.drafts[1:]
    drafted: list[tuple[float, Offer]] = []
    turns = by_turns(offers)
    num_drafts, tried, least_s = max(1, int(count * DRAFTS)), 0, np.inf
    for offer in turns:
        # Estimates of candidates that cannot run say nothing.
        if decisive(offer.estimated_s) > decisive(FAR * least_s):
            continue
        tried += 1
        seconds = trials.seconds(_layout(offer), first, draft=True)
        if seconds is not None:
            drafted.append((seconds, offer))
            least_s = min(least_s, offer.estimated_s)
        if len(drafted) >= num_drafts or (drafted and tried >= MAX_REFUSED * num_drafts):
            break
    drafted.sort(key=lambda each: each[0])
    second = drafted[: int(count * SECOND)] if others else []
    timed = [(trials.mean_s(_layout(offer), (first, *others), draft=True), offer) for _, offer in second]
    ranked = sorted(((seconds, offer) for seconds, offer in timed if seconds is not None), key=lambda each: each[0])
    finalists = list(islice((_layout(o) for _, o in ranked if trials.fits(_layout(o))), max(1, int(count * LAST))))
    if not finalists:
        rest = (offer for offer in (*(offer for _, offer in drafted[len(second) :]), *turns))
        finalists = list(islice((_layout(offer) for offer in rest if trials.fits(_layout(offer))), 1))
    finalists = [*{content_of(layout): layout for layout in (*entered, *finalists)}.values()]
    if len(finalists) < 2:
        return finalists
    last = [(trials.mean_s(layout, trials.batches.last, draft=False), layout) for layout in finalists]
    return [layout for _, layout in sorted(((s, own) for s, own in last if s is not None), key=lambda each: each[0])]


def _layout(offer: Offer) -> Layout:
    assert offer.layout is not None
    return offer.layout


def default_job(job: Job) -> Job | None:
    """The job with default degrees and size for what it leaves free; None if nothing is free, or no layout has them."""
    free = {name: value for name, value in DEFAULT_DEGREES.items() if getattr(job.request, name) is None}
    if not free and not job.free_microbatch_size:
        return None
    fixed = replace(job, request=replace(job.request, **free))
    if job.free_microbatch_size:
        fixed = fixed.with_microbatch_size(DEFAULT_MICROBATCH_SIZE)
    try:
        next(fixed.degrees())
    except UserError:
        return None
    return fixed


def fixed_jobs(profile: Profile, samples: SampleShapes) -> list[Job]:
    """The jobs with TP, CP, DP and microbatch size fixed that are worth asking about, all if they are few.

    They are rated, the same for all strategies, by the time of a 1F1B pipeline that is perfectly balanced, and of the
    longest units besides, which a pipeline waits for. Of every value the best are kept, then the best of all,
    ``MAX_JOBS`` together.
    """
    offers = []

    @cache
    def longest_s(tp: int, cp: int) -> float:
        seconds = 0.0
        for module in profile.job.model.modules:
            length = module.lengths(samples, module.units(samples)).max(initial=0)
            if length:
                times = profile.measure(module, np.array([length]), tp, cp)
                seconds += float(np.array([float(kind.total_s[0]) for kind in times])[module.layer_kind].sum())
        return seconds

    for each in profile.each_microbatch_size():
        try:
            degrees = [*each.job.degrees()]
        except UserError:
            continue
        known: dict[tuple[int, int], float] = {}
        for one in degrees:
            width = (one.tp, one.cp)
            if width not in known:
                known[width] = sum(float(layer_s.sum()) for layer_s in average_layer_s(each, samples, *width))
            count = each.job.num_microbatches(one.dp)
            rating_s = (count + one.pp - 1) / one.pp * known[width] + longest_s(*width)
            request = replace(each.job.request, tp=one.tp, cp=one.cp, dp=one.dp)
            knobs = (one.tp, one.cp, one.pp, one.dp, each.job.microbatch_size)
            offers.append(Offer(rating_s, knobs, job=replace(each.job, request=request)))
    if not offers:
        # No homogeneous degrees: what planners with others know to do with the job as it is.
        return [each.job for each in profile.each_microbatch_size()]
    limit_s = decisive(FAR * min(offer.estimated_s for offer in offers))
    near = [offer for offer in offers if decisive(offer.estimated_s) <= limit_s]
    return [offer.job for offer in islice(by_turns(near), MAX_JOBS) if offer.job is not None]


def recomputing(job: Job, *, chosen_later: bool) -> list[Job]:
    """The job with every choice of modules that recompute, where that is free."""
    if job.request.recompute is not None or chosen_later:
        return [job]
    names = [module.name for module in job.model.modules]
    return [
        replace(job, request=replace(job.request, recompute=tuple(n for n, a in zip(names, again, strict=True) if a)))
        for again in recompute_choices(job)
    ]


def knobs_of(layout: Layout, llm_index: int, kind: int) -> tuple[object, ...]:
    """Values of a layout's knobs: of the LLM, of the modules beside it, and which set it is of."""
    llm = layout.modules[llm_index]
    others = [module for index, module in enumerate(layout.modules) if index != llm_index]
    return (
        llm.tp,
        llm.cp,
        llm.pp,
        llm.dp,
        llm.dp * layout.num_microbatches,
        tuple(module.recompute for module in layout.modules),
        tuple((module.tp, module.cp) for module in others),
        tuple(module.pp for module in others),
        kind,
    )


def asked(
    profile: Profile, jobs: Sequence[Job], sets: Sequence[Candidates], each_most: int, refused: list[UserError]
) -> list[Offer]:
    """What a planner offers for some fixed jobs: the best ``each_most`` estimates of each set and job, no two alike."""
    offers: dict[tuple[object, ...], Offer] = {}
    llm = profile.job.model.llm_index
    for (kind, candidates), job in product(enumerate(sets), jobs):
        try:
            for candidate in islice(candidates(profile.for_job(job)), each_most):
                offer = Offer(candidate.estimated_s, knobs_of(candidate.layout, llm, kind), candidate.layout)
                offers.setdefault(content_of(candidate.layout), offer)
        except UserError as error:
            refused.append(error.with_traceback(None))
    return [*offers.values()]


def tuned(profile: Profile, sets: Sequence[Candidates], make_program: MakeProgram, budget: int) -> Layout:
    """The layout that runs the tuning batches fastest among what a planner offers for the free knobs of a job.

    The job with default values for its free knobs is tuned first, with the whole budget; its winner takes part in the
    last round of the job as given, which has the budget once more. So a free knob costs nothing on these batches.

    Args:
        profile: of the job as given.
        sets: the planner's sets of candidates, whose estimates need not compare.
        make_program: the strategy's programs.
        budget: simulated batches.

    Raises:
        UserError: why there is no candidate, or none fits.
    """
    trials = Trials(profile, make_program, tuning_batches(profile))
    chosen_later = bool(getattr(make_program, "choose_recomputation", False))
    samples = trials.batches.drawn[trials.batches.drafts[0]]
    most = max(2, int(budget * DRAFTS))
    entered: list[Layout] = []
    fixed, problems = default_job(profile.job), list[UserError]()
    rounds = [[fixed]] if fixed else []
    for jobs in (*rounds, fixed_jobs(profile, samples)):
        each = [one for job in jobs for one in recomputing(job, chosen_later=chosen_later)]
        offers = asked(profile, each, sets, max(2, most // len(each)), problems)
        entered = halved(trials, offers, budget, entered[:1]) or entered
    if entered:
        return entered[0]
    name = profile.job.model.name
    nothing = UserError(f"layout: model={name} has too few layers for the stages of a replica")
    raise (trials.refused[-1:] or problems[:1] or [nothing])[0]


def chosen_layout(
    profile: Profile,
    candidates: Candidates,
    make_program: MakeProgram,
    num_trials: int,
    others: Sequence[Candidates] = (),
    quick: Candidates | None = None,
) -> Layout:
    """The layout of a planner, chosen as ``tuning`` says: by the tuner, or by the planner's own trials.

    Args:
        profile: of the job as given.
        candidates: by rising estimate, for a profile whose job has a microbatch size.
        make_program: the strategy's programs.
        num_trials: of the planner's own (``fastest_in_trials``).
        others: further sets, whose estimates do not compare with the first's.
        quick: candidates for the tuner, by estimates without simulated batches; None: the same.

    Raises:
        UserError: why there is no candidate, or none fits.
    """
    if profile.tuning_budget is None:
        return fastest_in_trials(profile, candidates, make_program, num_trials, others)
    return tuned(profile, (quick or candidates, *others), make_program, profile.tuning_budget)
