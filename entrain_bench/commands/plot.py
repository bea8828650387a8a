"""``entrain-bench plot [KIND] [KEY=VALUE ...]``: draw the runs of a folder in the forms of the figures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.commands import command_line
from entrain_bench.answers.comparison import TIME
from entrain_bench.answers.plots import FASTEST, KINDS, NONE, Plot
from entrain_bench.base.errors import UserError, no_runs, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.help import columns
from entrain_bench.config.compose import NARROWED
from entrain_bench.config.figures import values_of
from entrain_bench.config.grammar import Folder, Request, Verb, own
from entrain_bench.config.overrides import parse
from entrain_bench.figures._plot import draw_runs
from entrain_bench.figures._runner import described, files_of
from entrain_bench.figures._style import styled
from entrain_bench.records.records import Record, Results

HASH_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Keys(Folder):
    """The picture; ``strategy``, ``workload``, ``model``, ``cluster`` and ``seed`` choose runs."""

    metric: str = own(TIME, "a column of table.csv")
    by: str = own("", "key along the columns, or along x of lines; empty: every case")
    normalize: str = own("", f"{FASTEST} (times, if empty), a strategy, or {NONE}: the divisor of values")


VERB = Verb(
    Keys,
    NARROWED,
    words="the form of the picture, dots if none is named",
    examples=[
        "results_dir=results",
        "lines by=global_batch metric=mfu",
        "dots strategy=mine,megatron normalize=megatron",
    ],
    more=lambda _: f"Forms:\n{columns(KINDS)}",
)


def main(request: Request[Keys]) -> int:
    """Draw runs; print the caption and the files. ``UserError`` for a folder without such runs and for bad keys."""
    keys = request.keys
    kind, *others = request.words or (Plot().kind,)
    if others:
        raise UserError(f"{others[0]}: plot draws one form; choices: {', '.join(KINDS)}")
    results = Results(Path(keys.results_dir))
    records = results.records()
    if not records:
        raise no_runs(keys.results_dir)
    records = chosen(records, request.overrides, request.config_dir)
    with styled():
        picture = draw_runs(Answer.of(records), Plot(kind, keys.metric, keys.by, keys.normalize))
    given = [f"{name}={value}" for name in ("metric", "by", "normalize") if (value := getattr(keys, name))]
    words = [kind, *given, *request.overrides]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:HASH_DIGITS]
    command = command_line(["plot", f"results_dir={keys.results_dir}", *words], request.config_dir)
    setting = {name: sorted({str(one.labels[name]) for one in records}) for name in ("cluster", "harness")}
    seeds = sorted({int(one.labels["seed"]) for one in records})
    files = files_of(picture) | {"json": described(picture.message, command, setting, seeds, {})}
    path = results.root / "figures" / f"plot_{kind}_{digest}"
    for suffix, content in files.items():
        try:
            write_atomically(path.with_suffix(f".{suffix}"), content)
        except OSError as error:
            raise UserError(f"results_dir={results.root}: cannot be written to ({error})") from error
    print(picture.message)
    print(f"written: {path}.{{{','.join(files)}}}")
    return 0


def chosen(records: Sequence[Record], overrides: Sequence[str], config_dir: str | None) -> list[Record]:
    """The records with one of the values of every override; ``UserError`` for a value that none has."""
    kept = [*records]
    for text in overrides:
        key = parse(text).key_or_group
        if key not in NARROWED:
            raise UserError(f"{text}: chooses no runs; {', '.join(NARROWED)} do")
        known = {f"{key}={record.labels[key]}" for record in kept}
        values = values_of(text, config_dir)
        for value in sorted(values - known) if "glob(" not in text else ():
            raise unknown_choice(key, value.partition("=")[2], sorted(each.partition("=")[2] for each in known))
        kept = [record for record in kept if f"{key}={record.labels[key]}" in values]
    return kept
