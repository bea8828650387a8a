"""``entrain-bench trace source.path=FILES [KEY=VALUE ...]``: scan a dataset and write a shape trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from entrain_bench.answers.console_table import make_console
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.help import columns
from entrain_bench.commands.trace_page import page_html, page_of
from entrain_bench.commands.watch import say
from entrain_bench.config.comments import first_sentences
from entrain_bench.config.grammar import Request, Verb, own
from entrain_bench.config.hub.files import HUB, is_reference, tokenizer_file
from entrain_bench.config.overrides import is_inside, parse, top_of, with_value
from entrain_bench.config.sources import add_config_dir, compose_values
from entrain_bench.config.targets import TARGET, check_targets, instantiate
from entrain_bench.config.tree import config_tree

CONFIG_NAME = "trace"
CHOSEN = ("source", "limits", "scan")
RUN_KEYS = ("model", "cluster", "layout", "workload", "global_batch", "microbatch_size")


# The tokenizer of the model that is given, if its files are on this machine.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class TraceKeys:
    """Own keys; who scans checks their ranges."""

    output: str = own("trace.parquet", "file of the trace; a summary goes next to it (trace.md, trace.html)")
    tokenizer: str | None = own(
        AUTO,
        "tokenizer.json, its folder or hf:ORG/NAME in the hub's cache; auto: that of model= if it is there; "
        "bytes: one token per UTF-8 byte; null: count characters only",
    )
    engine: str = own(
        "processes", "processes: on this machine; ray: on a Ray cluster whose machines have the same folders"
    )
    workers: int | None = own(
        None, "shards scanned at the same time; null: one per core up to 8, or all CPUs of the cluster"
    )
    ray_address: str | None = own(None, "host:port of a running Ray cluster; null: start one on this machine")
    max_rows: int | None = own(
        200_000, "rows from which on a random part of the shards is scanned, with stated errors; null: scan all"
    )
    timeout_s: float = own(60.0, "seconds per sample; a sample that takes longer fails its shard")


@dataclass(frozen=True, slots=True)
class TraceCommand:
    """A scan and its dataset's name; the scan reports the number of shards, and each shard's counts, to a function."""

    scan: Callable[[Path, Callable[[int, int, int], None]], Any]
    output: Path
    source: Mapping[str, Any]
    run: tuple[str, ...]


def compose_trace(keys: TraceKeys, overrides: Sequence[str], config_dir: str | None) -> TraceCommand:
    """The scan of keys and overrides; ``UserError`` for an invalid one."""
    add_config_dir(config_dir)
    mine = [text for text in overrides if top_of(parse(text)) in CHOSEN]
    parsed = [parse(text) for text in mine]
    inside = [override for override in parsed if is_inside(override)]
    values = compose_values([str(one.input_line) for one in parsed if one not in inside], config_dir, CONFIG_NAME)
    for override in inside:
        values = with_value(values, override)
    check_targets(values)
    missing = [key for key, value in values["source"].items() if value == MISSING]
    if missing:
        raise UserError(f"source.{missing[0]}: missing; {values['source'][TARGET].rpartition('.')[2]} needs it")
    options = {**asdict(keys), "limits": values["limits"]}
    output = Path(options.pop("output")).expanduser()
    options["tokenizer"] = _tokenizer(keys.tokenizer, overrides)
    source = instantiate(values["source"], "source", "shards")
    scanner = instantiate({**values["scan"], **options}, "scan", "run", source=source)
    return TraceCommand(scanner.run, output, values["source"], tuple(text for text in overrides if text not in mine))


def _tokenizer(given: str | None, overrides: Sequence[str]) -> str | None:
    """Return the file of a tokenizer, or the scan's name for its own count; ``UserError`` if the file is missing."""
    chosen = given
    if given == AUTO:
        models = [text.partition("=")[2] for text in overrides if text.startswith("model=")]
        chosen = models[-1] if models and is_reference(models[-1]) else None
    elif given is None or not (given.startswith(HUB) or Path(given).expanduser().is_dir()):
        return given
    if chosen is None:
        return None
    path = tokenizer_file(chosen)
    if path is None and given != AUTO:
        raise UserError(
            f"tokenizer={given}: has no tokenizer.json here. Fetch it with `hf download {given.removeprefix(HUB)} "
            "tokenizer.json`, or give the path of another"
        )
    say(f"text: tokens of {path}" if path else f"text: characters, because {chosen} has no tokenizer.json here")
    return str(path) if path else None


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
    page = page_of(command.output, command.source, command.run, scanned, request.config_dir)
    text, page_file = (command.output.with_suffix(ending) for ending in (".md", ".html"))
    title = command.output.name
    write_atomically(text, f"# {title}\n\n{page}".encode())
    write_atomically(page_file, page_html(title, page).encode())
    make_console().print(f"# {title}\n\n{page.rstrip()}", markup=False, highlight=False, soft_wrap=True)
    say(f"written: {command.output}, {text}, {page_file}")
    return 0
