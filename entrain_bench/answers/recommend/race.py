"""Which strategies run at further seeds: successive rounds over seeds, after which slow strategies drop out.

The first round has one seed, with which no test is possible: strategies that take ``FAR`` times as long as the
fastest drop out. In later rounds strategies drop out that are significantly slower than another
(``statistics.not_worse``). Rounds decide from times alone, so a job has the same race on every machine. Two rounds
test, each at half of ``LEVEL``. In simulated races of 2, 5, 12 and 22 equal strategies at least one drops out in 2% to
5% of races, with seeds that deviate by 2% or 10% (standard deviation; ``tests/answers/test_error_rates.py``).

In the reference's ten cases of the default job (``results/reference/table.parquet``: five traces, two LLMs, 19
strategies), started at each of eight seeds, this race finds the strategy with the least mean over all eight seeds in
80 of 80 (2026-11-23).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from entrain_bench.answers.comparison import Comparison, Times, compare, with_result
from entrain_bench.answers.statistics import LEVEL, not_worse
from entrain_bench.base.arithmetic import decisive

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
        ahead = not_worse(whole, ROUND_LEVEL)
    return [name for name in whole if name in ahead or name in kept]


def standings(times: Mapping[str, Times], baseline: str = "", num_batches: int = 1) -> Comparison[str]:
    """How all do, at the level of a round: those that dropped out are compared at the seeds that they ran."""
    references = dict.fromkeys(times, baseline) if baseline in times else {}
    return compare(times, references, ROUND_LEVEL, num_batches)
