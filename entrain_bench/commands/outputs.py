"""Figures and documents by name, and how they are updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter

from entrain_bench.answers.documents.claims import claims_output
from entrain_bench.answers.documents.posterior import posterior_output
from entrain_bench.answers.documents.results import results_output
from entrain_bench.answers.documents.tables import load_tables, tables_output
from entrain_bench.answers.text import count as plural
from entrain_bench.answers.tracking import store_path
from entrain_bench.answers.tracking.log import tracking_uri
from entrain_bench.base.errors import UnwritableError, UserError, unknown_choice
from entrain_bench.commands.publish import log_to_mlflow, write_tables
from entrain_bench.commands.recommend import recommendation_output
from entrain_bench.commands.watch import Watch, say
from entrain_bench.figures._runner import discover, figure_output, sweeps_of
from entrain_bench.lab.ledger.page import calibration_output
from entrain_bench.records.sweeps import PlannedSweep
from entrain_bench.run.cells import Done
from entrain_bench.run.parallel import num_processes
from entrain_bench.run.study import Output, Study, SweepOverrides, bring_up_to_date

# With runs of their own that no figure shares; made when named, and for the reference.
OF_THEIR_OWN = ("tables", "posterior", "recommendation", "calibration")
# Made only when named: training on ranks of this machine takes longer and cannot run everywhere; the quick figure is
# a part of the whole one.
ON_REQUEST = frozenset({"measured_gantt", "quick", *OF_THEIR_OWN})
DOCUMENTS = {
    "calibration": "Predicted and published iteration times; calibration.md.",
    "claims": "Verdicts on published claims; claims.csv, claims.md and claims/<paper>.md.",
    "posterior": "P(fastest) and intervals of leads under draws of hardware constants; posterior.csv.",
    "recommendation": "The README's recommendation; tables/recommendation.md.",
    "results": "Iteration times of every strategy; results.md.",
    "tables": "Measured tables of docs pages; tables/<name>.md.",
}


def summaries(config_dir: str | None = None) -> dict[str, str]:
    """Every figure and document by name, and what it shows; also those of a folder of the user's."""
    theirs = {table.name: table.title for table in (load_tables(config_dir) if config_dir else ())}
    known = discover(config_dir) | DOCUMENTS
    if taken := [*known.keys() & theirs.keys()]:
        raise UserError(f"{config_dir}: table {taken[0]}: must have a name that no figure or document has")
    return known | theirs


def outputs(names: Sequence[str] = (), config_dir: str | None = None) -> list[Output]:
    """Return the named figures and documents; without names all that are not made on request only.

    Figures, tables and claims include those of ``config_dir``, a folder of the user's. If claims are named, they are
    those of the folder alone, if it has any. ``UserError`` for an unknown name.
    """
    known = summaries(config_dir)
    for name in names:
        if name not in known:
            raise unknown_choice("figure", name, known)
    makers: Mapping[str, Callable[[], Output]] = {name: partial(figure_output, name, config_dir) for name in known} | {
        "calibration": calibration_output,
        "claims": partial(claims_output, config_dir, theirs=bool(names)),
        "posterior": posterior_output,
        "recommendation": recommendation_output,
        "results": results_output,
        "tables": tables_output,
        **{table.name: partial(tables_output, table) for table in (load_tables(config_dir) if config_dir else ())},
    }
    return [makers[name]() for name in dict.fromkeys(names) or (name for name in known if name not in ON_REQUEST)]


def reference_outputs() -> list[Output]:
    """Those whose results are committed, whatever machine made them; they wait for posterior runs that they show."""
    return [replace(output, needs_further=True) for output in (*outputs(), *outputs(OF_THEIR_OWN))]


def make(
    wanted: Sequence[Output],
    study: Study,
    mlflow: bool = True,
    mlflow_uri: str | None = None,
    retry_failed: bool = False,
) -> bool:
    """Run what is missing, write the outputs and log what was run; returns whether nothing is missing from them.

    Whatever ends it early, what was run until then is logged and in the tables.
    """
    results = study.results
    results.prepare()
    incomplete = False
    watch = Watch(0)

    def count(done: Done, total: int) -> None:
        # Cells that are asked for their timelines, once others turned out to have none, come on top.
        watch.total = total
        watch(done)

    # There while something that was run may not have been logged, because it was ended or went wrong.
    pending = results.root / "mlflow.pending"
    unlogged = pending.exists() or not (tracking_uri(mlflow_uri) or store_path(results).exists())
    made: list[Output] = []
    # A thread of its own: while it logs, others run.
    logging = ThreadPoolExecutor(1)
    logs = list[Future[bool]]()
    ended = False

    def log(output: Output) -> None:
        cells = study.cells_by_key(output.needed(study))
        if watch.run:
            PlannedSweep(output.name, {key: " ".join(cell.overrides) for key, cell in cells.items()}).write(results)
        if not mlflow or not (watch.run or unlogged):
            return
        with suppress(OSError):
            pending.touch()
        for experiment, sweeps in () if ended else experiments_of(output).items():
            keys = [*study.cells_by_key(sweeps)]
            records = [record for key in keys if (record := results.read(key))]
            drawn = [one for one in made if output in made and experiment in experiments_of(one)]
            paths = [results.root / path for one in drawn for path in one.committed]
            files = [path for path in paths if path.exists()]
            logs.append(logging.submit(log_to_mlflow, results, records, experiment, mlflow_uri, files))

    try:
        making = bring_up_to_date(wanted, study, num_processes(), count, retry_failed)
        for number, (output, problem) in enumerate(making, start=1):
            incomplete = incomplete or bool(problem)
            note = f": incomplete: {problem}" if problem else ""
            say(f"[{number}/{len(wanted)}] {output.name}{note}")
            made.append(output)
            log(output)
    except (KeyboardInterrupt, UnwritableError):
        # Nobody waits for MLflow at the end, and a full disk has no room for it: the next time makes up for it.
        ended = True
        raise
    finally:
        for output in wanted:
            if watch.run and output not in made:
                log(output)
        if watch.run:
            write_tables(results)
        logging.shutdown(wait=not ended, cancel_futures=ended)
    if all(each.result() for each in logs):
        pending.unlink(missing_ok=True)
    what = plural(len(wanted), "figure or document", "figures and documents")
    say(f"{what} in {results.root} ({perf_counter() - watch.started:.0f} s, {watch.run} runs)")
    return not incomplete


def experiments_of(output: Output) -> dict[str, list[SweepOverrides]]:
    """The sweeps behind an output by MLflow's names for them: their figure, or else the output."""
    figures = dict.fromkeys(text.removeprefix("figure=") for sweep in output.sweeps for text in sweep[:1])
    known = discover()
    by_figure = {figure: [*sweeps_of(figure).values()] for figure in figures if figure in known}
    whole = {sweep for sweeps in by_figure.values() for sweep in sweeps}
    rest = [sweep for sweep in output.sweeps if sweep not in whole]
    if not whole <= {*output.sweeps}:
        return {output.name: [*output.sweeps]}
    return by_figure | ({output.name: rest} if rest or not by_figure else {})
