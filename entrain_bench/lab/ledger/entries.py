"""Rows with their cases, and what comes of them under a set of constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import sqrt

from entrain_bench.base.errors import UserError
from entrain_bench.lab.ledger.book import Book
from entrain_bench.lab.ledger.jobs import Unusable, jobs_of
from entrain_bench.lab.ledger.predict import Cases, Change, Predictable, Prediction
from entrain_bench.lab.ledger.rows import LedgerRow

PREDICTED = "predicted"
LEFT_OUT = "left out"
OK = "ok"
OOM = "oom"
OPEN = "open"


@dataclass(frozen=True, slots=True)
class Range:
    """Least and greatest possible value of a quantity; equal if a row leaves nothing open."""

    low: float
    high: float

    def nearest(self, value: float) -> float:
        """The value of the range that is nearest to one."""
        return min(max(value, self.low), self.high)

    @property
    def middle(self) -> float:
        """The geometric mean of both ends."""
        return sqrt(self.low * self.high)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The prediction of a row, or the reason why there is none.

    Attributes:
        row: the row.
        reason: why nothing was predicted; empty if something was.
        seconds: of an iteration, predicted; None without a prediction.
        gib: highest memory of a GPU, predicted.
        fits: ``ok``, ``oom``, or ``open`` if that depends on what the row leaves open; empty without a prediction.
    """

    row: LedgerRow
    reason: str = ""
    seconds: Range | None = None
    gib: Range | None = None
    fits: str = ""

    @property
    def status(self) -> str:
        """Whether the row was predicted."""
        return LEFT_OUT if self.reason else PREDICTED

    @property
    def ratio(self) -> float | None:
        """Predicted over published seconds: 1 inside the range, else that of its nearest end; None without either."""
        return _ratio(self.seconds, self.row.published_s)

    @property
    def memory_ratio(self) -> float | None:
        """Likewise of memory."""
        return _ratio(self.gib, self.row.peak_memory_gib if self.row.outcome == OK else None)


def _ratio(predicted: Range | None, published: float | None) -> float | None:
    return None if predicted is None or published is None else predicted.nearest(published) / published


@dataclass(frozen=True, slots=True)
class Entry:
    """A row and the cases that it may be; none, and a reason, if it is not predicted."""

    row: LedgerRow
    cases: tuple[Predictable, ...] = ()
    reason: str = ""

    def outcome(self, predict: Callable[[Predictable], Prediction]) -> Outcome:
        """Return the outcome of the row, given a function that predicts a case.

        Of a run that fitted, cases that do not fit are no candidates, unless none fits.
        """
        if self.reason:
            return Outcome(self.row, self.reason)
        found = [predict(case) for case in self.cases]
        fitting = [each for each in found if each.fits]
        fits = OK if len(fitting) == len(found) else OPEN if fitting else OOM
        if self.row.outcome == OK and fitting:
            found = fitting
            fits = OK
        return Outcome(self.row, "", _range(found, "seconds"), _range(found, "gib"), fits)


def _range(found: list[Prediction], name: str) -> Range:
    values = [getattr(each, name) for each in found]
    return Range(min(values), max(values))


def outcomes_of(entries: Iterable[Entry], change: Change | None = None) -> list[Outcome]:
    """Return the outcome of every row on unchanged or changed clusters; equal jobs are predicted once."""
    known: dict[int, Prediction] = {}

    def predict(case: Predictable) -> Prediction:
        if id(case) not in known:
            known[id(case)] = case.predict(change)
        return known[id(case)]

    return [entry.outcome(predict) for entry in entries]


def entries_of(rows: Iterable[LedgerRow], book: Book, cases: Cases) -> Iterator[Entry]:
    """Every row with its cases."""
    for row in rows:
        jobs = jobs_of(row, book)
        if isinstance(jobs, Unusable):
            yield Entry(row, reason=jobs.reason)
            continue
        try:
            yield Entry(row, tuple(cases.of(job) for job in jobs))
        except UserError as error:
            yield Entry(row, reason=str(error))
