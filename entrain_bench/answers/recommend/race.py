"""Who runs at further seeds: successive rounds over seeds, from which strategies drop out that are behind.

The first round has one seed, of which nothing is known but the times: who is ``FAR`` behind drops out. In later ones
strategies drop out that are significantly slower than the fastest (``statistics.not_worse``). Rounds decide from times
alone, so the same job has the same race on every machine. As two rounds test, each does so at half of ``LEVEL``.

In the reference's ten cases of the default job (``results/reference/table.csv``: five traces, two LLMs, 19
strategies), begun at each of eight seeds, this race finds the strategy with the least mean over all eight seeds in
80 of 80 (2026-11-23).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from entrain_bench.answers.comparison import Times, with_result
from entrain_bench.answers.statistics import LEVEL, Interval, mean_interval, not_worse, ratio_interval
from entrain_bench.base.arithmetic import decisive

# Seeds that those still racing have run after each round.
ROUNDS = (1, 3, 5)
# Of every round that tests: all but the first.
ROUND_LEVEL = LEVEL / (len(ROUNDS) - 1)
# Times the fastest at one seed. In the reference's cases a seed's ratio is off its mean over seeds by up to 1.21x, on
# MathVision, whose microbatches vary most, by up to 1.90x.
FAR = 1.5
# What places say of a strategy.
FASTEST, AS_GOOD, SLOWER, FAR_BEHIND, NO_RESULT = "fastest", "as good", "slower", "far behind", "no result"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a strategy comes in.

    Attributes:
        name: the strategy.
        time: mean seconds an iteration over its seeds; None without a result at all of them.
        behind: its times over the fastest's, at the seeds that both ran; None for the fastest, and without a result.
        verdict: one of the words above.
    """

    name: str
    time: Interval | None
    behind: Interval | None
    verdict: str


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


def places(times: Mapping[str, Times]) -> list[Place]:
    """Everybody's place: the fastest first, then by how far behind, then those without a result at one of their seeds.

    The fastest is who has the least mean of those that ran at all seeds. Strategies that share all of its seeds are as
    good unless they are significantly slower; those with fewer dropped out as slower, or, of one seed, far behind.
    """
    whole = _whole(times)
    most = max((len(own) for own in whole.values()), default=0)
    last = {name: [*own.values()] for name, own in whole.items() if len(own) == most}
    if not last:
        return [Place(name, None, None, NO_RESULT) for name in times]
    best = min(last, key=lambda name: (decisive(math.fsum(last[name])), *last[name]))
    good = not_worse(last, ROUND_LEVEL).best
    found = [_place(name, own, whole[best], name == best, name in good, most) for name, own in whole.items()]
    ranked = sorted(found, key=lambda place: (place.behind is not None, place.behind.mean if place.behind else 0.0))
    return [*ranked, *(Place(name, None, None, NO_RESULT) for name in times if name not in whole)]


def _place(name: str, own: Mapping[int, float], best: Mapping[int, float], first: bool, good: bool, most: int) -> Place:
    time = mean_interval([*own.values()])
    if first:
        return Place(name, time, None, FASTEST)
    shared = [seed for seed in own if seed in best]
    behind = ratio_interval([own[seed] for seed in shared], [best[seed] for seed in shared])
    early = FAR_BEHIND if len(own) == 1 < most else SLOWER
    return Place(name, time, behind, AS_GOOD if good else early)


def _whole(times: Mapping[str, Times]) -> dict[str, dict[int, float]]:
    """Those with results at all of their seeds, which are sorted."""
    found = {name: with_result(own) for name, own in times.items()}
    return {name: own for name, own in found.items() if own and len(own) == len(times[name])}
