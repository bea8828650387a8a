"""The runs behind a recommendation: rounds over seeds, after which slow strategies drop out.

A layout is planned once, from samples of ``planning_seed``, and runs at every seed. The first round has one seed, with
which no test is possible: strategies that take ``FAR`` times as long as the fastest drop out. In later rounds those
drop out that are significantly slower than another (``statistics.not_worse``), each round at half of ``LEVEL``. In
simulated races of equal strategies at least one drops out in 2% to 5% of races. Of 80 races of the main figure's jobs
at least 72 find the strategy with the least mean over eight seeds; the others find one that is at most 5% slower.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from entrain_bench.answers.comparison import (
    TIME,
    Comparison,
    Times,
    compare,
    with_result,
)
from entrain_bench.answers.statistics import LEVEL, not_worse
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import plan_key
from entrain_bench.records.records import Record, Results
from entrain_bench.records.sealed import CachedLayout, CachedLayouts
from entrain_bench.run.cells import run_cells
from entrain_bench.run.experiment import plan_of, prepare

# Seeds that those still racing have run after each round.
ROUNDS = (1, 3, 5)
# The level of each round that tests: all rounds but the first.
ROUND_LEVEL = LEVEL / (len(ROUNDS) - 1)
# Times the fastest at one seed. With the noise of the reference's noisiest case, the slowest of 16 equal strategies is
# beyond in 2% of races; with a deviation of 10%, the slowest of 22 in 1%. (With 1.5: 10% and 35%.)
FAR = 1.75


def going_on(times: Mapping[str, Times], kept: Collection[str] = ()) -> list[str]:
    """Return the strategies that run at further seeds, in their order; those ``kept`` do if they have results.

    ``times`` are seconds per iteration by strategy and seed, all at the same seeds; None for a run without a result.
    """
    done = {name: [*with_result(by_seed).values()] for name, by_seed in times.items()}
    whole = {name: seconds for name, seconds in done.items() if seconds and len(seconds) == len(times[name])}
    if not whole:
        return []
    if len(next(iter(whole.values()))) == 1:
        limit = FAR * min(first for first, *_ in whole.values())
        ahead = {name for name, (first, *_) in whole.items() if decisive(first) <= decisive(limit)}
    else:
        ahead = {*not_worse(whole, ROUND_LEVEL)}
    return [name for name in whole if name in ahead or name in kept]


def standings(times: Mapping[str, Times], baseline: str = "") -> Comparison[str]:
    """Compare all at the level of a round; those that dropped out are compared at the seeds that they ran."""
    references = dict.fromkeys(times, baseline) if baseline in times else {}
    return compare(times, references, ROUND_LEVEL)


@dataclass(slots=True)
class StrategyRace:
    """Runs strategies on a job; earlier runs are read.

    ``free`` are keys that the tuner chooses unless a variant or the job sets them. ``variants`` have the overrides of
    every strategy by its name, the first its choice (``strategy=dip``). ``overrides`` are the job's, without strategy
    and seed, and count before others. ``keys`` are those of all runs that were asked for.
    """

    free: Sequence[str]
    overrides: Sequence[str]
    first_seed: int
    variants: dict[str, Sequence[str]]
    results: Results
    composer: Composer
    num_processes: int
    watch: Callable[[Record], None] = lambda _: None
    timelines: bool = True
    keys: dict[str, None] = field(init=False, default_factory=dict)
    _records: dict[tuple[str, ...], Record] = field(init=False, default_factory=dict)

    def seeds(self, number: int, after: int = 0) -> list[int]:
        """Return a number of seeds; ``after`` all those of the race (``ROUNDS``), they play no part in the choice."""
        return [self.first_seed + after + index for index in range(number)]

    def strategy(self, name: str) -> str:
        """Return the choice of a strategy."""
        return self.variants[name][0].partition("=")[2]

    def config(self, name: str, seed: int) -> RunConfig:
        """Return the configuration of a run."""
        return self.composer.run(self._overrides(name, seed, ()))

    def records(self, names: Sequence[str], seeds: Sequence[int], changed: Sequence[str] = ()) -> list[Record]:
        """Return the records of some strategies at some seeds, seed by seed; runs missing ones."""
        wanted = [(name, seed, tuple(changed)) for seed in seeds for name in names]
        self.fetch(wanted)
        return [self._records[self._overrides(*one)] for one in wanted]

    def fetch(self, wanted: Iterable[tuple[str, int, tuple[str, ...]]]) -> None:
        """Run the missing ones of some runs, in parallel: strategies, seeds and further overrides."""
        new = [one for one in dict.fromkeys(self._overrides(*run) for run in wanted) if one not in self._records]
        cells = [replace(Cell.composed(overrides, self.composer), timeline=self.timelines) for overrides in new]
        for done in run_cells(cells, self.results, self.num_processes):
            if done.record is None:
                raise UserError(done.problem)
            self._records[done.cell.overrides] = done.record
            self.keys[done.cell.key] = None
            self.watch(done.record)

    def times(
        self, names: Sequence[str], seeds: Sequence[int], changed: Sequence[str] = ()
    ) -> dict[str, dict[int, float | None]]:
        """Return seconds per iteration by strategy and seed; None for a run without a result."""
        times: dict[str, dict[int, float | None]] = {name: {} for name in names}
        for record, (seed, name) in zip(self.records(names, seeds, changed), product(seeds, names), strict=True):
            times[name][seed] = record.metrics[TIME] if record.status == "ok" else None
        return times

    def plan(self, name: str) -> CachedLayout:
        """Return a strategy's plan for the job, equal at every seed: from its runs, or planned again."""
        config = self.config(name, self.first_seed)
        return plan_of(prepare(config), config, CachedLayouts(self.results.root))

    def keep_plan(self, name: str, plan: CachedLayout) -> None:
        """Spare the runs of a strategy their planning: this is the plan of the same job."""
        key = plan_key(self.config(name, self.first_seed))
        plans = CachedLayouts(self.results.root)
        if plans.read(key) is None:
            plans.write(key, plan)

    def _overrides(self, name: str, seed: int, changed: Sequence[str]) -> tuple[str, ...]:
        choice, *own = self.variants[name]
        texts = (choice, *self.free, *own, *self.overrides, f"seed={seed}", *changed)
        return tuple({text.partition("=")[0]: text for text in texts}.values())


# Why a result of a variant at a seed is not taken; empty if it is.
type Refuse = Callable[[StrategyRace, str, int], str]


@dataclass(frozen=True, slots=True)
class Raced:
    """The result of a race: seconds by variant and seed, and why results were not taken."""

    times: dict[str, Times]
    out_of_time: bool
    refusals: Mapping[str, str]


def settle(runner: StrategyRace, attempts: Mapping[str, Sequence[Sequence[str]]], refuse: Refuse) -> dict[str, str]:
    """Give every variant the first of its attempts that has a result at the first seed; the last if none has.

    Returns why results are not taken, by variant, if ``refuse`` says so.
    """
    reasons = dict[str, str]()
    (seed,) = runner.seeds(1)
    waiting = [*attempts]
    for place in range(max(map(len, attempts.values()), default=0)):
        runner.variants |= {name: attempts[name][place] for name in waiting}
        times = runner.times(waiting, [seed])
        reasons |= {name: "" if times[name][seed] is None else refuse(runner, name, seed) for name in waiting}
        lost = [name for name in waiting if times[name][seed] is None or reasons[name]]
        waiting = [name for name in lost if place + 1 < len(attempts[name])]
    return {name: reason for name, reason in reasons.items() if reason}


def race(
    runner: StrategyRace,
    fields: Sequence[Collection[str]],
    kept: Collection[str],
    refusals: Mapping[str, str],
    has_time: Callable[[], bool] = lambda: True,
    watch: Callable[[Mapping[str, Times], int], None] = lambda *_: None,
) -> Raced:
    """Race all variants of a runner, those of each field against each other; those ``kept`` run at all seeds.

    Those with ``refusals`` have no result. No round begins without time. ``watch`` is told the times and how many are
    left after each round.
    """
    times = dict[str, Times]()
    racing = [*runner.variants]
    done = 0
    for number, num_seeds in enumerate(ROUNDS, start=1):
        new = runner.times(racing, runner.seeds(num_seeds)[done:])
        for name in racing:
            times[name] = {**times.get(name, {}), **(dict.fromkeys(new[name]) if name in refusals else new[name])}
        done = num_seeds
        left = [going_on({name: times[name] for name in racing if name in members}) for members in fields]
        ahead = {name for members in left for name in members}
        racing = [name for name in racing if name in ahead or (name in kept and with_result(times[name]))]
        watch(times, len(racing))
        if not ahead or (number > 1 and all(len(members) <= 1 for members in left)) or number == len(ROUNDS):
            return Raced(times, False, refusals)
        if not has_time():
            return Raced(times, True, refusals)
    raise AssertionError("the last round ends the race")
