"""Who runs at further seeds: successive rounds over seeds, from which strategies drop out that are behind.

The first round has one seed, of which nothing is known but the times: who is ``FAR`` behind drops out. In later ones
strategies drop out that are significantly slower than the fastest (``statistics.not_worse``). Rounds decide from times
alone, so the same job has the same race on every machine. As two rounds test, each does so at half of ``LEVEL``.

In the reference's ten cases of the default job (``results/reference/table.parquet``: five traces, two LLMs, 19
strategies), begun at each of eight seeds, this race finds the strategy with the least mean over all eight seeds in
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
# Times the fastest at one seed. In the reference's cases a seed's ratio is off its mean over seeds by up to 1.21x, on
# MathVision, whose microbatches vary most, by up to 1.90x.
FAR = 1.5


def going_on(times: Mapping[str, Times], kept: Collection[str] = ()) -> list[str]:
    """Those of some strategies that run at further seeds, in their order.

    Args:
        times: seconds an iteration by strategy and seed, all at the same seeds; None for a run without a result.
        kept: strategies that never drop out, as long as they have results.
    """
    whole = {name: [*own.values()] for name, own in _whole(times).items()}
    if not whole:
        return []
    if len(next(iter(whole.values()))) == 1:
        limit = FAR * min(own[0] for own in whole.values())
        ahead = {name for name, own in whole.items() if decisive(own[0]) <= decisive(limit)}
    else:
        ahead = {*not_worse(whole, ROUND_LEVEL).best}
    return [name for name in whole if name in ahead or name in kept]


def standings(times: Mapping[str, Times]) -> Comparison[str]:
    """How all do, at the level of a round: those that dropped out are compared at the seeds that they ran."""
    return compare(times, {}, ROUND_LEVEL)


def _whole(times: Mapping[str, Times]) -> dict[str, dict[int, float]]:
    """Those with results at all of their seeds, which are sorted."""
    found = {name: with_result(own) for name, own in times.items()}
    return {name: own for name, own in found.items() if own and len(own) == len(times[name])}
