"""``entrain-bench KEY=VALUE ...``: execute one run, or with ``--multirun`` all unfinished runs of a sweep."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from entrain_bench.base.errors import UnwritableError, UserError, unknown_choice
from entrain_bench.commands.live import watched
from entrain_bench.commands.watch import Watch, say
from entrain_bench.config.compose import IGNORED, Composer, Sweep
from entrain_bench.config.grammar import RUN_KEYS, NoKeys, Request, Verb
from entrain_bench.config.line import CONFIG_DIR, MULTIRUN
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.cells import Cell
from entrain_bench.records.metrics import KNOWN, metrics_in
from entrain_bench.records.records import Results
from entrain_bench.run.cells import Done, is_beside, lacks_metrics, run_cells, run_one

EXIT_FAILED = 1
# Choices of ``hydra/launcher`` whose cells we run ourselves, so that cells are composed once and cannot take each other
# down: basic in this process, joblib in processes of this machine, ray in a cluster.
BASIC = "basic"
JOBLIB = "joblib"
RAY = "ray"
LAUNCHING = ("hydra/", "hydra.launcher.", "hydra.sweeper.", "hydra.sweep.")
VERB = Verb(NoKeys, RUN_KEYS, options=(MULTIRUN, CONFIG_DIR))


def main(request: Request[NoKeys]) -> int:
    """Run a run or sweep; return 0, or 1 if a run failed; ``UserError`` for bad input."""
    if request.hydra:
        from entrain_bench.commands.hydra_app import run_hydra

        return run_hydra(request)
    if not request.multirun and any(text.lstrip("+").startswith("figure=") for text in request.overrides):
        raise UserError("figure: is a sweep. Add --multirun")
    if not request.multirun and (launching := [text for text in request.overrides if text.startswith(LAUNCHING)]):
        raise UserError(f"{launching[0]}: is a setting of sweeps. Add --multirun")
    if request.multirun and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("--multirun: cannot run under torchrun, which trains one run. Start the sweep without torchrun")
    for text in request.overrides:
        if text.lstrip("+~").startswith(IGNORED):
            say(f"{text}: is ignored; records and figures go to results_dir")
    composer = Composer(request.config_dir)
    if request.multirun:
        return _sweep(composer, request)
    config = _checked(composer.run(request.overrides), request.config_dir)
    cell = Cell.of(request.overrides, config, request.config_dir or "")
    results = Results(Path(config.results_dir))
    record = results.kept(cell)
    if record and record.status == "ok" and not lacks_metrics(cell, record):
        say(f"finished earlier: {results.record_path(cell.key)}")
    else:
        results.prepare()
        with watched(config, results) as progress:
            record = run_one(cell, results, progress)
    if not results.trace_path(cell.key).exists():
        try:
            results.write_trace(cell.key)
        except OSError as error:
            say(f"entrain-bench: the Chrome trace cannot be written ({error})")
    composer.save()
    # A run starts before the words on it are imported.
    from entrain_bench.answers.tracking.log import sweep_name
    from entrain_bench.commands.publish import publish, say_outdated

    name = sweep_name(request.overrides)
    records = publish(results, {record.key: ""}, name, config.mlflow, config.mlflow_uri, columns=config.columns)
    say_outdated(records)
    say(f"written: {results.record_path(record.key)}")
    return 0


def _checked(config: RunConfig, config_dir: str | None) -> RunConfig:
    """The configuration; ``UserError`` for a column of the table that is no metric."""
    if config.columns:
        # Imports pandas, which a run needs only once it has ended.
        from entrain_bench.records.tables import GAP

        known = [*KNOWN, GAP, *(metric.name for metric in metrics_in(config_dir or ""))]
        for name in config.columns:
            if name not in known:
                raise unknown_choice("columns", name, known)
    return config


def _sweep(composer: Composer, request: Request[NoKeys]) -> int:
    """Run the cells of a sweep and publish their records; returns 0, or 1 if a cell failed."""
    from entrain_bench.answers.text import count
    from entrain_bench.answers.tracking.log import sweep_name
    from entrain_bench.commands.hydra_app import has_sweeper, run_hydra
    from entrain_bench.commands.publish import publish, say_outdated

    if has_sweeper(request.overrides):
        return _sweep_by_plugin(composer, request)
    sweep = composer.sweep(request.overrides)
    folders = {text.partition("=")[2] for cell in sweep.cells for text in cell if text.startswith("results_dir=")}
    if len(folders) > 1:
        raise UserError(f"results_dir={','.join(sorted(folders))}: must be one folder for the whole sweep")
    first = _checked(composer.run(sweep.cells[0]), request.config_dir)
    results = Results(Path(first.results_dir))
    watch = Watch(len(sweep.cells))
    keys = dict[str, str]()
    results.prepare()
    name = sweep_name(request.overrides)
    waiting = iter(sweep.cells)

    def composed() -> Iterator[Cell]:
        for overrides in waiting:
            cell = Cell.composed(overrides, composer)
            if cell.key in keys:
                watch.finished += 1
                continue
            keys[cell.key] = " ".join(cell.overrides)
            # A sweep keeps the timelines of one job.
            yield replace(cell, timeline=is_beside(cell.config, first))

    try:
        if sweep.launcher in (BASIC, JOBLIB, RAY):
            for done in _run(sweep, composed(), results, first.retries_failed):
                watch(done)
        elif not all(results.kept(cell, first.retries_failed) for cell in [*composed()]):
            run_hydra(request)
    except BaseException as error:
        if watch.run or isinstance(error, UnwritableError):
            # The command does not wait for MLflow at the end, and a full disk cannot take it: the next command logs the
            # rest.
            mlflow = first.mlflow and not isinstance(error, KeyboardInterrupt | UnwritableError)
            # A copy, for a thread may still add to them.
            publish(results, {**keys}, name, mlflow, first.mlflow_uri, [" ".join(rest) for rest in [*waiting]])
        raise
    composer.save()
    records = publish(results, keys, name, first.mlflow, first.mlflow_uri, columns=first.columns)
    say_outdated(records)
    say(f"written: {count(len(records), 'record')} in {results.root}/runs")
    if lost := len(keys) - len(records):
        raise UserError(f"results_dir={results.root}: {lost} of {len(keys)} runs have no record. Run the sweep again")
    return EXIT_FAILED if any(record.status == "failed" for record in records) else 0


def _sweep_by_plugin(composer: Composer, request: Request[NoKeys]) -> int:
    from entrain_bench.answers.text import count
    from entrain_bench.answers.tracking.log import sweep_name
    from entrain_bench.commands.hydra_app import run_hydra
    from entrain_bench.commands.publish import publish

    fixed = [text for text in request.overrides if not parse(text).is_sweep_override()]
    config = _checked(composer.run(fixed), request.config_dir)
    results = Results(Path(config.results_dir))
    results.prepare()
    before = {*results.keys()}
    code = run_hydra(request)
    keys = dict.fromkeys(sorted({*results.keys()} - before), "")
    name = sweep_name(request.overrides)
    publish(results, keys, name, config.mlflow, config.mlflow_uri, columns=config.columns)
    say(f"written: {count(len(keys), 'record')} in {results.root}/runs")
    return code


def _run(sweep: Sweep, cells: Iterable[Cell], results: Results, retry_failed: bool) -> Iterator[Done]:
    if sweep.launcher == BASIC:
        return run_cells(cells, results, retry_failed=retry_failed)
    if sweep.launcher == RAY:
        from entrain_bench.run.parallel import RayCluster

        return run_cells(cells, results, sweep.num_processes, RayCluster(sweep.address), retry_failed)
    processes = sweep.num_processes if sweep.num_processes > 0 else os.cpu_count() or 1
    return run_cells(cells, results, processes, retry_failed=retry_failed)
