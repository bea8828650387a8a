"""``entrain-bench figures [NAME ...] [KEY=VALUE ...]``: execute missing runs, draw figures, write pages."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.console_table import make_console, overview
from entrain_bench.answers.sentences import notices, problems, short_answer
from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.commands.help import columns
from entrain_bench.commands.outputs import ON_REQUEST, files_of, make, outputs, summaries
from entrain_bench.commands.watch import say
from entrain_bench.config.figures import TRACED, sweeps_of
from entrain_bench.config.grammar import RUN_KEYS, Request, Storage, Verb
from entrain_bench.figures._runner import Drawing, discover, module_of
from entrain_bench.records.cells import Cell
from entrain_bench.records.keys import workload_of
from entrain_bench.records.records import Results, labels_of
from entrain_bench.run.study import Output, Study
from entrain_bench.specs.model import ModelSpec

EXIT_FAILED = 1
HASH_DIGITS = 8
MAX_NAME = 60
# Rows of the table of a figure, at most.
MAX_ROWS = 30
# The figure of a newcomer, and the next commands.
QUICK = "quick"
NEXT = """
your job:       entrain-bench recommend model=qwen25vl_llama3_3b workload=chartqa cluster=16xh100
your data:      entrain-bench trace source.path='data/*.parquet' output=mine.parquet
your strategy:  entrain-bench check --config-dir examples/my_strategy strategy=mine"""
VERB = Verb(
    Storage,
    RUN_KEYS,
    words=f"figures and documents; without any, all except {', '.join(sorted(ON_REQUEST))}",
    examples=[
        "quick",
        "iteration_time strategy=megatron,entrain workload=chartqa seed=0,1",
        "iteration_time workload=trace workload.path=mine.parquet global_batch=256",
    ],
    more=lambda config_dir: (
        "Strategies, workloads, models, clusters and seeds of a figure's own narrow it. Others, and other keys\n"
        "of a run, take the place of its own. Its files are then called\n"
        "<results_dir>/figures/<NAME>_<workload>_<hash of the overrides>.{pdf,png,csv,json}.\n\nNames:\n"
        + columns(summaries(config_dir))
    ),
)


def main(request: Request[Storage]) -> int:
    """Bring the named figures and documents up to date, or all that are not made on request only.

    Returns 0, or 1 if a cell failed or data is missing; ``UserError`` for unknown names, overrides that a figure does
    not take, data that cannot be read, and a folder that cannot be written.
    """
    keys = request.keys
    overrides = request.overrides
    study = Study(Results(Path(keys.results_dir)), request.config_dir)
    if overrides:
        known = discover(request.config_dir)
        if not request.words:
            raise UserError(f"{overrides[0]}: needs the name of a figure; choices: {', '.join(known)}")
        for name in request.words:
            if name not in known:
                raise unknown_choice("figure", name, known)
    own = [_drawing(name, overrides, study) for name in dict.fromkeys(request.words)] if overrides else []
    wanted: list[Output] = [drawing.output for drawing in own] or outputs(request.words, request.config_dir)
    made = make(wanted, study, keys.mlflow, keys.mlflow_uri, keys.retry == "failed")
    for output in wanted:
        if request.words:
            _say_finding(output, study)
        if files := files_of(output, study.results.root):
            print(f"written: {files}")
    if QUICK in request.words:
        print(NEXT)
    return 0 if made else EXIT_FAILED


def _say_finding(output: Output, study: Study) -> None:
    """Print the table of a small comparison and its answer, or else the caption of a figure."""
    cells = [cell for sweep in output.sweeps for cell in study.cells(*sweep)]
    records = [record for cell in cells if (record := study.results.read(cell.key))]
    # Without comparing thousands of runs for a table that is too long.
    variants = {tuple(text for text in cell.overrides if not text.startswith("seed=")) for cell in cells}
    answer = Answer.of(records if len(variants) <= MAX_ROWS else [])
    sidecar = study.results.root / next((file for file in output.committed if file.endswith(".json")), "")
    if answer.contested:
        console = make_console()
        for line in (*overview(answer, console.width), *map(Text, ("", *problems(answer), short_answer(answer)))):
            console.print(line, soft_wrap=True)
    elif sidecar.is_file():
        print(json.loads(sidecar.read_text())["caption"])
    for notice in notices(records):
        say(notice)


def _drawing(name: str, overrides: Sequence[str], study: Study) -> Drawing:
    module, experiment = module_of(name, study.config_dir)
    sweeps = sweeps_of(experiment, study.config_dir, overrides)
    cells = [cell for sweep in sweeps.values() for cell in study.cells(*sweep)]
    check_names(cells)
    # Samples that cannot be read, or that a model cannot take: no cell would have a result.
    for config in {(str(cell.config.workload), str(cell.config.model)): cell.config for cell in cells}.values():
        workload_of(config).source(ModelSpec.from_config(config.model).tokens)
    return Drawing(file_name(name, cells, overrides), module, sweeps, ["figures", name, *overrides])


def file_name(figure: str, cells: Sequence[Cell], overrides: Sequence[str]) -> str:
    """Return the name of a figure's files: the figure, its workloads, and a hash of the overrides."""
    workloads = "-".join(dict.fromkeys(str(labels_of(cell.config)["workload"]) for cell in cells))
    digest = hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:HASH_DIGITS]
    return f"{figure}_{re.sub(r'[^\w.-]+', '-', workloads)[:MAX_NAME]}_{digest}"


def check_names(cells: Sequence[Cell]) -> None:
    """Raise ``UserError`` for different workloads, or models, of one name: a figure could not tell them apart."""
    for group in TRACED:
        seen: dict[str, object] = {}
        for cell in cells:
            name = str(labels_of(cell.config)[group])
            values = getattr(cell.config, group)
            if seen.setdefault(name, values) != values:
                raise UserError(f"{group}: two entries share the name {name}. Give each entry a unique name")
