"""How far a strategy is ahead of the fastest of all others, or behind it: the same numbers wherever they are shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.answers.comparison import Comparison, Standing, Times, compare
from entrain_bench.answers.text import count, speedup, times
from entrain_bench.base.arithmetic import exp, log


@dataclass(frozen=True, slots=True)
class LeadResult[Name: Hashable]:
    """A strategy in one case, next to the fastest of the others.

    Attributes:
        rival: the fastest of the others; one that failed at a seed only if all did.
        own: how the strategy does; its speedup is over the rival, paired by seed, and below 1 where it is behind.
        other: how the rival does.
    """

    rival: Name
    own: Standing
    other: Standing


def lead_of[Name: Hashable](found: Mapping[Name, Times], leader: Name) -> LeadResult[Name] | None:
    """The lead of one of the groups of a case, of which others may be faster; None if there is no other."""
    others = {name: mine for name, mine in found.items() if name != leader}
    if not others:
        return None
    rival = compare(others, {}).ranked[0]
    pair = compare({name: found[name] for name in (leader, rival)}, {leader: rival})
    return LeadResult(rival, pair.standings[leader], pair.standings[rival])


def winners_sentence[Name: Hashable](
    comparisons: Sequence[Comparison[Name]], labels: Mapping[Name, str], noun: str = "job"
) -> str:
    """In how many of some cases each strategy is the fastest, the one with the most first; empty without a winner."""
    wins = Counter(labels[each.best[0]] for each in comparisons if each.best)
    if not wins:
        return ""
    (first, most), *others = wins.most_common()
    places = f" in {most} of {count(len(comparisons), noun)}" if len(comparisons) > 1 else ""
    text = f"{first} is the fastest{places}" + "".join(f", {name} in {number}" for name, number in others)
    open_ones = len(comparisons) - wins.total()
    return f"{text}; {count(open_ones, noun)} not decided." if open_ones else f"{text}."


def lead_sentence[Name: Hashable](leads: Sequence[LeadResult[Name] | None], label: str, noun: str = "job") -> str:
    """The speedups of a strategy over the fastest other in some cases, whether above or below 1; empty without any."""
    gains = [lead.own.speedup for lead in leads if lead and lead.own.speedup]
    if not gains:
        return ""
    if len(leads) == 1:
        return f"{label} has a speedup of {speedup(gains[0])} over the fastest other strategy."
    means = [gain.mean for gain in gains]
    some = f" in {len(gains)} of {len(leads)} {noun}s" if len(gains) < len(leads) else ""
    lacking = sum(1 for lead in leads if lead and lead.own.num_ok < len(lead.own.times))
    without = f" It has no result at some seed of {count(lacking, noun)}." if lacking else ""
    return (
        f"{label} has a speedup of {times(min(means))} to {times(max(means))} over the fastest other strategy{some}, "
        f"{times(geometric_mean(means))} in the geometric mean.{without}"
    )


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean of at least one ratio."""
    return exp(math.fsum(map(log, ratios)) / len(ratios))
