"""Figures and documents by name, and how they are updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

from entrain_bench.answers.documents.claims import claims_output
from entrain_bench.answers.documents.posterior import posterior_output, posterior_sweeps, read_plan
from entrain_bench.answers.documents.results import results_output
from entrain_bench.answers.documents.tables import tables_output
from entrain_bench.answers.text import count as plural
from entrain_bench.answers.text import listing
from entrain_bench.answers.tracking import store_path
from entrain_bench.answers.tracking.log import tracking_uri
from entrain_bench.base.errors import unknown_choice
from entrain_bench.commands.publish import log_to_mlflow, write_tables
from entrain_bench.commands.recommend import recommendation_output
from entrain_bench.commands.watch import Watch, say
from entrain_bench.figures._runner import discover, figure_output
from entrain_bench.lab.ledger.page import calibration_output
from entrain_bench.records.records import PlannedSweep
from entrain_bench.run.cells import Done
from entrain_bench.run.parallel import num_processes
from entrain_bench.run.study import Output, Study, bring_up_to_date

# Figures of one question each, which results.md does not show: 1,600 runs more (``make appendix``).
APPENDIX = (
    "context_length",
    "forward_variability",
    "out_of_the_box",
    "robustness",
    "sensitivity",
    "tuning_budget",
    "twins",
)
# With runs of their own that no figure shares; made when named, and for the reference.
OF_THEIR_OWN = (*APPENDIX, "tables", "claims", "posterior", "recommendation", "calibration")
# Made only when named: training on ranks of this machine takes longer and cannot run everywhere; the quick figure is
# a part of the whole one.
ON_REQUEST = frozenset({"measured_gantt", "quick", *OF_THEIR_OWN})
# Prefix of the override that chooses a figure's sweep.
FIGURE = "figure="
DOCUMENTS = {
    "calibration": "Predicted and published iteration times; calibration.md.",
    "claims": "Verdicts on published claims; claims.md and claims/<paper>.md.",
    "posterior": "P(fastest) and intervals of leads under draws of hardware constants; posterior.csv.",
    "recommendation": "The README's recommendation; tables/recommendation.md.",
    "results": "Iteration times of every strategy; results.md.",
    "tables": "Measured tables of docs pages; tables/<name>.md.",
}


def summaries(config_dir: str | None = None) -> dict[str, str]:
    """Every figure and document by name, with its content; also figures of the user's folder."""
    return discover(config_dir) | DOCUMENTS


def outputs(names: Sequence[str] = (), config_dir: str | None = None) -> list[Output]:
    """Return the named figures and documents; without names all that are not made on request only.

    Figures include those of ``config_dir``, a folder of the user's. ``UserError`` for an unknown name.
    """
    known = summaries(config_dir)
    for name in names:
        if name not in known:
            raise unknown_choice("figure", name, known)
    makers: Mapping[str, Callable[[], Output]] = {name: partial(figure_output, name, config_dir) for name in known} | {
        "calibration": calibration_output,
        "claims": claims_output,
        "posterior": posterior_output,
        "recommendation": recommendation_output,
        "results": results_output,
        "tables": tables_output,
    }
    return [makers[name]() for name in dict.fromkeys(names) or (name for name in known if name not in ON_REQUEST)]


def files_of(output: Output, root: Path) -> str:
    """Return the files of an output in short, ``results/figures/quick.{pdf,png,csv,json}``; empty for none."""
    suffixes = defaultdict[str, list[str]](list)
    for file in (*output.committed, *output.files):
        stem, _, suffix = file.rpartition(".")
        suffixes[stem].append(suffix)
    texts = (f"{stem}.{each[0] if len(each) == 1 else f'{{{",".join(each)}}}'}" for stem, each in suffixes.items())
    shown = [f"{root}/{text}" for text in texts]
    return listing(shown) if shown else ""


def reference_outputs() -> list[Output]:
    """Outputs with committed results, made on any machine; they wait for posterior runs that they show."""
    return [replace(output, needs_further=True) for output in (*outputs(), *outputs(OF_THEIR_OWN))]


def make(
    wanted: Sequence[Output],
    study: Study,
    mlflow: bool = True,
    mlflow_uri: str | None = None,
    retry_failed: bool = False,
) -> bool:
    """Run missing runs, write the outputs and log the runs; returns whether the outputs are complete.

    Runs before an interrupt are in the tables; the next call logs them.
    """
    results = study.results
    results.prepare()
    incomplete = False
    watch = Watch(0)

    def count(done: Done, total: int) -> None:
        # Cells that are asked for their timelines, once others turned out to have none, come on top.
        watch.total = total
        watch(done)
        if mlflow and watch.run:
            with suppress(OSError):
                pending.touch()

    # There while something that was run may not have been logged, because it was ended or went wrong.
    pending = results.root / "mlflow.pending"
    unlogged = pending.exists() or not (tracking_uri(mlflow_uri) or store_path(results).exists())
    try:
        making = bring_up_to_date(wanted, study, num_processes(), count, retry_failed)
        for number, (output, problem) in enumerate(making, start=1):
            incomplete = incomplete or bool(problem)
            note = f": incomplete: {problem}" if problem else ""
            say(f"[{number}/{len(wanted)}] {output.name}{note}")
    finally:
        if watch.run:
            for output in wanted:
                cells = study.cells_by_key(output.needed(study))
                planned = {key: " ".join(cell.overrides) for key, cell in cells.items()}
                PlannedSweep(output.name, planned).write(results)
            write_tables(results)
    if mlflow and (watch.run or unlogged):
        with suppress(OSError):
            pending.touch()
        if _log(wanted, study, mlflow_uri):
            pending.unlink(missing_ok=True)
    what = plural(len(wanted), "figure or document", "figures and documents")
    say(f"{what} in {results.root} ({perf_counter() - watch.started:.0f} s, {watch.run} runs)")
    return not incomplete


def _log(wanted: Sequence[Output], study: Study, mlflow_uri: str | None) -> bool:
    """Log runs and files, an experiment for every figure and for the rest of an output; returns whether all went well.

    A figure's sweep begins with its name.
    """
    keys = defaultdict[str, dict[str, None]](dict)
    files = defaultdict[str, dict[str, None]](dict)
    for output in wanted:
        for sweep in output.sweeps:
            name = sweep[0].removeprefix(FIGURE) if sweep[:1] and sweep[0].startswith(FIGURE) else output.name
            keys[name] |= dict.fromkeys(study.cells_by_key([sweep]))
            files[name] |= dict.fromkeys(output.committed)
    if (drawn := read_plan().sweep) in keys:
        keys[drawn] |= dict.fromkeys(study.cells_by_key(posterior_sweeps(study)))
    logged = []
    for name, mine in keys.items():
        records = [record for key in mine if (record := study.results.read(key))]
        paths = [path for file in files[name] if (path := study.results.root / file).exists()]
        logged.append(log_to_mlflow(study.results, records, name, mlflow_uri, paths))
    return all(logged)
