"""Places of strategies in a job: time, distance to the fastest, ties, and the framework that runs a strategy today."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from entrain_bench.answers.comparison import Comparison, Times, Verdict
from entrain_bench.answers.labels import PUBLISHED
from entrain_bench.answers.posterior import SURE, share_ahead


@dataclass(frozen=True, slots=True)
class Place:
    """A strategy in a job.

    Attributes:
        time_s: mean seconds per iteration.
        behind: its time over the fastest's; 1 for the fastest.
        ties: whether the fastest has no lead over it that counts, over paired seeds and under the posterior.
        framework: the framework that runs it today; empty if none does.
        family: the strategy's family.
    """

    name: str
    time_s: float
    behind: float
    ties: bool
    framework: str = ""
    family: str = ""


def places_of[Name: Hashable](
    comparison: Comparison[Name],
    labels: Mapping[Name, str],
    frameworks: Mapping[Name, str],
    families: Mapping[Name, str],
    draws: Mapping[Name, Times] = {},
) -> dict[Name, Place]:
    """Return the places of all strategies with a result at every seed, the fastest first.

    ``draws``: seconds by posterior draw; without them seeds alone decide ties.
    """
    done = [name for name in comparison.ranked if comparison.standings[name].verdict != Verdict.FAILED]
    places = {}
    for name in done:
        standing = comparison.standings[name]
        if standing.time is None:
            continue
        share = share_ahead(draws.get(done[0], {}), draws.get(name, {})) if name != done[0] else 0.0
        ties = name in comparison.best or (share is not None and share < SURE)
        behind = standing.behind.mean if standing.behind else 1.0
        places[name] = Place(labels[name], standing.time.mean, behind, ties, frameworks[name], families[name])
    return places


def published(places: Iterable[Place]) -> Place | None:
    """Return the first published strategy."""
    return next((place for place in places if place.family == PUBLISHED), None)


def today(places: Iterable[Place]) -> Place | None:
    """Return the first strategy that a framework runs today."""
    return next((place for place in places if place.framework), None)
