"""Rows of the ledger as points of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from entrain_bench.base.arrays import FloatArray
from entrain_bench.lab.ledger.entries import OK, Entry, Range
from entrain_bench.lab.ledger.fit import Interval, Point
from entrain_bench.lab.ledger.forwards import ForwardCase
from entrain_bench.lab.ledger.kernels import ERROR, KernelRow, kernel_ratio
from entrain_bench.lab.ledger.predict import Change, Predictable, Prediction
from entrain_bench.specs.cluster import ClusterSpec

# Tables of one program, run by the same people: one source.
SAME_SOURCE = {"lambda_transformers_v2": "lambda_transformers_v0_v1"}

type Changes = Callable[[FloatArray], Change]


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predictions of cases under factors, each made once: many rows are the same job."""

    changes: Changes
    known: dict[tuple[int, bytes], Prediction] = field(default_factory=dict)

    def of(self, entry: Entry, factors: FloatArray) -> tuple[Range | None, Range | None]:
        """Seconds and GiB of a row."""
        change = self.changes(factors)
        content = factors.tobytes()

        def predict(case: Predictable) -> Prediction:
            asked = id(case), content
            if asked not in self.known:
                self.known[asked] = case.predict(change)
            return self.known[asked]

        outcome = entry.outcome(predict)
        return outcome.seconds, outcome.gib


def time_points(entries: Iterable[Entry], changes: Changes) -> list[Point]:
    """The measured iterations; what a row leaves open makes its prediction a range."""
    predictor = Predictor(changes)
    return [
        _point(entry, entry.row.published_s, predictor, 0)
        for entry in entries
        if entry.cases and entry.row.outcome == OK and entry.row.published_s is not None
    ]


def memory_points(entries: Iterable[Entry], changes: Changes) -> list[Point]:
    """The measured peaks of memory."""
    predictor = Predictor(changes)
    return [
        _point(entry, entry.row.peak_memory_gib, predictor, 1)
        for entry in entries
        if entry.cases and entry.row.outcome == OK and entry.row.peak_memory_gib is not None
    ]


def forward_points(cases: Iterable[ForwardCase], changes: Changes) -> list[Point]:
    """Published ranges of forwards, all of one source."""
    return [_forward(case, changes) for case in cases]


def product_points(rows: Iterable[tuple[KernelRow, ClusterSpec]], changes: Changes) -> list[Point]:
    """Single products, which know their size alone: the error of their rates is given."""
    return [_product(row, cluster, changes) for row, cluster in rows]


def _product(row: KernelRow, cluster: ClusterSpec, changes: Changes) -> Point:
    seconds = row.kernel.published_s

    def predict(factors: FloatArray) -> Interval:
        predicted = kernel_ratio(row, changes(factors)(cluster)) * seconds
        return predicted, predicted

    return Point(row.where, cluster.device.name, (seconds, seconds), predict, ERROR)


def _forward(case: ForwardCase, changes: Changes) -> Point:
    def predict(factors: FloatArray) -> Interval:
        seconds = case.predicted_ms(changes(factors)) / 1e3
        return seconds, seconds

    published = case.row.least_ms / 1e3, case.row.most_ms / 1e3
    return Point(case.row.where, case.truth.cluster.device.name, published, predict)


def _point(entry: Entry, published: float, predictor: Predictor, measured: int) -> Point:
    def predict(factors: FloatArray) -> Interval:
        found = predictor.of(entry, factors)[measured]
        assert found is not None
        return found.low, found.high

    source = source_of(entry.row.source)
    return Point(source, entry.cases[0].cluster.device.name, (published, published), predict)


def source_of(table: str) -> str:
    """The source that a table is of."""
    return SAME_SOURCE.get(table, table)
