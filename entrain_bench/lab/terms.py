"""Random options and other terms of a comparison, and their outcome: ``experiments/terms.yaml``.

Random values of options run on the layout that the tuner chose for the strategy's own values. Options of planners are
not drawn: they decide the layout, which the tuner searches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from random import Random
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import yaml

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.config.targets import TARGET, class_of
from entrain_bench.config.tree import config_tree
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan, plan_text
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import plan_key
from entrain_bench.records.records import Record
from entrain_bench.records.sealed import CachedLayouts
from entrain_bench.run.cells import Done, run_cells
from entrain_bench.run.study import Study, SweepOverrides
from entrain_bench.specs.parse import OneOf, Share, at_least, parse

PARTS = ("assigner", "scheduler")
FACTORS = (0.25, 0.5, 2.0, 4.0)
# Numbers in place of none or zero: tokens, and others.
TOKENS = (4096, 8192, 16384, 65536)
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
    seeds: Annotated[int, at_least(1)] = 4
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
    """Random values of options with which a strategy is faster than with its own; ``gain`` is over all seeds."""

    job: str
    strategy: str
    options: SweepOverrides
    gain: float


class Lack(StrEnum):
    """Why random values, or those of a strategy altogether, have no result."""

    UNFIT = "the strategy has no result on the job"
    UNPLANNED = "its plan was not kept"
    UNDRAWN = "it has no options to draw"
    INVALID = "the configuration refuses them"
    INCOMPATIBLE = "incompatible with the job"
    MEMORY = "exceeds memory"
    FAILED = "fails otherwise"


@dataclass(frozen=True, slots=True)
class Untried:
    """Random values without a result, or a strategy without random values."""

    job: str
    strategy: str
    lack: Lack
    reason: str = ""
    options: SweepOverrides = ()


@dataclass(slots=True)
class Outcome:
    """All tries, gains above the tolerance, and the outcome of every draw.

    Attributes:
        num_drawn: all draws; ``num_repeated`` of them describe a run that was there already, ``num_ran`` have a result.
        not_drawn: options that no draw changes, by strategy.
    """

    tries: list[Try] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    num_drawn: int = 0
    num_repeated: int = 0
    num_ran: int = 0
    untried: list[Untried] = field(default_factory=list)
    not_drawn: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read_terms(path: Path | None = None) -> Terms:
    """The definition; ``UserError`` for a key that it lacks or does not have."""
    return parse(Terms, yaml.safe_load((path or config_tree() / "terms.yaml").read_text()), "terms.yaml")


def options_of(strategy: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Type and own value of every option of assigner and scheduler, by the option's path in the strategy."""
    found = {}
    for part in PARTS:
        node = strategy[part]
        hints = get_type_hints(class_of(node[TARGET]), include_extras=True)
        found.update({f"{part}.{name}": (hints.get(name), usual) for name, usual in node.items() if name != TARGET})
    return found


def is_drawn(hint: Any, usual: Any) -> bool:
    """Whether the type of an option says which other values it may have; a component has options of its own."""
    options = get_args(hint)
    if isinstance(usual, Mapping):
        return False
    if NoneType in options:
        return True
    if get_origin(hint) is Annotated:
        return isinstance(options[1], OneOf) or is_drawn(options[0], usual)
    if get_origin(hint) is tuple:
        return bool(usual) and is_drawn(options[0], usual[0])
    return hint in (bool, int, float)


def drawn_options(strategy: Mapping[str, Any], random: Random) -> SweepOverrides:
    """Overrides of random values of some options of assigner and scheduler, as their types allow; maybe none."""
    drawn = []
    for name, (hint, usual) in options_of(strategy).items():
        if not is_drawn(hint, usual) or random.random() < 0.5:
            continue
        value = _drawn(hint, usual, TOKENS if name.endswith("tokens") else FROM_ZERO, random)
        if value != usual:
            drawn.append(f"strategy.{name}={json.dumps(value)}".replace('"', ""))
    return tuple(drawn)


def _drawn(hint: Any, usual: Any, first: Sequence[int], random: Random) -> Any:
    """A value of a type near the usual one, or a ``first`` one; the usual one where the type says too little."""
    options = get_args(hint)
    if NoneType in options:
        inner = next(option for option in options if option is not NoneType)
        return None if random.random() < 0.25 else _drawn(inner, usual, first, random)
    if get_origin(hint) is Annotated:
        if isinstance(options[1], OneOf):
            return random.choice([*options[1].names])
        for _ in range(TRIES):
            value = _drawn(options[0], usual, first, random)
            if options[1].fits(tuple(value) if isinstance(value, list) else value):
                return value
        return usual
    if hint is bool:
        return random.random() < 0.5
    if hint in (int, float):
        value = usual * random.choice(FACTORS) if usual else random.choice(first)
        return hint(value)
    if get_origin(hint) is tuple and usual:
        return [_drawn(options[0], random.choice(usual), first, random) for _ in range(random.randint(1, len(usual)))]
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
    drawn: dict[SweepOverrides, tuple[Cell, SweepOverrides]] = {}
    for cell in study.cells(*sweep):
        name = _name_of(cell)
        options = options_of(cell.config.strategy)
        if others := tuple(option for option, (hint, usual) in options.items() if not is_drawn(hint, usual)):
            outcome.not_drawn[name] = others
        record = study.results.read(cell.key)
        fixed = _fixed(cell, study)
        if record is None or record.status != "ok":
            outcome.untried.append(Untried(job, name, Lack.UNFIT, record.reason if record else ""))
        elif len(others) == len(options):
            outcome.untried.append(Untried(job, name, Lack.UNDRAWN))
        elif not fixed:
            outcome.untried.append(Untried(job, name, Lack.UNPLANNED))
        else:
            own = (*cell.overrides, *fixed)
            drawn.update({(*own, *values): (cell, values) for values in _draws(terms, study, job, cell, own, outcome)})
    promising = []
    for each, ranked in zip(drawn, times([*drawn]), strict=True):
        cell, values = drawn[each]
        usual = study.results.read(cell.key)
        assert usual
        if not ranked:
            record = study.results.read(study.cells(*each)[0].key)
            outcome.untried.append(Untried(job, _name_of(cell), *_lack(record), values))
            continue
        outcome.num_ran += 1
        [time] = ranked.values()
        if usual.metrics["iteration_time_s"] / time - 1 > terms.tolerance:
            promising.append(each)
    # One seed's luck is no gain: those that gain on it run on further seeds, and so do the strategy's own values.
    again = [sweep for each in promising for sweep in (each, drawn[each][0].overrides)]
    means = iter(times([_on_seeds(each, terms.seeds) for each in again]))
    for each, changed, unchanged in zip(promising, means, means, strict=True):
        cell, values = drawn[each]
        name = _name_of(cell)
        if name in changed and name in unchanged and unchanged[name] / changed[name] - 1 > terms.tolerance:
            outcome.gains.append(Gain(job, name, values, unchanged[name] / changed[name] - 1))


def _on_seeds(sweep: SweepOverrides, count: int) -> SweepOverrides:
    """Return a sweep over the first seeds."""
    return (*(text for text in sweep if not text.startswith("seed=")), f"seed=range({count})")


def _draws(
    terms: Terms, study: Study, job: str, cell: Cell, own: SweepOverrides, outcome: Outcome
) -> Iterator[SweepOverrides]:
    """Random values of a strategy that make a run of their own, with ``own`` overrides."""
    name = _name_of(cell)
    keys = {study.cells(*own)[0].key}
    for number in range(terms.draws):
        values = drawn_options(cell.config.strategy, Random(f"{name} {number}"))  # noqa: S311
        outcome.num_drawn += 1
        try:
            [changed] = study.cells(*own, *values)
        except UserError as error:
            outcome.untried.append(Untried(job, name, Lack.INVALID, str(error), values))
            continue
        outcome.num_repeated += changed.key in keys
        if changed.key not in keys:
            keys.add(changed.key)
            yield values


def _name_of(cell: Cell) -> str:
    return str(cell.config.strategy["name"])


def _lack(record: Record | None) -> tuple[Lack, str]:
    """Why a run has no result."""
    if record is None:
        return Lack.FAILED, "no record"
    kinds = {"skipped": Lack.INCOMPATIBLE, "failed": Lack.MEMORY if record.settled else Lack.FAILED}
    return kinds[record.status], record.reason


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


def _ranked(study: Study, sweep: SweepOverrides) -> dict[str, float]:
    """Return the mean seconds per iteration of each strategy that has a result at every seed, fastest first."""
    found: dict[str, list[float]] = {}
    for cell in study.cells(*sweep):
        record = study.results.read(cell.key)
        time = record.metrics["iteration_time_s"] if record and record.status == "ok" else math.inf
        found.setdefault(_name_of(cell), []).append(time)
    means = {name: math.fsum(times) / len(times) for name, times in found.items()}
    return dict(sorted(((name, mean) for name, mean in means.items() if mean < math.inf), key=lambda item: item[1]))
