"""``entrain-bench figure NAME [key=value ...]``: a figure over your own workload, model and cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from entrain_bench.answers.notices import notices
from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.commands.outputs import make
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer, swept_keys
from entrain_bench.config.schema import ASIDE
from entrain_bench.figures._own import check_names, file_name, own_sweeps
from entrain_bench.figures._runner import SUFFIXES, Drawing, discover, module_of
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import workload_of
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study
from entrain_bench.specs.model import ModelSpec

EXIT_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Run what is missing and draw the figure.

    Returns:
        0, or 1 if a cell failed or data is missing.

    Raises:
        UserError: without a figure or for an unknown one, for overrides that it does not take, data that cannot be
            read, and a folder that cannot be written.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="entrain-bench figure",
        usage="%(prog)s [-h] [--config-dir CONFIG_DIR] NAME [key=value ...]",
        description="Run what is missing and draw a figure over your own workload, model and cluster, which take the "
        "place of the figure's: <results_dir>/figures/<NAME>_<workload>_<hash of the overrides>.{pdf,png,csv,json}.",
        epilog="example: entrain-bench figure iteration_time workload=trace workload.path=mine.parquet global_batch=256"
        "\n\nnames:\n" + "\n".join(f"  {name:22}{summary}" for name, summary in discover().items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Not required here: argparse would not say which names there are.
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="which figure")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="as of a run; workload, model: several as a,b"
    )
    parser.add_argument("--config-dir", help="a folder of yours with further strategies, workloads, models")
    options = parser.parse_intermixed_args(arguments)
    if not options.name or "=" in options.name:
        raise UserError(f"figure: a name must come first; choices: {', '.join(discover())}")
    if options.name not in discover():
        raise unknown_choice("figure", options.name, discover())
    keys = dict(zip(swept_keys(options.overrides), options.overrides, strict=True))
    aside = [text for key, text in keys.items() if key in ASIDE]
    config = Composer(options.config_dir).run(aside)
    study = Study(Results(Path(config.results_dir)), options.config_dir)
    drawing, cells = _drawing(options.name, [text for text in options.overrides if text not in aside], study)
    made = make([drawing.output], study, config.mlflow, config.mlflow_uri)
    records = [record for cell in cells if (record := study.results.read(cell.key))]
    for line in (*notices(records), f"written: {study.results.root}/figures/{drawing.name}.{{{','.join(SUFFIXES)}}}"):
        say(line)
    return 0 if made else EXIT_FAILED


def _drawing(name: str, overrides: Sequence[str], study: Study) -> tuple[Drawing, list[Cell]]:
    """The figure and its cells, once all that can be wrong with them is known to be right."""
    module = module_of(name)
    sweeps = own_sweeps(name, module.EXPERIMENT, overrides)
    cells = [cell for sweep in sweeps.values() for cell in study.cells(*sweep)]
    check_names(cells)
    _check_data(cells)
    return Drawing(file_name(name, cells, overrides), module, sweeps, ["figure", name, *overrides]), cells


def _check_data(cells: Sequence[Cell]) -> None:
    """Raise ``UserError`` for samples that cannot be read, or that a model cannot take: no cell would have a result."""
    configs = {(str(cell.config.workload), str(cell.config.model)): cell.config for cell in cells}
    for config in configs.values():
        workload_of(config).source(ModelSpec.from_config(config.model).tokens)
