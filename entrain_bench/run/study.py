"""What figures and documents are made of: sweeps, and the cells of them that still have to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from entrain_bench.config.compose import Composer
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results
from entrain_bench.run.cells import Done, run_cells

type SweepOverrides = tuple[str, ...]


class Study:
    """Sweeps over one folder of results; each is composed once.

    Args:
        results: where records are.
        config_dir: a folder of the user's with further choices; None for none.
    """

    def __init__(self, results: Results, config_dir: str | None = None) -> None:
        self.results, self.config_dir = results, config_dir
        self.composer = Composer(config_dir)
        self._cells: dict[SweepOverrides, list[Cell]] = {}

    def cells(self, *overrides: str) -> list[Cell]:
        """The cells of a sweep."""
        if overrides not in self._cells:
            sweep = self.composer.sweep(overrides)
            self._cells[overrides] = [Cell.composed(each, self.composer) for each in sweep.cells]
        return self._cells[overrides]

    def cells_by_key(self, sweeps: Iterable[SweepOverrides]) -> dict[str, Cell]:
        """The cells of several sweeps, each once, by their keys."""
        return {cell.key: cell for sweep in sweeps for cell in self.cells(*sweep)}

    def problem(self, *overrides: str) -> str:
        """What is wrong with the cells of a sweep that have no result; empty if all have one."""
        cells = self.cells(*overrides)
        records = [self.results.read(cell.key) for cell in cells]
        reasons = [
            "not run" if record is None else record.reason or record.status
            for record in records
            if record is None or not record.finished
        ]
        return f"{len(reasons)} of {len(cells)} runs have no result: {reasons[0]}" if reasons else ""


@dataclass(frozen=True, slots=True)
class Output:
    """A figure or a document.

    Attributes:
        name: what it is called.
        sweeps: those whose cells must have run.
        write: brings its files up to date and returns what is missing from it, if anything.
        committed: of its files those that are kept with the code, by their paths in the folder of results.
    """

    name: str
    sweeps: Sequence[SweepOverrides]
    write: Callable[[Study], str]
    committed: Sequence[str] = ()


def bring_up_to_date(
    outputs: Sequence[Output],
    study: Study,
    num_processes: int,
    watch: Callable[[Done, int], None],
    retry_failed: bool = False,
) -> Iterator[tuple[Output, str]]:
    """Run what the outputs miss, each cell once, and write every output as soon as its cells have run.

    Args:
        outputs: what is wanted.
        study: the sweeps.
        num_processes: cells that run at a time, as ``run_cells`` takes it.
        watch: told of every cell that was run, and how many there are in all.
        retry_failed: whether every failed cell is run again.

    Yields:
        Each output once it is written, and what is missing from it.
    """
    missing: dict[str, Cell] = {}
    waits: list[tuple[Output, set[str]]] = []
    for output in outputs:
        mine = study.cells_by_key(output.sweeps)
        lacking = {
            key: cell
            for key, cell in sorted(mine.items(), key=lambda one: _job_of(one[1]))
            if key in missing or not study.results.is_left_alone(key, retry_failed)
        }
        missing |= lacking
        waits.append((output, {*lacking}))
    study.composer.save()
    yield from ((output, output.write(study)) for output, keys in waits if not keys)
    for done in run_cells(missing.values(), study.results, num_processes):
        watch(done, len(missing))
        for output, keys in waits:
            if keys == {done.cell.key}:
                yield output, output.write(study)
            keys.discard(done.cell.key)


def _job_of(cell: Cell) -> tuple[str, ...]:
    """What a cell has in common with others of its job: a worker that has run one of them knows half of the next."""
    return tuple(sorted(text for text in cell.overrides if not text.startswith("strategy")))
