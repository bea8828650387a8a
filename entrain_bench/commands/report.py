"""``entrain-bench report [KEY=VALUE ...]``: write a report on a folder of runs: which strategy to use, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from entrain_bench.answers.report import html, markdown, read_answer, report_json, report_of
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.publish import Pictures
from entrain_bench.commands.watch import say
from entrain_bench.config.grammar import Folder, Request, Verb, own
from entrain_bench.config.sources import add_config_dir
from entrain_bench.records.records import Results

SHARE = "report.png"


@dataclass(frozen=True, slots=True)
class Keys(Folder):
    """Own keys."""

    share: bool = own(False, f"also write {SHARE}: winner, interval and command in one picture")


VERB = Verb(Keys, examples=["share=true"])


def main(request: Request[Keys]) -> int:
    """Write ``report.html``, ``report.md`` and ``report.json``, and on request the picture to share.

    ``UserError`` for a folder without successful runs, and for a picture with nothing to compare.
    """
    results = Results(Path(request.keys.results_dir))
    results.prepare()
    add_config_dir(request.config_dir)
    answer, notes = read_answer(results)
    root = str(results.root)
    report = report_of(answer, root, notes, Pictures(results).standings(answer))
    texts = {
        "report.html": html(report),
        "report.md": markdown(report),
        "report.json": report_json(answer, root, notes),
    }
    files = {name: text.encode() for name, text in texts.items()}
    if request.keys.share:
        # It draws; a report without pictures need not import that.
        from entrain_bench.figures._pictures import share_png

        files[SHARE] = share_png(answer, root)
    for name, content in files.items():
        try:
            write_atomically(results.root / name, content)
        except OSError as error:
            raise UserError(f"results_dir={results.root}: cannot be written to ({error})") from error
        say(f"written: {results.root / name}")
    return 0
