"""Figures and documents as outputs of sweeps, and the runs of these sweeps that are missing."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import Composer
from entrain_bench.records.cells import Cell
from entrain_bench.records.code import hash_of, sources_of
from entrain_bench.records.records import Results, labels_of
from entrain_bench.run.cells import Done, is_beside, run_cells

type SweepOverrides = tuple[str, ...]


class Study:
    """Sweeps over one folder of results, with the choices of a user's folder; each is composed once."""

    def __init__(self, results: Results, config_dir: str | None = None) -> None:
        self.results = results
        self.config_dir = config_dir
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
        """Return why runs of a sweep have no result; empty if all have one."""
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
    """A figure or a document."""

    name: str
    sweeps: Sequence[SweepOverrides]  # those whose cells must have run
    write: Callable[[Study], str]  # brings its files up to date and returns its missing runs, if any
    committed: Sequence[str] = ()  # files that are kept with the code, by their paths in the folder of results
    # Cells whose timelines it reads, in groups: of each group the first cell that has one.
    timelines: Callable[[Study], Iterable[Sequence[Cell]]] = lambda _: ()
    files: Sequence[str] = ()  # other files; an output without any file is always written
    reads: Sequence[SweepOverrides] = ()  # further sweeps, of which it reads configurations alone
    module: str = ""  # whose code writes it, besides that of ``write``
    details: Sequence[str] = ()  # other values that its files depend on
    further: Callable[[Study], Sequence[SweepOverrides]] = lambda _: ()  # sweeps that follow from results of ``sweeps``
    needs_further: bool = False  # their cells must have run, too

    def needed(self, study: Study) -> list[SweepOverrides]:
        """The known sweeps whose cells must have run."""
        return [*self.sweeps, *(self.further(study) if self.needs_further else ())]

    def bring_up_to_date(self, study: Study) -> str:
        """Write the files unless ``stamps/<name>.json`` has the hashes of inputs and files; returns missing runs."""
        root = study.results.root
        path = root / "stamps" / f"{self.name}.json"
        files = [root / file for file in (*self.committed, *self.files)]
        inputs = self._inputs(study)

        def stamp(inputs: str) -> bytes:
            return json.dumps([inputs, *map(_hash_of_file, files)], indent=1).encode()

        if files and inputs and path.exists() and path.read_bytes() == stamp(inputs):
            return ""
        problem = self.write(study)
        if files:
            # Where there can be no stamp, the output is written again next time.
            with suppress(OSError):
                write_atomically(path, stamp("" if problem else inputs))
        return problem

    def _inputs(self, study: Study) -> str:
        """Hash of code, templates, texts and records that the output depends on; empty if its code is unknown."""
        modules = {getattr(self.write, "func", self.write).__module__, *filter(None, [self.module])}
        try:
            sources = sources_of(modules)
        except UserError:
            return ""
        if not sources.keys() >= modules:
            return ""
        details = [hash_of(sources), self.name, study.composer.version, study.config_dir or "", *self.details]
        digest = hashlib.sha256(json.dumps(details).encode())
        for file in templates_of(sources):
            digest.update(file.read_bytes())
        results = study.results
        for sweep in (*self.sweeps, *self.reads, *self.further(study)):
            for cell in study.cells(*sweep):
                digest.update(f"{cell.key} {results.digest(cell.key)} {' '.join(cell.overrides)}\n".encode())
            digest.update(b"\0")
        for cell in (cell for group in self.timelines(study) for cell in group):
            record = results.read(cell.key)
            has = record is not None and results.has_timeline(record)
            digest.update(f"{cell.key} {record.timeline_sha256 if record and has else ''}\n".encode())
        return digest.hexdigest()[:16]


def templates_of(modules: Iterable[str]) -> list[Path]:
    """Return the files in folders ``templates`` next to some modules."""
    root = Path(__file__).parents[2]
    folders = {root.joinpath(*module.split(".")[:-1], "templates") for module in modules}
    return [file for folder in sorted(folders) for file in sorted(folder.glob("*"))]


def _hash_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def by_strategy(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells in groups of one strategy, workload, model and harness."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    name_of = itemgetter("strategy", "workload", "model", "harness")
    for cell in cells:
        groups.setdefault(name_of(labels_of(cell.config)), []).append(cell)
    return [*groups.values()]


def shown_ranks(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of a sweep whose ranks are drawn: those of one job at one seed."""

    def place(cell: Cell) -> tuple[str, str, int]:
        return str(cell.config.workload["name"]), str(cell.config.model["name"]), cell.config.seed

    first = min(cells, key=place, default=None)
    return [cell for cell in cells if first and is_beside(cell.config, first.config)]


def bring_up_to_date(
    outputs: Sequence[Output],
    study: Study,
    processes: int,
    watch: Callable[[Done, int], None],
    retry_failed: bool = False,
) -> Iterator[tuple[Output, str]]:
    """Run missing cells of outputs, reported to ``watch``; yield each output once written, and its missing runs."""
    waiting = [*outputs]
    tried = dict[str, bool]()
    while waiting:
        lacking = [(output, _lacking(output, study, retry_failed, tried)) for output in waiting]
        cells = _union(cells for _, cells in lacking)
        tried |= {key: cell.timeline for key, cell in cells.items()}
        study.composer.save()
        waiting = []
        for output, missing in lacking:
            if not missing:
                yield output, output.bring_up_to_date(study)
        for done in run_cells(cells.values(), study.results, processes, retry_failed=retry_failed):
            watch(done, len(tried))
            for output, missing in lacking:
                if missing.pop(done.cell.key, None) is None or missing:
                    continue
                if _lacking(output, study, retry_failed, tried):
                    waiting.append(output)
                else:
                    yield output, output.bring_up_to_date(study)


def _union(groups: Iterable[Mapping[str, Cell]]) -> dict[str, Cell]:
    """Every cell once, those of a job together; with its timeline if one of the groups wants it."""
    union = dict[str, Cell]()
    for cells in groups:
        for key, cell in sorted(cells.items(), key=lambda item: _job_of(item[1])):
            union[key] = replace(cell, timeline=cell.timeline or (key in union and union[key].timeline))
    return union


def _lacking(output: Output, study: Study, retry_failed: bool, tried: Mapping[str, bool]) -> dict[str, Cell]:
    """The cells that must run before an output can be written, by their keys.

    A cell keeps its timeline if the output reads it, or if the report draws its ranks. If a group's first cell has
    none, the next one is asked. ``tried`` has the keys of cells that ran already, and whether timelines were asked for.
    """
    results = study.results
    cells = study.cells_by_key(output.needed(study))
    lacking = {
        key: replace(cell, timeline=False)
        for key, cell in cells.items()
        if key not in tried and not ((record := results.read(key)) and record.is_left_alone(retry_failed))
    }
    asked = {cell.key: cell for cell in shown_ranks([*cells.values()]) if cell.key in lacking}
    for group in output.timelines(study):
        for cell in group:
            record = results.read(cell.key)
            if cell.key in lacking:
                asked[cell.key] = cell
            elif record is None or record.status != "ok" or record.timeline is False:
                continue
            elif not results.has_timeline(record) and not tried.get(cell.key):
                asked[cell.key] = cell
            break
    return lacking | asked


def _job_of(cell: Cell) -> tuple[str, ...]:
    """Return a sort key that groups cells of a job, because a worker reuses work between them."""
    return tuple(sorted(text for text in cell.overrides if not text.startswith("strategy")))
