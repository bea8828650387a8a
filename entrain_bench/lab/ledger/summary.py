"""How well the cost model predicts the ledger: by source, by what runs have in common, and in the order of layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from math import erf, log, sqrt
from statistics import fmean, median

from scipy.stats import kendalltau

from entrain_bench.lab.ledger.book import Book
from entrain_bench.lab.ledger.entries import OK, OOM, OPEN, Outcome
from entrain_bench.lab.ledger.rows import LedgerRow

NEAR = 0.10
# Runs of a group from which their order tells something.
FEWEST_LAYOUTS = 5
NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of predicted times.

    Attributes:
        rows: timed runs with a prediction.
        ratio: median of predicted over published.
        error: median of its distance from 1.
        near: share within ``NEAR``.
        width: median width of what is predicted, relative to its lower end; 0 where nothing is open.
    """

    rows: int
    ratio: float
    error: float
    near: float
    width: float

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Errors | None:
        """Of those that have both times; None without any."""
        found = [(outcome.ratio, outcome.seconds) for outcome in outcomes]
        known = [(ratio, seconds.high / seconds.low - 1.0) for ratio, seconds in found if ratio and seconds]
        if not known:
            return None
        ratios, widths = zip(*known, strict=True)
        sizes = [abs(ratio - 1.0) for ratio in ratios]
        near = sum(size <= NEAR for size in sizes) / len(sizes)
        return cls(len(ratios), median(ratios), median(sizes), near, median(widths))


@dataclass(frozen=True, slots=True)
class Fits:
    """Whether runs fit memory: published against predicted.

    Attributes:
        right: predictions that are.
        wrongly_ok: of runs that ran out of memory, those that are predicted to fit.
        wrongly_oom: of runs that fitted, those that are predicted not to.
        open: runs whose prediction depends on what the source leaves open.
    """

    right: int
    wrongly_ok: int
    wrongly_oom: int
    open: int

    @property
    def share(self) -> float | None:
        """Share of right ones among those that are decided; None without any."""
        decided = self.right + self.wrongly_ok + self.wrongly_oom
        return self.right / decided if decided else None

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Fits:
        """Of all that have a prediction."""
        found = Counter((outcome.row.outcome, outcome.fits) for outcome in outcomes if outcome.fits)
        right = found[OK, OK] + found[OOM, OOM]
        return cls(right, found[OOM, OK], found[OK, OOM], sum(found[each, OPEN] for each in (OK, OOM)))


@dataclass(frozen=True, slots=True)
class OfSource:
    """A source: its rows, errors of its times, whether its runs fit, and the median error of its peaks."""

    name: str
    rows: int
    errors: Errors | None
    fits: Fits
    peak_error: float | None


@dataclass(frozen=True, slots=True)
class Order:
    """Layouts of one job in the order of their times.

    Attributes:
        name: the job.
        layouts: how many.
        tau: Kendall's, published against predicted times.
        regret: how much slower than the fastest the one that is predicted to be is.
        spread: how much slower the slowest is.
        attainable: tau of a perfect predictor, by how much published times of equal jobs differ; None if none repeat.
        others: median tau of published times of the same layouts with other kernels; None without any.
    """

    name: str
    layouts: int
    tau: float
    regret: float
    spread: float
    attainable: float | None
    others: float | None

    @property
    def taus(self) -> tuple[float | None, ...]:
        """Its own, the attainable one, and that of other kernels."""
        return self.tau, self.attainable, self.others


def of_sources(outcomes: Sequence[Outcome], book: Book) -> list[OfSource]:
    """Every source in the order of the outcomes."""
    found = []
    for source, each in groupby(outcomes, key=lambda outcome: outcome.row.source):
        own = [*each]
        peaks = [abs(outcome.memory_ratio - 1.0) for outcome in own if outcome.memory_ratio is not None]
        found.append(
            OfSource(book.name(source), len(own), Errors.of(own), Fits.of(own), median(peaks) if peaks else None)
        )
    return found


def reasons(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """Why rows were left out, and how many, the most frequent first."""
    counts = Counter(outcome.reason for outcome in outcomes if outcome.reason)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


# What runs have in common, by name.
BY: dict[str, Callable[[Outcome], str]] = {
    "TP": lambda outcome: str(outcome.row.tp or NOT_STATED),
    "sequence": lambda outcome: str(outcome.row.seq_len or NOT_STATED),
    "attention": lambda outcome: outcome.row.attention_kernel or NOT_STATED,
    "RMSNorm": lambda outcome: outcome.row.rmsnorm_kernel or NOT_STATED,
    "recomputation": lambda outcome: outcome.row.recompute or NOT_STATED,
}


def by(outcomes: Iterable[Outcome], what: Callable[[Outcome], str]) -> list[tuple[str, Errors]]:
    """Errors of the runs that have something in common, each with what that is; numbers in their order."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(what(outcome), []).append(outcome)
    found = [(name, Errors.of(each)) for name, each in groups.items()]
    known = [(name, errors) for name, errors in found if errors is not None]
    return sorted(known, key=lambda item: (not item[0].isdigit(), int(item[0]) if item[0].isdigit() else 0, item[0]))


def orders(outcomes: Iterable[Outcome]) -> list[Order]:
    """Kendall's tau over the layouts of each job that a source timed in several, one set of kernels at a time."""
    timed = [outcome for outcome in outcomes if outcome.ratio is not None]
    noise = repeat_noise(timed)
    jobs: dict[tuple[object, ...], dict[tuple[object, ...], list[Outcome]]] = {}
    for outcome in timed:
        jobs.setdefault(_job(outcome.row), {}).setdefault(_kernels(outcome.row), []).append(outcome)
    found = []
    for sets in jobs.values():
        times = {kernels: {_layout(o.row): o.row.published_s or 0.0 for o in each} for kernels, each in sets.items()}
        for kernels, each in sets.items():
            own = times[kernels]
            both = [(other, [*filter(other.__contains__, own)]) for name, other in times.items() if name != kernels]
            others = [
                _tau([own[layout] for layout in shared], [other[layout] for layout in shared])
                for other, shared in both
                if len(shared) >= FEWEST_LAYOUTS
            ]
            if len(own) >= FEWEST_LAYOUTS:
                found.append(_order(each, noise.get(each[0].row.source), others))
    return found


def _order(runs: Sequence[Outcome], noise: float | None, others: Sequence[float]) -> Order:
    published = [outcome.row.published_s or 0.0 for outcome in runs]
    predicted = [outcome.seconds.middle for outcome in runs if outcome.seconds]
    chosen = published[min(range(len(runs)), key=lambda place: predicted[place])]
    pairs = [abs(log(one / other)) for one, other in combinations(published, 2)]
    return Order(
        _job_name(runs[0]),
        len(runs),
        _tau(published, predicted),
        chosen / min(published) - 1.0,
        max(published) / min(published) - 1.0,
        # Two runs keep the order of their times with probability (1 + erf) / 2.
        fmean(erf(pair / (2.0 * noise)) for pair in pairs) if noise else None,
        median(others) if others else None,
    )


def repeat_noise(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Standard deviation of the log of a published time, by source, from its runs of equal jobs.

    Without tensor parallelism, sequence parallelism changes nothing. Sources without such runs are absent.
    """
    runs: dict[tuple[object, ...], list[float]] = {}
    for outcome in outcomes:
        row = outcome.row if outcome.row.tp != 1 else replace(outcome.row, sequence_parallel=None)
        runs.setdefault((*_job(row), *_kernels(row), *_layout(row)), []).append(log(row.published_s or 1.0))
    spread: dict[str, tuple[float, int]] = {}
    for key, times in runs.items():
        squares, count = spread.get(str(key[0]), (0.0, 0))
        middle = fmean(times)
        spread[str(key[0])] = squares + sum((time - middle) ** 2 for time in times), count + len(times) - 1
    return {source: sqrt(squares / count) for source, (squares, count) in spread.items() if squares > 0}


def _tau(one: Sequence[float], other: Sequence[float]) -> float:
    return float(kendalltau(one, other).statistic)


def _job(row: LedgerRow) -> tuple[object, ...]:
    return row.source, row.model, row.seq_len, row.gpus, row.global_batch, row.gpu_type


def _kernels(row: LedgerRow) -> tuple[object, ...]:
    return row.attention_kernel, row.rmsnorm_kernel, row.sequence_parallel, row.zero_stage, row.software


def _layout(row: LedgerRow) -> tuple[object, ...]:
    return row.tp, row.pp, row.microbatch_size, row.recompute


def _job_name(outcome: Outcome) -> str:
    row = outcome.row
    kernels = [row.attention_kernel, f"{row.rmsnorm_kernel} RMSNorm" if row.rmsnorm_kernel else ""]
    if row.sequence_parallel is not None:
        kernels.append(f"sequence parallelism {'on' if row.sequence_parallel else 'off'}")
    return ", ".join(filter(None, (row.model, f"{row.seq_len} tokens", f"{row.gpus} GPUs", *kernels)))
