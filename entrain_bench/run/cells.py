"""Running cells: one here, or many here or in processes of their own, each leaving its record."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any

import pandas as pd
from hydra.utils import get_class

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
from entrain_bench.records.cached_layouts import CachedLayouts
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import Identifier
from entrain_bench.records.records import Record, Results, new_record
from entrain_bench.run.experiment import run_experiment
from entrain_bench.run.workers import Died, work_off

# What works cells off, as ``workers.work_off``: a function of a cell, cells, and how many run at a time.
type WorkOff = Callable[[Callable[[Cell], Done], Iterable[Cell], int], Iterator[tuple[Cell, Done | Died]]]


@dataclass(frozen=True, slots=True)
class Done:
    """A cell that was run.

    Attributes:
        cell: the cell.
        record: what it left; None if that could not be written.
        problem: why not.
        seconds: wall time.
        ends: whether no other cell could be written either.
    """

    cell: Cell
    record: Record | None
    problem: str
    seconds: float
    ends: bool = False


def compose_cells(overrides: Sequence[str], config_dir: str | None = None, multirun: bool = False) -> list[Cell]:
    """Every cell that the overrides describe, in the sweeper's order; without ``multirun`` exactly one.

    Raises:
        UserError: for bad overrides, and data that cannot be read.
    """
    composer = Composer(config_dir)
    identifier = Identifier()
    cells = composer.sweep(overrides).cells if multirun else (tuple(overrides),)
    composed = [Cell.composed(each, composer, identifier) for each in cells]
    composer.save()
    return composed


def run_one(cell: Cell, results: Results, progress: Callable[[int], None] = lambda _: None) -> Record:
    """Run a cell here; bad input raises and leaves nothing behind.

    Args:
        cell: what to run.
        results: where its record goes.
        progress: called with the number of finished iterations.
    """
    outcome = run_experiment(cell.config, progress, plans=CachedLayouts(results.root), keep_timeline=cell.timeline)
    record = _merged(results.read(cell.key), new_record(cell, "ok", outcome=outcome))
    return results.write(record, outcome.timeline)


def _merged(known: Record | None, new: Record) -> Record:
    """The record of a run that was made again for its timeline: the known one, if the same came out."""
    if known is None or known.computed != new.computed:
        return new
    return replace(known, timeline=new.timeline)


def run_cells(
    cells: Iterable[Cell], results: Results, num_processes: int = 0, work_off: WorkOff = work_off
) -> Iterator[Done]:
    """Run cells, whatever happens to some of them; yields them as they are done.

    Cells are taken ahead in a thread, so composing them costs no time. What is wrong with a cell that cannot even be
    composed is raised as soon as it is known, and no other cell is begun.

    Args:
        cells: what to run.
        results: where records go.
        num_processes: how many run at a time, each in a process of its own that may die; 0 runs them in this one.
        work_off: what has the processes.

    Raises:
        UnwritableError: once the folder takes no more files; the cell that met it is yielded before.
    """
    ahead = _ahead(cells)
    every = (
        (_after_death(cell, done, results) if isinstance(done, Died) else done)
        for cell, done in work_off(partial(attempt, results=results), ahead, num_processes)
    )
    for done in every if num_processes else (attempt(cell, results) for cell in ahead):
        yield done
        if done.ends:
            raise UnwritableError(done.problem)


def _after_death(cell: Cell, died: Died, results: Results) -> Done:
    """Outcome of a cell whose process died: its result if already written, else a record of the death."""
    try:
        record = results.read(cell.key)
        if record is None or record.status == "failed":
            deaths = 1 + (record.deaths if record else 0)
            record = new_record(cell, "failed", str(died), deaths=deaths)
            results.write(record, None)
        return Done(cell, record, "", 0.0)
    except UnwritableError as error:
        return Done(cell, None, str(error), 0.0, ends=True)


def attempt(cell: Cell, results: Results) -> Done:
    """Run a cell and write down what came out: ok, skipped or failed. Never raises."""
    started = perf_counter()
    try:
        known = results.read(cell.key)
        record, timeline = run_or_explain(cell, CachedLayouts(results.root))
        if known and known.status == "ok" != record.status:
            return Done(cell, None, f"its timeline cannot be made: {record.reason}", perf_counter() - started)
        record = _merged(known, record)
        return Done(cell, results.write(record, timeline), "", perf_counter() - started)
    except Exception as error:
        ends = isinstance(error, UnwritableError)
        return Done(cell, None, str(error) if ends else explain(error), perf_counter() - started, ends)


def run_or_explain(cell: Cell, plans: CachedLayouts | None) -> tuple[Record, pd.DataFrame | None]:
    """Run a cell and return its record, not yet written, and its timeline if one is kept."""
    make = partial(new_record, cell)
    try:
        outcome = run_experiment(cell.config, plans=plans, keep_timeline=cell.timeline)
    except IncompatibleError as error:
        return make("skipped", str(error)), None
    except (UserError, ExecutionError) as error:
        return make("failed", str(error), settled=is_settled(cell, error)), None
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        return make("failed", explain(error)), None
    return make("ok", outcome=outcome), outcome.timeline


def is_settled(cell: Cell, error: Exception) -> bool:
    """Whether a failure is a result: a simulated program that does not fit memory never does, a trained one may."""
    return isinstance(error, OutOfMemoryError) and is_simulated(cell)


def is_simulated(cell: Cell) -> bool:
    """Whether a cell comes out the same on every machine."""
    executor: type[Any] = get_class(cell.config.harness["_target_"])
    return not executor.trains


def _ahead(cells: Iterable[Cell]) -> Iterator[Cell]:
    """The same cells, taken by a thread; what taking them raises comes before cells that wait."""
    taken = SimpleQueue[Cell | None]()
    problems = list[BaseException]()

    def take() -> None:
        try:
            for cell in cells:
                taken.put(cell)
        except BaseException as error:
            problems.append(error)
        taken.put(None)

    Thread(target=take, name="compose", daemon=True).start()
    while (cell := taken.get()) is not None and not problems:
        yield cell
    if problems:
        raise problems[0]
