"""One tuner for every strategy: it simulates the most promising candidates of the knobs that a job leaves free."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, product

import numpy as np

from entrain_bench.balancing.candidates import (
    ENOUGH,
    Candidate,
    check_memory,
    fastest_in_trials,
    heaviest,
    list_knobs,
    listed_once,
    too_few_layers,
)
from entrain_bench.balancing.fixed_jobs import FAR, by_turns, default_job, fixed_jobs, holds_states, recomputing
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.variants import Variant
from entrain_bench.base.arithmetic import decisive, log2
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import OutOfMemoryError, UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import MAX_SAMPLES, Job
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# Rounds of the fit of an error for every value of every knob, and the simulations that weigh as much as no error.
ROUNDS = 6
PRIOR = 1.0


def knob_values(knobs: Sequence[tuple[object, ...]]) -> IntArray:
    """Return a number for the value of each knob; equal values have equal numbers ``[knobs, candidates]``."""
    columns = []
    for knob in zip(*knobs, strict=True):
        numbers: dict[object, int] = {}
        columns.append([numbers.setdefault(value, len(numbers)) for value in knob])
    return np.array(columns, np.int64).reshape(len(columns), len(knobs))


def corrected_octaves(
    octaves: FloatArray, knobs: IntArray, simulated: Sequence[int], seconds: Sequence[float]
) -> FloatArray:
    """Return log2 of estimates, corrected by a factor per value of each knob (ridge regression) ``[candidates]``."""
    left = log2(np.array(seconds)) - octaves[[*simulated]]
    left -= np.median(left)
    errors = [np.zeros(1 + int(values.max())) for values in knobs]
    for _ in range(ROUNDS):
        for knob, values in enumerate(knobs):
            simulated_values = values[[*simulated]]
            left += errors[knob][simulated_values]
            count = np.bincount(simulated_values, minlength=len(errors[knob]))
            errors[knob] = np.bincount(simulated_values, left, len(errors[knob])) / (count + PRIOR)
            left -= errors[knob][simulated_values]
    expected = octaves.copy()
    for knob, values in enumerate(knobs):
        expected += errors[knob][values]
    return decisive(expected)


# Batches drawn; fewer if they are so large that samples abound.
NUM_BATCHES = 24
MAX_DRAWN = 65_536
DRAFT_STRATA = 3  # strata of the drawn batches, of each of which the middle batch is simulated for drafts
COUNTED_SAMPLES = 8192  # samples of a batch that counts as one simulated batch; larger ones count as several
# Shares of the budget: drafts on one batch; candidates with further draft batches; the last round.
DRAFTS = 1 / 2
SECOND = 1 / 8
LAST = 1 / 4
# Candidates in the last round: few, so each gets many batches. With few batches, heavy tails hide the fastest.
FINALISTS = 3
# Shares of the budget where options are free: layouts with the strategy's own options; then of the rest, the options.
OWN_OPTIONS = 2 / 3
OPTIONS = 1 / 2
BY_TURNS = 1 / 3  # share of the drafts that are the best estimates of every value of every knob
MAX_REFUSED = 16  # candidates that are tried for each draft, should most exceed memory


@dataclass(frozen=True, slots=True)
class TuningBatches:
    """The batches that decide, the same for all candidates and strategies."""

    drawn: tuple[SampleShapes, ...]  # all batches
    drafts: tuple[int, ...]  # the middle batch of each of ``DRAFT_STRATA``, the middle stratum first
    others: tuple[int, ...]  # those that are not, by rising length of their longest units; the same if there are none

    def last(self, number: int) -> list[int]:
        """Return the middle batch of each stratum of the remaining batches, at least one."""
        return _middles(self.others, min(max(1, number), len(self.others)))


def tuning_batches(profile: Profile) -> TuningBatches:
    """Draw batches from the profile's tuning stream and sort them into strata by their longest units."""
    size = profile.job.global_batch
    count = max(1, min(NUM_BATCHES, MAX_DRAWN // size, MAX_SAMPLES // size))
    drawn = profile.samples.tuning_batches(count, size)
    order = _by_longest_unit(drawn, profile.job.model)
    low, middle, *high = _middles(order, DRAFT_STRATA)
    drafts = tuple(dict.fromkeys((middle, low, *high)))
    return TuningBatches(drawn, drafts, tuple(index for index in order if index not in drafts) or drafts)


def _by_longest_unit(batches: Sequence[SampleShapes], model: ModelSpec) -> list[int]:
    """Batches by rising length of their longest units, relative to the mean batch, summed over modules."""
    longest = np.array(
        [[module.lengths(batch, module.units(batch)).max(initial=0) for module in model.modules] for batch in batches]
    )
    relative = longest / np.maximum(longest.mean(axis=0), 1.0)
    return [*map(int, np.argsort(decisive(relative.sum(axis=1)), kind="stable"))]


def _middles(order: Sequence[int], strata: int) -> list[int]:
    return [order[(2 * stratum + 1) * len(order) // (2 * strata)] for stratum in range(strata)]


@dataclass
class Trials:
    """Simulations of candidates on the tuning batches; each is made once."""

    profile: Profile  # profile of the unmodified job
    make_program: MakeProgram
    batches: TuningBatches
    refused: list[UserError] = field(default_factory=list)  # why candidates cannot run
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)
    _full: dict[tuple[object, ...], FloatArray] = field(default_factory=dict)

    @property
    def num_simulated(self) -> int:
        """Simulated batches so far."""
        return len(self._known)

    def affordable(self, budget: float) -> int:
        """Simulated batches of a budget, of one at least; large batches count as several."""
        return max(1, int(budget) // -(-self.profile.job.global_batch // COUNTED_SAMPLES))

    def seconds(self, layout: Layout, index: int) -> float:
        """Measured seconds of a candidate on a batch, by quick programs if the scheduler has some; inf if it fails."""
        key = (*candidate_key(layout), index)
        if key not in self._known:
            shapes = self.batches.drawn[index]

            def run() -> float:
                check_memory(self.profile, layout, self.make_program, [shapes])
                return self.profile.trial_s(self.make_program.draft(shapes, layout))

            self._known[key] = self._tried(run)
        return self._known[key]

    def _tried(self, run: Callable[[], float]) -> float:
        try:
            return decisive(run())
        except UserError as error:
            # Its frames would keep a program each.
            self.refused.append(error.with_traceback(None))
            return np.inf

    def mean_s(self, layout: Layout, indices: Sequence[int]) -> float:
        """Mean of ``seconds`` over batches, up to the first that fails."""
        total_s = 0.0
        for index in indices:
            total_s += self.seconds(layout, index)
            if total_s == np.inf:
                break
        return decisive(total_s / len(indices))

    def gains(self, layout: Layout, over: Layout, indices: Sequence[int]) -> bool:
        """Whether a layout is faster than another by more than a standard error; with drafts also by full programs."""
        if self.drafts_alike(layout, over):
            return _is_ahead(self._full_s(over) - self._full_s(layout))
        if not _is_ahead(np.array([self.seconds(over, index) - self.seconds(layout, index) for index in indices])):
            return False
        return decisive(self._full_s(layout).sum()) < decisive(self._full_s(over).sum())

    def drafts_alike(self, one: Layout, other: Layout) -> bool:
        """Whether two layouts differ only in options that drafts ignore."""
        draft = self.make_program.draft
        same_layout = candidate_key(one)[:-1] == candidate_key(other)[:-1]
        return same_layout and draft is not self.make_program and draft.has_same_parts(one, other)

    def _full_s(self, layout: Layout) -> FloatArray:
        """Measured seconds of a candidate's full programs on the draft batches, inf where it fails ``[batches]``."""
        maker = self.make_program
        if maker.draft is maker:
            return np.array([self.seconds(layout, index) for index in self.batches.drafts])

        def seconds(index: int) -> float:
            return self._tried(lambda: self.profile.trial_s(maker(self.batches.drawn[index], layout)))

        key = candidate_key(layout)
        if key not in self._full:
            self._full[key] = np.array([seconds(index) for index in self.batches.drafts])
        return self._full[key]

    def fits(self, layout: Layout) -> bool:
        """Whether a layout fits memory on the heaviest batches, and on the others if these leave little."""
        job = self.profile.under(layout).job
        drawn = self.batches.drawn
        chosen = heaviest(drawn, job)

        def run() -> float:
            need = check_memory(self.profile, layout, self.make_program, [drawn[index] for index in chosen])
            if need <= ENOUGH * job.planning_budget_bytes or self.make_program.recomputes_under(layout):
                return need
            others = (batch for index, batch in enumerate(drawn) if index not in chosen)
            return check_memory(self.profile, layout, self.make_program, others)

        return self._tried(run) < np.inf


def _is_ahead(lead_s: FloatArray) -> bool:
    """Whether the mean of some leads is above its standard error."""
    error = float(np.std(lead_s, ddof=1)) / len(lead_s) ** 0.5 if len(lead_s) > 1 else 0.0
    return bool(decisive(float(lead_s.mean())) > decisive(error))


def candidate_key(layout: Layout) -> tuple[object, ...]:
    """Return the part of a candidate in which candidates differ."""
    return layout.content, layout.num_microbatches, layout.split_backward, layout.options


def _drafted(
    trials: Trials, offers: Sequence[Candidate], num_drafts: int
) -> tuple[list[tuple[float, Layout]], list[Layout]]:
    """Return drafts that run, fastest first, and untried candidates: a share in turn, then the fastest expected."""
    estimated_s = np.array([offer.estimated_s for offer in offers])
    knobs = [offer.knobs for offer in offers]
    drafted: list[tuple[float, int]] = []
    left = np.ones(len(offers), bool)

    def is_near(index: int) -> bool:
        # Estimates of candidates that cannot run say nothing.
        least_s = min((float(estimated_s[other]) for _, other in drafted), default=np.inf)
        return decisive(float(estimated_s[index])) <= decisive(FAR * least_s)

    def runs(index: int) -> bool:
        left[index] = False
        seconds = trials.seconds(offers[index].layout, trials.batches.drafts[0])
        if seconds < np.inf:
            insort(drafted, (seconds, index), key=lambda entry: entry[0])
        return seconds < np.inf or is_over()

    def is_over() -> bool:
        return bool(drafted) and (len(drafted) >= most or int(np.sum(~left)) >= MAX_REFUSED * most)

    most = max(1, int(num_drafts * BY_TURNS))
    turns = by_turns(estimated_s, knobs, lambda index: is_near(index) and runs(index))
    next((None for _ in turns if is_over()), None)
    most = num_drafts
    octaves = log2(np.maximum(estimated_s, 1e-12))
    numbers = knob_values(knobs)
    while left.any() and not is_over():
        seconds, simulated = zip(*drafted, strict=True)
        expected = corrected_octaves(octaves, numbers, simulated, seconds)
        runs(int(np.where(left, expected, np.inf).argmin()))
    rest = np.flatnonzero(left)
    untried = rest[[*by_turns(estimated_s[rest], [knobs[index] for index in rest])]]
    return [(seconds, offers[index].layout) for seconds, index in drafted], [offers[index].layout for index in untried]


def halved(trials: Trials, offers: Sequence[Candidate], budget: int, entered: Sequence[Layout] = ()) -> list[Layout]:
    """Return finalists of successive halving, fastest first; the first of ``entered`` leads unless one ``gains``."""
    count = trials.affordable(budget)
    batches = trials.batches
    drafted, untried = _drafted(trials, offers, max(1, int(count * DRAFTS)))
    if len(drafted) == 1 and not untried and not entered:
        return [drafted[0][1]] if trials.fits(drafted[0][1]) else []
    second = [layout for _, layout in drafted[: max(1, int(count * SECOND))]]
    ranked = sorted(second, key=lambda layout: trials.mean_s(layout, batches.drafts))
    last = batches.last(int(count * LAST) // FINALISTS)

    def finished(layouts: Iterable[Layout]) -> Iterator[tuple[float, Layout]]:
        for layout in layouts:
            if trials.fits(layout) and (seconds := trials.mean_s(layout, last)) < np.inf:
                yield seconds, layout

    known = {candidate_key(layout) for layout in entered}
    finalists = [*finished(entered)]
    draft_runs = (layout for layout in ranked if trials.mean_s(layout, batches.drafts) < np.inf)
    finalists += islice(finished(layout for layout in draft_runs if candidate_key(layout) not in known), FINALISTS)
    if len(finalists) <= len(entered):
        rest = chain((layout for _, layout in drafted[len(second) :]), () if finalists else untried)
        finalists += islice(finished(rest), 1)
    ranking = [layout for _, layout in sorted(finalists, key=lambda entry: entry[0])]
    stays = next((layout for layout in ranking[1:] if any(layout is other for other in entered)), None)
    return ranking if stays is None or trials.gains(ranking[0], stays, last) else [stays]


type Candidates = Callable[[Profile], Iterable[Candidate]]
"""A planner's candidates for a job, by rising estimate."""


def asked(
    profile: Profile,
    jobs: Sequence[Job],
    sets: Sequence[Candidates],
    each_most: int,
    refused: list[UserError],
    chosen_number: bool = False,
) -> list[Candidate]:
    """Return a planner's offers for fixed jobs: the ``each_most`` best layouts of each set and job, each once.

    With ``chosen_number``, layouts that differ in the number of microbatches are the same.
    """
    offers: dict[tuple[object, ...], Candidate] = {}
    llm = profile.job.model.llm_index
    for (kind, candidates), job in product(enumerate(sets), jobs):
        try:
            for candidate in islice(candidates(profile.for_job(job)), each_most):
                layout = candidate.layout
                if chosen_number:
                    layout = replace(layout, num_microbatches=1)
                offer = replace(candidate, layout=layout, knobs=list_knobs(layout, llm, kind))
                offers.setdefault(candidate_key(layout), offer)
        except UserError as error:
            refused.append(error.with_traceback(None))
    return [*offers.values()]


def walked(trials: Trials, leader: Layout, variants: Sequence[Variant], budget: float) -> Layout:
    """Return the plan after a walk along its variants, one key at a time: each value that ``gains`` and fits stays.

    A value that exceeds memory is tried with recomputation that the scheduler chooses. Rounds over all keys end when
    one changes nothing, or when the budget is spent.
    """
    most = trials.num_simulated + trials.affordable(budget)
    drafts = trials.batches.drafts
    last = trials.batches.last(trials.affordable(budget) // (2 * FINALISTS))
    begun = None
    while begun is not leader:
        begun = leader
        for variant in variants:
            changed = eased(trials, variant.of(leader), variants)
            if candidate_key(changed) == candidate_key(leader):
                continue
            if trials.num_simulated + len(drafts) + len(last) > most:
                return leader
            faster = trials.mean_s(changed, drafts) < trials.mean_s(leader, drafts)
            if (faster or trials.drafts_alike(changed, leader)) and trials.gains(changed, leader, last):
                leader = changed if trials.fits(changed) else leader
    return leader


def eased(trials: Trials, plan: Layout, variants: Sequence[Variant]) -> Layout:
    """Return a plan, or the first variant of it that lets the scheduler recompute if it exceeds memory otherwise."""
    recomputes = trials.make_program.recomputes_under
    before = len(trials.refused)
    trials.seconds(plan, trials.batches.drafts[0])
    if recomputes(plan) or not any(isinstance(error, OutOfMemoryError) for error in trials.refused[before:]):
        return plan
    return next(filter(recomputes, (variant.of(plan) for variant in variants)), plan)


def tuned(
    profile: Profile, sets: Sequence[Candidates], make_program: MakeProgram, budget: int, *, holds: bool = False
) -> Layout:
    """Return the layout that runs the tuning batches fastest, among a planner's offers for the free knobs of a job.

    The job with default knobs is tuned first; its winner enters the last round of the job as given. Free options are
    walked next, and layouts are tuned again with those chosen. ``holds``: for every job, states of a candidate fit
    memory at any degrees. ``UserError`` says why nothing fits.
    """
    trials = Trials(profile, make_program, tuning_batches(profile))
    sets = [*map(listed_once, sets)]
    fixed = default_job(profile.job)
    problems = list[UserError]()

    def fits(job: Job) -> bool:
        return holds or holds_states(profile, job, sets, chosen_later=make_program.chooses_recomputation)

    batch = trials.batches.drawn[trials.batches.drafts[0]]
    free = fixed_jobs(profile, batch, fits)
    variants = make_program.variants
    first = int(budget * OWN_OPTIONS) if variants else budget

    def offers(jobs: Sequence[Job], budget: int) -> list[Candidate]:
        each_most = max(2, int(budget * DRAFTS) // len(jobs))
        return asked(profile, jobs, sets, each_most, problems, make_program.chooses_microbatches)

    def tuned_once(jobs: Sequence[Job], entered: Sequence[Layout] = ()) -> list[Layout]:
        recomputed = [one for job in jobs for one in recomputing(job, chosen_later=make_program.chooses_recomputation)]
        return halved(trials, offers(recomputed, first), first, entered)

    entered: list[Layout] = []
    rounds = [[fixed], free] if fixed else [free]
    for jobs in rounds:
        entered = tuned_once(jobs, entered[:1]) or entered
    has_experts = profile.job.model.llm.config.experts is not None
    if not entered and has_experts and profile.job.free_microbatch_size:
        # States of experts leave little memory for activations, and estimates favor large microbatches.
        free = fixed_jobs(profile.for_job(profile.job.each_microbatch_size()[0]), batch, fits)
        entered = tuned_once(free)
    if not entered:
        raise why_nothing_fits(trials, sets, problems)
    rest = len(rounds) * (budget - first)
    leader = walked(trials, entered[0], variants, rest * OPTIONS)
    if leader is entered[0]:
        return leader
    again = int(rest * (1 - OPTIONS))
    # Planners see only the strategy's own options. If the scheduler chooses recomputation, they plan a job without it.
    sharded = make_program.sharded_as(profile.job, leader)
    if has_experts and sharded is not profile.job:
        # Shards hold experts at degrees at which whole ones exceed memory.
        jobs = fixed_jobs(profile.for_job(sharded), batch, fits)
    else:
        jobs = [make_program.sharded_as(job, leader) for job in free]
    recomputed = [one for job in jobs for one in recomputing(job, chosen_later=False)]
    if profile.job.request.recompute is None and make_program.recomputes_under(leader):
        recomputed = [job for job in recomputed if not job.request.recompute]
    changed = [replace(one, layout=replace(one.layout, options=leader.options)) for one in offers(recomputed, again)]
    return halved(trials, changed, again, [leader])[0]


def why_nothing_fits(trials: Trials, sets: Sequence[Candidates], problems: Sequence[UserError]) -> UserError:
    """Return the reason of the layout that was tried last; if none was offered, that of the given job.

    The job is asked about with the least microbatch size and most recomputation. ``problems``, with degrees that the
    tuner chose, come last.
    """
    job = trials.profile.job
    given = list[UserError]()
    if not trials.refused:
        least = recomputing(job.each_microbatch_size()[0], chosen_later=trials.make_program.chooses_recomputation)
        for offer in asked(trials.profile, least[-1:], sets, 1, given):
            trials.seconds(offer.layout, trials.batches.drafts[0])
    return [*trials.refused[-1:], *given, *problems, too_few_layers(job)][0]


def chosen_layout(
    profile: Profile,
    candidates: Candidates,
    make_program: MakeProgram,
    num_trials: int,
    others: Sequence[Candidates] = (),
    quick: Candidates | None = None,
) -> Layout:
    """Return the layout by the tuner (``quick`` candidates, if any) or, without a budget, by ``fastest_in_trials``."""
    if profile.tuning_budget is None:
        return fastest_in_trials(profile, candidates, make_program, num_trials, others)
    return tuned(profile, (quick or candidates, *others), make_program, profile.tuning_budget)
