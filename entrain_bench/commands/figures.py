"""``entrain-bench figures [name ...]``: figures and documents, brought up to date."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

from entrain_bench.commands.publish import log_to_mlflow
from entrain_bench.commands.watch import Watch, say
from entrain_bench.documents.claims import claims_output
from entrain_bench.documents.results import results_output
from entrain_bench.errors import unknown_choice
from entrain_bench.figures._runner import discover, figure_output
from entrain_bench.records.records import Results
from entrain_bench.run import Done
from entrain_bench.study import Output, Study, bring_up_to_date

EXIT_FAILED = 1
# Drawn only when named: training on ranks of this machine takes longer and cannot run everywhere; the quick figure is
# a part of the whole one.
ON_REQUEST = frozenset({"measured_gantt", "quick"})
DOCUMENTS = {
    "claims": "What the papers claim, and what comes out here; claims.md and claims.csv.",
    "results": "Iteration times of every strategy; results.md.",
}
# Every process compiles the timed loops anew and holds about half a GiB.
MAX_PROCESSES = 8


def main(arguments: Sequence[str]) -> int:
    """Bring the named figures and documents up to date, or all that need no training.

    Returns:
        0, or 1 if a cell failed or data is missing.

    Raises:
        UserError: for unknown names, and a folder that cannot be written.
    """
    figures = discover()
    summaries = figures | DOCUMENTS
    parser = argparse.ArgumentParser(
        prog="entrain-bench figures",
        description="Run what is missing; draw <results-dir>/figures/<name>.{pdf,png,csv} and write documents.",
        epilog="names:\n" + "\n".join(f"  {name:22}{summary}" for name, summary in summaries.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="what to make; default: all that needs no training")
    parser.add_argument("--results-dir", default="results", help="where runs are and files go (default: results)")
    parser.add_argument("--config-dir", help="a folder of yours with further strategies, workloads, claims")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in summaries:
            raise unknown_choice("figure", name, summaries)
    names = list(dict.fromkeys(options.names)) or [name for name in summaries if name not in ON_REQUEST]
    study = Study(Results(Path(options.results_dir)), options.config_dir)
    makers: Mapping[str, Callable[[], Output]] = {name: partial(figure_output, name) for name in figures} | {
        "claims": partial(claims_output, options.config_dir),
        "results": results_output,
    }
    return make([makers[name]() for name in names], study)


def make(outputs: Sequence[Output], study: Study) -> int:
    """Run what is missing and write the outputs; returns 0, or 1 if anything is missing from them."""
    results = study.results
    results.check_writable()
    incomplete, ran, watch = False, 0, None
    started = perf_counter()

    def count(done: Done, total: int) -> None:
        nonlocal ran, watch
        watch = watch or Watch(total)
        watch(done)
        ran += 1

    for number, (output, problem) in enumerate(bring_up_to_date(outputs, study, num_processes(), count), start=1):
        incomplete = incomplete or bool(problem)
        note = f": incomplete: {problem}" if problem else ""
        say(f"[{number}/{len(outputs)}] {output.name}{note}")
    if ran:
        results.write_table()
        for sweep in dict.fromkeys(sweep for output in outputs for sweep in output.sweeps):
            found = [results.read(cell.key) for cell in study.cells(*sweep)]
            log_to_mlflow(results, [record for record in found if record], " ".join(sweep))
    say(f"{len(outputs)} figures and documents in {results.root} ({perf_counter() - started:.0f} s, {ran} runs)")
    return EXIT_FAILED if incomplete else 0


def num_processes() -> int:
    """Cells that run at a time."""
    return min(os.cpu_count() or 1, MAX_PROCESSES)
