"""The runs behind a recommendation: successive rounds over seeds, after which slow strategies drop out.

A layout is planned once, from samples of ``planning_seed``, and runs at every seed. The first round has one seed, with
which no test is possible: strategies that take ``FAR`` times as long as the fastest drop out. In later rounds those
drop out that are significantly slower than another (``statistics.not_worse``). Rounds decide from times alone, so a job
has the same race on every machine. Two rounds test, each at half of ``LEVEL``. In simulated races of 2, 5, 12 and 22
equal strategies at least one drops out in 2% to 5% of races, with seeds that deviate by 2% or 10% (standard deviation;
``tests/answers/test_error_rates.py``).

On the main figure's ten jobs, started at each of eight seeds, at least 72 of 80 races find the strategy with the least
mean over all eight seeds. The others find one that is at most 5% slower (``tests/answers/recommend/test_race.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import perf_counter

from entrain_bench.answers.comparison import TIME, Comparison, Times, compare, with_result
from entrain_bench.answers.statistics import LEVEL, not_worse
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import RunConfig
from entrain_bench.program.layout import Layout
from entrain_bench.records.cached_layouts import CachedLayout, CachedLayouts
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import plan_key
from entrain_bench.records.records import Record, Results
from entrain_bench.run.cells import run_cells
from entrain_bench.run.experiment import plan_of, prepare

# Seeds that those still racing have run after each round.
ROUNDS = (1, 3, 5)
# Of every round that tests: all but the first.
ROUND_LEVEL = LEVEL / (len(ROUNDS) - 1)
# Times the fastest at one seed. With the noise of the reference's noisiest case, the slowest of 16 equal strategies is
# beyond in 2% of races; with a deviation of 10%, the slowest of 22 in 1%. (With 1.5: 10% and 35%.)
FAR = 1.75


def going_on(times: Mapping[str, Times], kept: Collection[str] = ()) -> list[str]:
    """Those of some strategies that run at further seeds, in their order.

    Args:
        times: seconds an iteration by strategy and seed, all at the same seeds; None for a run without a result.
        kept: strategies that never drop out, as long as they have results.
    """
    done = {name: [*with_result(own).values()] for name, own in times.items()}
    whole = {name: own for name, own in done.items() if own and len(own) == len(times[name])}
    if not whole:
        return []
    if len(next(iter(whole.values()))) == 1:
        limit = FAR * min(own[0] for own in whole.values())
        ahead = {name for name, own in whole.items() if decisive(own[0]) <= decisive(limit)}
    else:
        ahead = {*not_worse(whole, ROUND_LEVEL)}
    return [name for name in whole if name in ahead or name in kept]


def standings(times: Mapping[str, Times], baseline: str = "", num_batches: int = 1) -> Comparison[str]:
    """How all do, at the level of a round: those that dropped out are compared at the seeds that they ran."""
    references = dict.fromkeys(times, baseline) if baseline in times else {}
    return compare(times, references, ROUND_LEVEL, num_batches)


@dataclass(frozen=True, slots=True)
class StrategyVariant:
    """A strategy that is considered: its name among others of the same choice, and what makes it, its choice first."""

    name: str
    overrides: tuple[str, ...]

    @property
    def strategy(self) -> str:
        """The choice."""
        return self.overrides[0].partition("=")[2]


# Told of every run that is there: whose, at which seed, and what came out.
type Watch = Callable[[StrategyVariant, int, Record], None]


@dataclass(slots=True)
class StrategyRace:
    """Runs strategies on a job; what has run before is read.

    Attributes:
        overrides: of all strategies: the job, without a strategy and a seed.
        first_seed: seeds count from it.
        num_processes: runs at a time; 0: in this process.
        timelines: whether runs keep theirs.
        keys: of all runs that were asked for.
    """

    overrides: Sequence[str]
    first_seed: int
    variants: Mapping[str, StrategyVariant]
    results: Results
    composer: Composer
    num_processes: int
    watch: Watch
    timelines: bool = True
    keys: dict[str, None] = field(default_factory=dict)
    _records: dict[tuple[str, ...], Record] = field(default_factory=dict)

    def seeds(self, number: int) -> list[int]:
        """The first so many seeds."""
        return [self.first_seed + index for index in range(number)]

    def fresh_seeds(self, number: int) -> list[int]:
        """The first so many seeds that no round has: they play no part in the choice."""
        return [self.first_seed + ROUNDS[-1] + index for index in range(number)]

    def beside(
        self,
        folder: Path,
        variants: Mapping[str, StrategyVariant] | None = None,
        overrides: Sequence[str] | None = None,
    ) -> StrategyRace:
        """The same race with records in another folder; other variants and overrides, if given."""
        return StrategyRace(
            self.overrides if overrides is None else overrides,
            self.first_seed,
            self.variants if variants is None else variants,
            Results(folder),
            self.composer,
            self.num_processes,
            lambda *_: None,
            timelines=False,
        )

    def config(self, name: str, seed: int, changed: Sequence[str] = ()) -> RunConfig:
        """The configuration of a run; ``changed`` are further overrides."""
        return self.composer.run(self._overrides(name, seed, changed))

    def records(self, names: Sequence[str], seeds: Sequence[int], changed: Sequence[str] = ()) -> list[Record]:
        """The records of some strategies at some seeds, seed by seed; runs what is missing.

        Raises:
            UserError: for what cannot be composed, and a record that cannot be written.
        """
        wanted = [(name, seed, tuple(changed)) for seed in seeds for name in names]
        self.fetch(wanted)
        return [self._records[self._overrides(*each)] for each in wanted]

    def fetch(self, wanted: Iterable[tuple[str, int, tuple[str, ...]]]) -> None:
        """Run what is missing of some runs, all side by side: strategies, seeds and further overrides."""
        named = {self._overrides(*each): each for each in wanted}
        new = {overrides: each for overrides, each in named.items() if overrides not in self._records}
        for cell, record in self._run(new):
            self._records[cell.overrides] = record
            self.keys[cell.key] = None
            name, seed, changed = new[cell.overrides]
            if not changed:
                self.watch(self.variants[name], seed, record)

    def times(
        self, names: Sequence[str], seeds: Sequence[int], changed: Sequence[str] = ()
    ) -> dict[str, dict[int, float | None]]:
        """Seconds an iteration by strategy and seed; None for a run without a result."""
        found: dict[str, dict[int, float | None]] = {name: {} for name in names}
        for record, (seed, name) in zip(self.records(names, seeds, changed), product(seeds, names), strict=True):
            found[name][seed] = record.metrics[TIME] if record.status == "ok" else None
        return found

    def plan(self, name: str) -> CachedLayout:
        """Return a strategy's plan for the job, equal at every seed: from its runs, or planned again."""
        config = self.config(name, self.first_seed)
        return plan_of(prepare(config), config, CachedLayouts(self.results.root))

    def layout(self, name: str) -> Layout:
        """The layout of ``plan``."""
        return self.plan(name).layout

    def keep_plan(self, name: str, plan: CachedLayout) -> None:
        """Spare the runs of a strategy their planning: this is the plan of the same job."""
        key = plan_key(self.config(name, self.first_seed))
        plans = CachedLayouts(self.results.root)
        if plans.read(key) is None:
            plans.write(key, plan)

    def _overrides(self, name: str, seed: int, changed: Sequence[str]) -> tuple[str, ...]:
        return (*self.variants[name].overrides, *self.overrides, f"seed={seed}", *changed)

    def _run(self, wanted: Iterable[tuple[str, ...]]) -> Iterator[tuple[Cell, Record]]:
        """Cells with what they left; those that have run come first."""
        cells = [replace(Cell.composed(overrides, self.composer), timeline=self.timelines) for overrides in wanted]
        for done in run_cells(cells, self.results, self.num_processes):
            if done.record is None:
                raise UserError(done.problem)
            yield done.cell, done.record


# Why a run of a strategy at a seed is not taken; empty if it is.
type Refuse = Callable[[StrategyRace, str, int], str]


@dataclass(frozen=True, slots=True)
class Raced:
    """The result of a race.

    Attributes:
        times: seconds an iteration by strategy and seed, for as many seeds as it raced.
        out_of_time: whether there would have been more rounds.
        refusals: why results were not taken, the first reason of each strategy.
    """

    times: Mapping[str, Times]
    out_of_time: bool
    refusals: Mapping[str, str]

    def with_times(self, name: str, times: Times) -> Raced:
        """The same with further seeds of a strategy."""
        return replace(self, times={**self.times, name: {**self.times[name], **times}})


def race(
    runner: StrategyRace,
    kept: Sequence[str],
    refuse: Refuse,
    seconds: float | None,
    tell: Callable[[Mapping[str, Times]], None],
) -> Raced:
    """Race all variants of a runner; those ``kept`` run at all seeds if they have results.

    A run at a seed is not taken if ``refuse`` says why. No round begins after ``seconds``.
    """
    started = perf_counter()
    times = dict[str, Times]()
    refusals = dict[str, str]()
    racing = [*runner.variants]
    done = 0
    for number, num_seeds in enumerate(ROUNDS, start=1):
        seeds = runner.seeds(num_seeds)
        found = runner.times(racing, seeds[done:])
        for name in racing:
            for seed, time in found[name].items():
                if time is not None and (reason := refuse(runner, name, seed)):
                    refusals.setdefault(name, reason)
                    found[name][seed] = None
            times[name] = {**times.get(name, {}), **found[name]}
        done = num_seeds
        tell(times)
        running = {name: times[name] for name in racing}
        left = going_on(running)
        racing = going_on(running, kept)
        if not left or (number > 1 and len(left) == 1) or number == len(ROUNDS):
            return Raced(times, False, refusals)
        if seconds is not None and perf_counter() - started >= seconds:
            return Raced(times, True, refusals)
    raise AssertionError("the last round ends the race")
