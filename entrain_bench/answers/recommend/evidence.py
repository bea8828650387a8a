"""What stands behind an answer: where time goes, and how firm the order is; pure functions of records and times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.answers.comparison import TIME, Times, with_result
from entrain_bench.answers.statistics import Interval, ratio_interval
from entrain_bench.records.records import Record
from entrain_bench.records.time_shares import TIME_SHARES

# What can be wrong with what strategies and the cost model assume: a label, and the override.
ASSUMPTIONS = {
    "estimates off by up to 30%, each its own way": "belief_error=0.3",
    "estimates off by up to 30%, alike for a length": "belief_bias=0.3",
    "network at half its bandwidth": "speed.network=0.5",
    "network at twice its bandwidth": "speed.network=2",
}


def spent_s(records: Sequence[Record]) -> dict[str, float]:
    """Seconds of an iteration by class of ``TIME_SHARES``, the average GPU's; together they are the iteration.

    Means over the iterations of at least one record: a share of a mean time would not be one.
    """
    rows = [row for record in records for row in record.iterations]
    return {name: math.fsum(row[name] * row[TIME] for row in rows) / len(rows) for name in TIME_SHARES}


@dataclass(frozen=True, slots=True)
class Firm:
    """What an assumption changes.

    Attributes:
        label: the assumption that does not hold, in words.
        change: the fastest's time over its usual one, at the same seeds; None if it has no result there.
        rivals: by strategy its time over the fastest's under the changed assumption, or where that has no result there
            over its usual one; None without a result.
    """

    label: str
    change: Interval | None
    rivals: Mapping[str, Interval | None]

    @property
    def overtaking(self) -> list[str]:
        """Who is faster then."""
        return [name for name, ratio in self.rivals.items() if ratio and (self.change is None or ratio.mean < 1)]


def firm(label: str, best: str, usual: Times, changed: Mapping[str, Times]) -> Firm:
    """What an assumption changes for the fastest strategy, whose usual times are given, and for its rivals."""
    own = changed[best]
    change = _ratio(own, usual)
    rivals = {name: _ratio(times, own if change else usual) for name, times in changed.items() if name != best}
    return Firm(label, change, rivals)


def _ratio(times: Times, others: Times) -> Interval | None:
    """Over the seeds at which both have a result, if those are all."""
    one, other = with_result(times), with_result(others)
    shared = [seed for seed in one if seed in other]
    if not shared or len(shared) < len(times):
        return None
    return ratio_interval([one[seed] for seed in shared], [other[seed] for seed in shared])
