"""Changes of a comparison that a reviewer would try, and their outcome: ``experiments/terms.yaml``.

Random values of options run on the layout that the tuner chose for the strategy's own values, so they differ only in
assigner and scheduler. The tuner itself varies options of planners.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from random import Random
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import yaml

from entrain_bench.answers.text import markdown_table
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.config.targets import TARGET, class_of
from entrain_bench.config.tree import config_tree
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan, plan_text
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import plan_key
from entrain_bench.records.sealed import CachedLayouts
from entrain_bench.run.cells import Done, run_cells
from entrain_bench.run.study import Study, SweepOverrides
from entrain_bench.specs.parse import OneOf, Share, parse

PARTS = ("assigner", "scheduler")
FACTORS = (0.25, 0.5, 2.0, 4.0)
FROM_ZERO = (0, 1, 2, 8)
# Number of draws of a value before it keeps its usual one.
TRIES = 8
# A lead within this share is a tie, because the model's error may exceed it (our choice).
TIE = 0.01
# Changed jobs run only strategies within this factor of the fastest: slower ones would not lead.
CONTENDERS = 1.3


class Verdict(StrEnum):
    """Whether the lead of a job survives a try."""

    SURVIVES = "survives"
    TIED = "tied"  # another leads by no more than ``TIE``
    LOST = "lost"
    UNDECIDED = "undecided"  # one side has no result


@dataclass(frozen=True, slots=True)
class Terms:
    """Everything that is tried: overrides of every run, of jobs by label, and of changes of the job by label."""

    common: tuple[str, ...]
    jobs: Mapping[str, Any]
    changes: Mapping[str, Any]
    budget: tuple[str, ...]
    strategies: str = "glob(*)"
    lpt: str = "lpt"
    draws: int = 20
    tolerance: Share = 0.02
    leaders: int = 2


@dataclass(frozen=True, slots=True)
class Try:
    """A try on a job: the fastest strategy before and after it."""

    name: str
    job: str
    before: str
    after: str
    verdict: Verdict
    lead: float | None = None  # time of the runner-up over the first leader's, minus 1


@dataclass(frozen=True, slots=True)
class Gain:
    """Random values of options with which a strategy is faster than with its own."""

    job: str
    strategy: str
    options: SweepOverrides
    gain: float


@dataclass(slots=True)
class Outcome:
    """All tries, gains above the tolerance, and how many random values ran and failed."""

    tries: list[Try] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    num_ran: int = 0
    num_failed: int = 0


def read_terms(path: Path | None = None) -> Terms:
    """The definition; ``UserError`` for a key that it lacks or does not have."""
    return parse(Terms, yaml.safe_load((path or config_tree() / "terms.yaml").read_text()), "terms.yaml")


def drawn_options(strategy: Mapping[str, Any], random: Random) -> SweepOverrides:
    """Overrides of random values of some options of assigner and scheduler, as their types allow; maybe none."""
    drawn = []
    for part in PARTS:
        node = strategy[part]
        hints = get_type_hints(class_of(node[TARGET]), include_extras=True)
        for name, usual in node.items():
            if name == TARGET or isinstance(usual, Mapping) or random.random() < 0.5:
                continue
            value = _drawn(hints.get(name), usual, random)
            if value != usual:
                drawn.append(f"strategy.{part}.{name}={json.dumps(value)}".replace('"', ""))
    return tuple(drawn)


def _drawn(hint: Any, usual: Any, random: Random) -> Any:
    """A value of a type near the usual one; the usual one where the type says too little."""
    options = get_args(hint)
    if NoneType in options:
        inner = next(option for option in options if option is not NoneType)
        return None if random.random() < 0.25 else _drawn(inner, usual, random)
    if get_origin(hint) is Annotated:
        if isinstance(options[1], OneOf):
            return random.choice([*options[1].names])
        for _ in range(TRIES):
            value = _drawn(options[0], usual, random)
            if options[1].fits(tuple(value) if isinstance(value, list) else value):
                return value
        return usual
    if hint is bool:
        return random.random() < 0.5
    if hint in (int, float):
        value = usual * random.choice(FACTORS) if usual else random.choice(FROM_ZERO)
        return hint(value)
    if get_origin(hint) is tuple and usual:
        return [_drawn(options[0], random.choice(usual), random) for _ in range(random.randint(1, len(usual)))]
    return usual


def check_terms(terms: Terms, study: Study, processes: int, watch: Callable[[Done], None]) -> Outcome:
    """Run missing runs of all tries and judge them; strategy and number seed each random value."""

    def times(sweeps: Sequence[SweepOverrides]) -> list[dict[str, float]]:
        """Return seconds per iteration of each sweep's strategies with a result, fastest first."""
        for done in run_cells(study.cells_by_key(sweeps).values(), study.results, processes):
            watch(done)
        return [_ranked(study, sweep) for sweep in sweeps]

    outcome = Outcome()
    of_job = {job: (*terms.common, *texts) for job, texts in terms.jobs.items()}
    everyone = f"strategy={terms.strategies}"
    usual = dict(zip(of_job, times([(everyone, *job) for job in of_job.values()]), strict=True))
    for job, ranked in usual.items():
        others = {name: time for name, time in ranked.items() if name != terms.lpt}
        beside = {terms.lpt: ranked[terms.lpt]} if terms.lpt in ranked else {}
        outcome.tries.append(judged(f"{terms.lpt} against all", job, others, {**others, **beside}))
    larger = [
        (f"strategy={','.join(dict.fromkeys([*[*ranked][: terms.leaders], terms.lpt]))}", *of_job[job], *terms.budget)
        for job, ranked in usual.items()
        if ranked
    ]
    asked = [job for job in of_job if usual[job]]
    for job, after in zip(asked, times(larger), strict=True):
        outcome.tries.append(judged("four times the budget", job, usual[job], {**usual[job], **after}))
    for label, change in terms.changes.items():
        changed = [(f"strategy={','.join(_contenders(usual[job]))}", *of_job[job], *change) for job in asked]
        for job, after in zip(asked, times(changed), strict=True):
            outcome.tries.append(judged(label, job, usual[job], after))
    for job, overrides in of_job.items():
        _try_options(terms, study, job, (everyone, *overrides), times, outcome)
    return outcome


def judged(name: str, job: str, before: Mapping[str, float], after: Mapping[str, float]) -> Try:
    """The try of a job from times before and after it, by strategy."""
    leader = min(before, key=before.__getitem__, default="")
    fastest = min(after, key=after.__getitem__, default="")
    others = [time for strategy, time in after.items() if strategy != leader]
    if leader not in after or not others:
        return Try(name, job, leader, fastest, Verdict.UNDECIDED)
    lead = min(others) / after[leader] - 1
    verdict = Verdict.SURVIVES if fastest == leader else Verdict.TIED if lead >= -TIE else Verdict.LOST
    return Try(name, job, leader, fastest, verdict, lead)


def _contenders(times: Mapping[str, float]) -> list[str]:
    """Return the strategies within ``CONTENDERS`` times the fastest time."""
    return [name for name, time in times.items() if time <= CONTENDERS * min(times.values())]


def _try_options(
    terms: Terms,
    study: Study,
    job: str,
    sweep: SweepOverrides,
    times: Callable[[Sequence[SweepOverrides]], list[dict[str, float]]],
    outcome: Outcome,
) -> None:
    sweeps: dict[SweepOverrides, tuple[Cell, SweepOverrides]] = {}
    for cell in study.cells(*sweep):
        record = study.results.read(cell.key)
        if record is None or record.status != "ok" or not (fixed := _fixed(cell, study)):
            continue
        for number in range(terms.draws):
            options = drawn_options(cell.config.strategy, Random(f"{cell.config.strategy['name']} {number}"))  # noqa: S311
            if options:
                sweeps.setdefault((*cell.overrides, *fixed, *options), (cell, options))
    valid = [each for each in sweeps if _composes(study, each)]
    for each, ranked in zip(valid, times(valid), strict=True):
        cell, options = sweeps[each]
        usual = study.results.read(cell.key)
        assert usual
        outcome.num_ran += 1
        outcome.num_failed += not ranked
        for time in ranked.values():
            gain = usual.metrics["iteration_time_s"] / time - 1
            if gain > terms.tolerance:
                outcome.gains.append(Gain(job, str(cell.config.strategy["name"]), options, gain))


def _fixed(cell: Cell, study: Study) -> SweepOverrides:
    """Overrides that fix the layout of a run that was planned; none if its plan is gone."""
    plan = CachedLayouts(study.results.root).read(plan_key(cell.config))
    if plan is None:
        return ()
    config = cell.config
    job = PlannedJob(
        str(config.model["name"]), str(config.workload["name"]), str(config.cluster["name"]), config.global_batch, 1, 0
    )
    layout = replace(plan.layout, options=())
    text = plan_text(TrainingPlan(str(config.strategy["name"]), (), job, layout, Expected(1.0, 1.0, 1.0, 1)))
    path = study.results.root / "terms" / f"{sha256(text.encode()).hexdigest()[:16]}.yaml"
    write_atomically(path, text.encode())
    return ("strategy/planner=given", f"strategy.planner.path='{path}'", *plan.layout.options)


def _composes(study: Study, sweep: SweepOverrides) -> bool:
    try:
        return bool(study.cells(*sweep))
    except UserError:
        return False


def _ranked(study: Study, sweep: SweepOverrides) -> dict[str, float]:
    records = [(cell, study.results.read(cell.key)) for cell in study.cells(*sweep)]
    found = {
        str(cell.config.strategy["name"]): float(record.metrics["iteration_time_s"])
        for cell, record in records
        if record and record.status == "ok"
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def terms_markdown(terms: Terms, outcome: Outcome) -> str:
    """The page: every try with its verdict, and random values of options that gain."""
    rows = [
        [one.name, one.job, one.before, one.after, "" if one.lead is None else f"{100 * one.lead:+.1f}%", one.verdict]
        for one in outcome.tries
    ]
    heading = ["try", "job", "leader before", "leader after", "lead over the runner-up", "lead"]
    gains = sorted(outcome.gains, key=lambda one: (-one.gain, one.job, one.strategy, one.options))
    listed = [[one.job, one.strategy, f"`{' '.join(one.options)}`", f"{100 * one.gain:+.1f}%"] for one in gains]
    found = markdown_table(["job", "strategy", "options", "gain"], listed, right=["gain"]) if listed else "None.\n"
    return (
        "# Changes that a reviewer would try\n\nWritten by `entrain-bench check-terms`; jobs and tries are in "
        f"`experiments/terms.yaml`. One seed.\n\n{markdown_table(heading, rows, right=heading[4:5])}\n"
        f"## Random values of options\n\n{terms.draws} random values for each strategy and job, on the layout that the "
        f"tuner chose for its own values. {outcome.num_ran} different ones ran, {outcome.num_failed} of them without "
        f"result. Faster than the strategy's own by more than {100 * terms.tolerance:g}%:\n\n{found}"
    )
