"""``entrain-bench report [KEY=VALUE ...]``: write a page on the runs of a folder: which strategy to use, and why."""

from __future__ import annotations

from pathlib import Path

from entrain_bench.answers.report.build import page_of
from entrain_bench.answers.report.read import read_material
from entrain_bench.answers.report.render import html, markdown
from entrain_bench.answers.report.tree import Tree
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.pictures import ReportPictures
from entrain_bench.commands.watch import say
from entrain_bench.config.grammar import Folder, Request, Verb
from entrain_bench.records.records import Results

VERB = Verb(Folder)


def main(request: Request[Folder]) -> int:
    """Write ``report.html`` and ``report.md``; returns 0.

    Raises:
        UserError: for a folder without successful runs, or one that cannot be written.
    """
    results = Results(Path(request.keys.results_dir))
    results.prepare()
    tree = Tree(request.config_dir)
    page = page_of(read_material(results, tree), ReportPictures())
    tree.save()
    for name, text in {"report.html": html(page), "report.md": markdown(page)}.items():
        _write(results.root / name, text)
        say(f"written: {results.root / name}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"results_dir={path.parent}: cannot be written to ({error})") from error
