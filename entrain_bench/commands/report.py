"""``entrain-bench report [KEY=VALUE ...]``: write a report on a folder of runs: which strategy to use, and why."""

from __future__ import annotations

from pathlib import Path

from entrain_bench.answers.report import html, markdown, read_answer, report_json, report_of
from entrain_bench.answers.sentences import short_answer
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.publish import draw_standings
from entrain_bench.commands.watch import say
from entrain_bench.config.grammar import Folder, Request, Verb
from entrain_bench.config.sources import add_config_dir
from entrain_bench.records.records import Results

VERB = Verb(Folder, examples=["results_dir=results"])


def main(request: Request[Folder]) -> int:
    """Write ``report.html``, ``report.md`` and ``report.json``; ``UserError`` for a folder without successful runs."""
    results = Results(Path(request.keys.results_dir))
    results.prepare()
    add_config_dir(request.config_dir)
    answer, notes = read_answer(results)
    root = str(results.root)
    report = report_of(answer, root, notes, draw_standings(answer))
    texts = {
        "report.html": html(report),
        "report.md": markdown(report),
        "report.json": report_json(answer, root, notes),
    }
    print(short_answer(answer))
    for name, text in texts.items():
        try:
            write_atomically(results.root / name, text.encode())
        except OSError as error:
            raise UserError(f"results_dir={results.root}: cannot be written to ({error})") from error
        say(f"written: {results.root / name}")
    return 0
