"""``entrain-bench trace source=...``: from a data set's files to a shape trace, and a page that sums it up."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from entrain_bench.answers.console_table import make_console
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.trace_page import page_of
from entrain_bench.commands.watch import say
from entrain_bench.config.comments import first_sentences
from entrain_bench.config.trace import CONFIG_NAME, Scanned, TraceCommand, compose_trace
from entrain_bench.config.tree import config_tree


def main(arguments: Sequence[str]) -> int:
    """Scan a data set, or go on with a scan that was interrupted.

    Returns:
        0.

    Raises:
        UserError: for bad options, and data that is not there or has no good sample.
        ExecutionError: for shards that could not be read this time; the others are kept.
    """
    options = _parse(arguments)
    given = {"tokenizer": options.tokenizer} if options.tokenizer else {}
    command = compose_trace(options.overrides, options.config_dir, given)
    if command.output.suffix != ".parquet":
        raise UserError(f"output={command.output}: must end with .parquet")
    found = _scan(command)
    page = page_of(command, found, options.config_dir)
    path = command.output.with_suffix(".md")
    write_atomically(path, page.encode())
    make_console().print(page.rstrip(), markup=False, highlight=False, soft_wrap=True)
    say(f"written: {command.output}, {path}")
    say(f"entrain-bench workload=trace workload.path={command.output} runs it")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    sources = "\n".join(f"  {name}: {what}" for name, what in first_sentences("source").items())
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="entrain-bench trace",
        description="Scan a data set to a shape trace: the sizes of its texts, images, sounds and videos, by their "
        "headers. Nothing is decoded; a scan that was interrupted goes on.",
        epilog=f"sources:\n{sources}\n\nkeys and their defaults:\n\n"
        + (config_tree() / f"{CONFIG_NAME}.yaml").read_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="source=NAME source.path=PATH, and the rest")
    parser.add_argument("--tokenizer", metavar="FILE", help="the same as tokenizer=FILE")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of yours with further sources and models")
    return parser.parse_intermixed_args(arguments)


def _scan(command: TraceCommand) -> Scanned:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    samples = bad = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("shards", total=None)

        def advance(shards: int, good: int, left_out: int) -> None:
            nonlocal samples, bad
            samples, bad = samples + good, bad + left_out
            what = f"{samples:,} samples, {bad:,} left out; shards"
            progress.update(task, total=shards, advance=1, description=what)

        return command.scanner.run(command.output, advance)
