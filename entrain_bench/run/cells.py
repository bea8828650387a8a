"""Run cells: one here, or many here, in processes of this machine or on Ray; each leaves its record."""

import os
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from entrain_bench.base.errors import (
    TRACEBACK_VARIABLE,
    ExecutionError,
    IncompatibleError,
    OutOfMemoryError,
    UnwritableError,
    UserError,
    explain,
)
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.targets import class_of
from entrain_bench.records.cells import Cell
from entrain_bench.records.metrics import metrics_in
from entrain_bench.records.records import Record, Results, new_record, record_of
from entrain_bench.records.sealed import CachedLayouts
from entrain_bench.run.experiment import Watcher, run_experiment, unwatched
from entrain_bench.run.parallel import Died, RayCluster, run_parallel

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Done:
    """A cell of a sweep and its record."""

    cell: Cell
    record: Record | None  # None if it could not be written
    problem: str = ""  # why it could not be written
    seconds: float | None = None  # wall time; None if the record was there before


def compose_cells(overrides: Sequence[str], config_dir: str | None = None, multirun: bool = False) -> list[Cell]:
    """Every cell of the overrides in the sweeper's order, one without ``multirun``; ``UserError`` for bad ones."""
    composer = Composer(config_dir)
    cells = composer.sweep(overrides).cells if multirun else (tuple(overrides),)
    composed = [Cell.composed(each, composer) for each in cells]
    composer.save()
    return composed


def run_one(cell: Cell, results: Results, progress: Watcher = unwatched) -> Record:
    """Run a cell here, telling ``progress`` of each finished iteration; bad input raises and leaves nothing behind."""
    added = metrics_in(cell.config_dir)
    plans = CachedLayouts(results.root)
    outcome = run_experiment(cell.config, progress, plans=plans, keep_timeline=cell.timeline, added=added)
    record = _merged(results.read(cell.key), record_of(cell, outcome))
    return results.write(record, outcome.timeline)


def _merged(known: Record | None, new: Record) -> Record:
    """Return the record of a run that was repeated for its timeline: the known one, if the result is equal."""
    return replace(known, timeline=new.timeline) if known and known.computed == new.computed else new


def run_cells(
    cells: Iterable[Cell],
    results: Results,
    processes: int = 0,
    cluster: RayCluster | None = None,
    retry_failed: bool = False,
) -> Iterator[Done]:
    """Run the cells that have no record yet; yield every cell, in the order in which they are done.

    All are composed before one starts. ``processes`` run at a time (0: this one alone), on a Ray ``cluster`` if given.
    A cell whose process dies gets a record that says so. ``UnwritableError`` once the folder takes no files.
    """
    kept = deque[Done]()

    def missing() -> Iterator[Cell]:
        for cell in [*cells]:
            # Metrics of the user's that cannot be imported are named before a run.
            metrics_in(cell.config_dir)
            record = results.kept(cell, retry_failed)
            if record is None:
                yield cell
            elif lacks_metrics(cell, record):
                yield replace(cell, timeline=cell.timeline or bool(record.timeline))
            else:
                kept.append(Done(cell, record))

    run = partial(attempt, results=results)
    here = ((cell, run(cell)) for cell in missing())
    attempts: Iterator[tuple[Cell, Done | Died]]
    attempts = run_parallel(run, missing(), processes, cluster) if processes else here
    for cell, result in attempts:
        while kept:
            yield kept.popleft()
        done = _record_death(cell, result, results) if isinstance(result, Died) else result
        yield done
    yield from kept


def _record_death(cell: Cell, died: Died, results: Results) -> Done:
    record = results.read(cell.key)
    if record is None or record.status == "failed":
        deaths = 1 + (record.deaths if record else 0)
        record = results.write(new_record(cell, "failed", str(died), deaths=deaths), None)
    return Done(cell, record, seconds=0.0)


def attempt(cell: Cell, results: Results) -> Done:
    """Run a cell and write its record: ok, skipped or failed; raises only ``UnwritableError``."""
    started = perf_counter()
    try:
        known = results.read(cell.key)
        record, timeline = run_or_explain(cell, CachedLayouts(results.root))
        if known and known.status == "ok" != record.status:
            return Done(cell, None, f"its timeline cannot be made: {record.reason}", perf_counter() - started)
        record = _merged(known, record)
        return Done(cell, results.write(record, timeline), "", perf_counter() - started)
    except UnwritableError:
        raise
    except Exception as error:
        return Done(cell, None, explain(error), perf_counter() - started)


def run_or_explain(cell: Cell, plans: CachedLayouts | None) -> "tuple[Record, pd.DataFrame | None]":
    """Run a cell and return its record, not yet written, and its timeline if one is kept."""
    try:
        added = metrics_in(cell.config_dir)
        outcome = run_experiment(cell.config, plans=plans, keep_timeline=cell.timeline, added=added)
    except IncompatibleError as error:
        return new_record(cell, "skipped", str(error)), None
    except (UserError, ExecutionError) as error:
        return new_record(cell, "failed", str(error), settled=is_settled(cell, error)), None
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        return new_record(cell, "failed", explain(error)), None
    return record_of(cell, outcome), outcome.timeline


def is_settled(cell: Cell, error: Exception) -> bool:
    """Return whether a failure is final: a simulated program never fits memory, a trained one may on a retry."""
    return isinstance(error, OutOfMemoryError) and is_simulated(cell)


def is_simulated(cell: Cell) -> bool:
    """Whether a cell comes out the same on every machine."""
    executor: Any = class_of(cell.config.harness["_target_"])
    return not executor.trains


def is_beside(config: RunConfig, other: RunConfig) -> bool:
    """Return whether two runs have the same job and seed, according to their groups."""
    names = ("workload", "model", "cluster", "harness", "seed")
    return all(getattr(config, name) == getattr(other, name) for name in names)


def lacks_metrics(cell: Cell, record: Record) -> bool:
    """Whether a metric of the cell's folder is newer than its good record; training computes none of them."""
    added = [one.name for one in metrics_in(cell.config_dir) if one.compute and one.name not in record.metrics]
    return bool(added) and record.status == "ok" and is_simulated(cell)
