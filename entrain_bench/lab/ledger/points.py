"""Rows of the ledger as points of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.lab.ledger.fit import Interval, Point
from entrain_bench.lab.ledger.forwards import ForwardCase
from entrain_bench.lab.ledger.predict import Case, Change, Prediction
from entrain_bench.lab.ledger.rows import LedgerRow

type Changes = Callable[[FloatArray], Change]
type Measured = Callable[[Prediction], float]


def time_point(row: LedgerRow, published_s: float, cases: Sequence[Case], changes: Changes) -> Point:
    """A measured iteration; what the row leaves open makes its prediction a range over its cases."""
    return _point(row, (published_s, published_s), cases, changes, lambda prediction: prediction.seconds)


def memory_point(row: LedgerRow, published_gib: float, cases: Sequence[Case], changes: Changes) -> Point:
    """A measured peak of memory."""
    return _point(row, (published_gib, published_gib), cases, changes, lambda prediction: prediction.gib)


def forward_points(cases: Iterable[ForwardCase], changes: Changes) -> list[Point]:
    """Published ranges of forwards, all of one source."""
    return [_forward(case, changes) for case in cases]


def _forward(case: ForwardCase, changes: Changes) -> Point:
    def predict(factors: FloatArray) -> Interval:
        seconds = case.predicted_ms(changes(factors)) / 1e3
        return seconds, seconds

    published = case.row.least_ms / 1e3, case.row.most_ms / 1e3
    return Point(case.row.where, case.truth.cluster.device.name, published, predict)


def _point(
    row: LedgerRow,
    published: Interval,
    cases: Sequence[Case],
    changes: Changes,
    measured: Callable[[Prediction], float],
) -> Point:
    def predict(factors: FloatArray) -> Interval:
        change = changes(factors)
        found = np.array([measured(case.predict(change)) for case in cases])
        return float(found.min()), float(found.max())

    return Point(row.source, cases[0].cluster.device.name, published, predict)
