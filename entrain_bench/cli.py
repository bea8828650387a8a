"""The ``entrain-bench`` command: one run, or a Hydra sweep that skips what is finished and survives what fails."""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import hydra
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress

from entrain_bench.config.command_line import (
    CONFIG_NAME,
    Cell,
    add_config_dir,
    compose_cells,
    parse_arguments,
)
from entrain_bench.config.schema import RunConfig, register_schema
from entrain_bench.config.tree import CONFIG_MODULE
from entrain_bench.errors import ExecutionError, IncompatibleError, UserError
from entrain_bench.experiment import run_experiment
from entrain_bench.records.keys import identify
from entrain_bench.records.records import Record, Results, new_record
from entrain_bench.records.report import describe_cell, print_table
from entrain_bench.records.tracking import log_records

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130
NUM_CELLS_VARIABLE = "ENTRAIN_BENCH_NUM_CELLS"
TRACEBACK_VARIABLE = "ENTRAIN_BENCH_TRACEBACK"


def main() -> None:
    """Console entry point; exits with 0, 1 (a run failed), 2 (bad input) or 130 (interrupted)."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run the command line; returns its exit code."""
    try:
        parsed = parse_arguments(arguments)
        # Hydra wants options before overrides.
        ordered = [*(text for text in arguments if text not in parsed.overrides), *parsed.overrides]
        if any((parsed.help, parsed.hydra_help, parsed.cfg, parsed.info, parsed.shell_completion)):
            add_config_dir(parsed.config_dir)
            _hand_to_hydra(ordered)
            return 0
        _reject_unsupported(parsed)
        cells = compose_cells(parsed.overrides, parsed.config_dir, parsed.multirun)
        records = _sweep(ordered, cells) if parsed.multirun else _single(cells[0].config)
        _publish(cells[0].config, records, " ".join(parsed.overrides) or "defaults")
        return EXIT_FAILED if any(record.status == "failed" for record in records) else 0
    except UserError as error:
        _show_error(error, str(error))
        return EXIT_USER_ERROR
    except ExecutionError as error:
        _show_error(error, str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        _show_error(error, f"{_internal(error)} (set {TRACEBACK_VARIABLE}=1 for more)")
        return EXIT_FAILED


def _reject_unsupported(parsed: Namespace) -> None:
    if parsed.config_name or parsed.config_path:
        raise UserError("--config-name, --config-path: not supported; --config-dir adds a folder of yours")
    if not parsed.multirun and any(text.lstrip("+").startswith("figure=") for text in parsed.overrides):
        raise UserError("figure: names a sweep; add --multirun")
    if parsed.multirun and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("--multirun: not under torchrun, whose ranks train one run; start the sweep without it")


def _single(config: RunConfig) -> list[Record]:
    """Run one configuration, or read its finished record; bad input raises and leaves nothing behind."""
    results = Results(Path(config.results_dir))
    key, _ = identify(config)
    record = results.read(key)
    if record and record.status == "ok":
        print(f"finished earlier: {results.record_path(key)}", file=sys.stderr)
        return [record]
    results.check_writable()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{config.strategy['name']} iterations", total=config.iterations)
        outcome = run_experiment(config, lambda done: progress.update(task, completed=done))
    record = new_record(config, "ok", outcome=outcome)
    results.write(record, outcome.timeline)
    return [record]


def _sweep(arguments: Sequence[str], cells: Sequence[Cell]) -> list[Record]:
    """Let Hydra's sweeper and launcher run the cells; every cell leaves a record, whatever happens to it.

    Raises:
        UserError: before anything runs, for data that cannot be read, a damaged record or an unwritable folder; and
            if a cell left no record.
    """
    folders = sorted({cell.config.results_dir for cell in cells})
    if len(folders) > 1:
        raise UserError(f"results_dir={','.join(folders)}: must be one folder for the whole sweep")
    results = Results(Path(folders[0]))
    keys = []
    for cell in cells:
        try:
            keys.append(identify(cell.config)[0])
        except UserError as error:
            raise UserError(f"{error} (in {' '.join(cell.overrides)})") from error
    before = [results.read(key) for key in keys]
    results.check_writable()
    os.environ[NUM_CELLS_VARIABLE] = str(len(cells))
    if not all(record and record.finished for record in before):
        _hand_to_hydra(arguments)
    records = [results.read(key) for key in dict.fromkeys(keys)]
    if lost := sum(record is None for record in records):
        raise UserError(f"results_dir={results.root}: {lost} of {len(records)} cells left no record")
    return [record for record in records if record]


def _hand_to_hydra(arguments: Sequence[str]) -> None:
    register_schema()
    before = sys.argv
    sys.argv = ["entrain-bench", *arguments]
    try:
        _run_cell()
    finally:
        sys.argv = before


@hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)
def _run_cell(hydra_config: DictConfig) -> None:
    """One cell of a sweep: skip it if finished, run it, and record what came out. Never raises."""
    place = f"[{HydraConfig.get().job.num + 1}/{os.environ.get(NUM_CELLS_VARIABLE, '?')}]"
    config = RunConfig.from_hydra(hydra_config)
    results = Results(Path(config.results_dir))
    started = perf_counter()
    try:
        record = results.read(identify(config)[0])
        if record and record.finished:
            return
        record, timeline = _run_or_explain(config)
        results.write(record, timeline)
        print(describe_cell(place, record, perf_counter() - started), file=sys.stderr, flush=True)
    except UserError as error:
        _show_error(error, f"{place} not recorded: {error}")
    except Exception as error:
        _show_error(error, f"{place} not recorded: {_internal(error)}")


def _run_or_explain(config: RunConfig) -> tuple[Record, pd.DataFrame | None]:
    """The record of a cell that ran, was skipped or failed."""
    try:
        outcome = run_experiment(config)
    except IncompatibleError as error:
        return new_record(config, "skipped", str(error)), None
    except (UserError, ExecutionError) as error:
        return new_record(config, "failed", str(error)), None
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        return new_record(config, "failed", _internal(error)), None
    return new_record(config, "ok", outcome=outcome), outcome.timeline


def _publish(config: RunConfig, records: Sequence[Record], name: str) -> None:
    results = Results(Path(config.results_dir))
    results.write_table()
    print_table(records)
    if not config.mlflow:
        return
    try:
        logged = log_records(results, records, name)
    except Exception as error:
        # MLflow is a view of the records; they are safe whatever happens to it.
        _show_error(error, f"runs are recorded, but could not be logged to MLflow: {_internal(error)}")
        return
    if logged:
        print(f"logged {logged} runs to {results.root / 'mlflow.db'} (make ui shows them)", file=sys.stderr)


def _show_error(error: Exception, line: str) -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    print(f"entrain-bench: {' '.join(line.split())}", file=sys.stderr)


def _internal(error: Exception) -> str:
    return f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    main()
