"""``entrain-bench trace source=NAME [KEY=VALUE ...]``: scan a dataset and write a shape trace."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from entrain_bench.answers.console_table import make_console
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.help import columns
from entrain_bench.commands.trace_page import page_of
from entrain_bench.commands.watch import say
from entrain_bench.config.comments import first_sentences
from entrain_bench.config.grammar import Request, Verb
from entrain_bench.config.trace import CHOSEN, CONFIG_NAME, RUN_KEYS, TraceKeys, compose_trace
from entrain_bench.config.tree import config_tree

VERB = Verb(
    TraceKeys,
    (*CHOSEN, *RUN_KEYS),
    examples=["source=webdataset source.path='shards/*.tar' output=mine.parquet"],
    more=lambda _: (
        f"Sources:\n{columns(first_sentences('source'))}\n\n"
        "Keys of a run say whose tokens and work the summary is of; the trace is of no model.\n"
        "Other keys and their defaults:\n\n" + (config_tree() / f"{CONFIG_NAME}.yaml").read_text()
    ),
)


def main(request: Request[TraceKeys]) -> int:
    """Scan a data set, or resume a scan; returns 0. ``UserError`` for bad input, ``ExecutionError`` for bad shards."""
    command = compose_trace(request.keys, request.overrides, request.config_dir)
    if command.output.suffix != ".parquet":
        raise UserError(f"output={command.output}: must end with .parquet")
    console = Console(stderr=True)
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    samples = bad = 0
    with Progress(*bars, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("shards", total=None)

        def advance(shards: int, good: int, left_out: int) -> None:
            nonlocal samples, bad
            samples = samples + good
            bad = bad + left_out
            what = f"{samples:,} samples, {bad:,} left out; shards"
            progress.update(task, total=shards, advance=1, description=what)

        scanned = command.scan(command.output, advance)
    page = page_of(command, scanned, request.config_dir)
    path = command.output.with_suffix(".md")
    write_atomically(path, page.encode())
    make_console().print(page.rstrip(), markup=False, highlight=False, soft_wrap=True)
    say(f"written: {command.output}, {path}")
    say(f"entrain-bench workload=trace workload.path={command.output} runs it")
    return 0
