"""One tuner for every strategy: it walks the knobs that a job leaves free and simulates the most promising candidates.

A planner answers for fixed knobs with its best estimates. The tuner keeps the best estimates of every value of every
knob, so that estimates that err between values drop none, and halves the candidates successively on batches that are
the same for all strategies. Its budget counts simulated batches, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice, product

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Remembered, fastest_in_trials
from entrain_bench.balancing.halving import DRAFTS, FAR, Offer, Trials, by_turns, candidate_key, halved, tuning_batches
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.planning import average_layer_s, recompute_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import DEFAULT_DEGREES, DEFAULT_MICROBATCH_SIZE, Job
from entrain_bench.specs.shapes import SampleShapes

type Candidates = Callable[[Profile], Iterable[Candidate]]
"""A planner's candidates for a job, by rising estimate."""

# Fixed jobs (degrees and microbatch sizes) that a planner is asked about, at most.
MAX_JOBS = 64


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


def fixed_jobs(profile: Profile, samples: SampleShapes) -> list[Job]:
    """Return the most promising jobs with fixed TP, CP, DP and microbatch size; all jobs if there are few.

    They are rated, the same for all strategies, by the time of a 1F1B pipeline that is perfectly balanced, and of the
    longest units besides, which a pipeline waits for. Of every value the best are kept, then the best of all,
    ``MAX_JOBS`` together.
    """
    offers: list[Offer[Job]] = []

    @cache
    def longest_s(tp: int, cp: int) -> float:
        seconds = 0.0
        for module in profile.job.model.modules:
            length = module.lengths(samples, module.units(samples)).max(initial=0)
            if length:
                seconds += float(profile.layers.layer_s(module, np.array([length]), tp, cp).sum())
        return seconds

    for sized in profile.each_microbatch_size():
        try:
            degrees = [*sized.job.degrees()]
        except UserError:
            continue
        known: dict[tuple[int, int], float] = {}
        for one in degrees:
            width = (one.tp, one.cp)
            if width not in known:
                known[width] = sum(float(layer_s.sum()) for layer_s in average_layer_s(sized, samples, *width))
            count = sized.job.num_microbatches(one.dp)
            rating_s = (count + one.pp - 1) / one.pp * known[width] + longest_s(*width)
            request = replace(sized.job.request, tp=one.tp, cp=one.cp, dp=one.dp)
            knobs = (one.tp, one.cp, one.pp, one.dp, sized.job.microbatch_size)
            offers.append(Offer(rating_s, knobs, replace(sized.job, request=request)))
    if not offers:
        # No homogeneous degrees: what planners with others know to do with the job as it is.
        return [sized.job for sized in profile.each_microbatch_size()]
    limit_s = decisive(FAR * min(offer.estimated_s for offer in offers))
    near = [offer for offer in offers if decisive(offer.estimated_s) <= limit_s]
    return [offer.what for offer in islice(by_turns(near), MAX_JOBS)]


def recomputing(job: Job, *, chosen_later: bool) -> list[Job]:
    """Return the job with every choice of recomputed modules, if the job leaves it free."""
    if job.request.recompute is not None or chosen_later:
        return [job]
    names = [module.name for module in job.model.modules]
    return [
        replace(job, request=replace(job.request, recompute=tuple(n for n, a in zip(names, again, strict=True) if a)))
        for again in recompute_choices(job)
    ]


def list_knobs(layout: Layout, llm_index: int, kind: int) -> tuple[object, ...]:
    """Return the values of a layout's knobs: those of the LLM, of the other modules, and the candidate set."""
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
) -> list[Offer[Layout]]:
    """Return a planner's offers for fixed jobs: the ``each_most`` best layouts of each set and job, each once."""
    offers: dict[tuple[object, ...], Offer[Layout]] = {}
    llm = profile.job.model.llm_index
    for (kind, candidates), job in product(enumerate(sets), jobs):
        try:
            for candidate in islice(candidates(profile.for_job(job)), each_most):
                offer = Offer(candidate.estimated_s, list_knobs(candidate.layout, llm, kind), candidate.layout)
                offers.setdefault(candidate_key(candidate.layout), offer)
        except UserError as error:
            refused.append(error.with_traceback(None))
    return [*offers.values()]


def tuned(profile: Profile, sets: Sequence[Candidates], make_program: MakeProgram, budget: int) -> Layout:
    """Return the layout that runs the tuning batches fastest, among a planner's offers for the free knobs of a job.

    The job with default values for its free knobs is tuned first, with the whole budget of simulated batches; its
    winner takes part in the last round of the job as given, which has the budget once more. So a free knob costs
    nothing on these batches. Estimates of different ``sets`` need not compare. ``UserError`` says why there is no
    candidate, or none fits.
    """
    trials = Trials(profile, Remembered(make_program), tuning_batches(profile))
    chosen_later = make_program.chooses_recomputation
    samples = trials.batches.drawn[trials.batches.drafts[0]]
    most = max(2, int(budget * DRAFTS))
    entered: list[Layout] = []
    fixed = default_job(profile.job)
    problems = list[UserError]()
    rounds = [[fixed]] if fixed else []
    for jobs in (*rounds, fixed_jobs(profile, samples)):
        variants = [one for job in jobs for one in recomputing(job, chosen_later=chosen_later)]
        offers = asked(profile, variants, sets, max(2, most // len(variants)), problems)
        entered = halved(trials, offers, budget, entered[:1]) or entered
    if entered:
        return entered[0]
    name = profile.job.model.name
    nothing = UserError(f"layout: model={name} has too few layers for the stages of a replica. Lower layout.pp")
    raise (trials.refused[-1:] or problems[:1] or [nothing])[0]


def chosen_layout(
    profile: Profile,
    candidates: Candidates,
    make_program: MakeProgram,
    num_trials: int,
    others: Sequence[Candidates] = (),
    quick: Candidates | None = None,
) -> Layout:
    """Return the layout of a planner: chosen by the tuner if there is a tuning budget, otherwise by own trials.

    Args:
        profile: of the job as given.
        candidates: by rising estimate, for a profile whose job has a microbatch size.
        make_program: the strategy's programs.
        num_trials: of the planner's own (``fastest_in_trials``, also for errors).
        others: further sets, whose estimates do not compare with the first's.
        quick: candidates for the tuner, by estimates without simulated batches; None: the same.
    """
    if profile.tuning_budget is None:
        return fastest_in_trials(profile, candidates, make_program, num_trials, others)
    return tuned(profile, (quick or candidates, *others), make_program, profile.tuning_budget)
