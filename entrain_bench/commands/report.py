"""``entrain-bench report``: one page that answers which strategy to use, from the runs of a folder of results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from entrain_bench.answers.report.build import page_of, report_json
from entrain_bench.answers.report.read import read_material
from entrain_bench.answers.report.render import html, markdown
from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.pictures import Pictures
from entrain_bench.commands.watch import say
from entrain_bench.config.command_line import add_config_dir
from entrain_bench.records.records import Results

KEY = "results_dir"


def main(arguments: Sequence[str]) -> int:
    """Write ``report.html``, ``report.md`` and ``report.json``; returns 0.

    Raises:
        UserError: for a folder without successful runs, or one that cannot be written.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="entrain-bench report",
        description="Write report.html, report.md and report.json from the runs of a folder of results: which "
        "strategy to use, by how much, how sure, and why. Runs nothing.",
    )
    parser.add_argument("settings", nargs="*", metavar="results_dir=FOLDER", help="where runs are and the page goes")
    parser.add_argument("--results-dir", default="results", help="the same (default: results)")
    parser.add_argument("--config-dir", help="a folder of yours, where records name another one or none")
    options = parser.parse_intermixed_args(arguments)
    results = Results(Path(_results_dir(options.settings, options.results_dir)))
    results.prepare()
    add_config_dir(options.config_dir)
    material = read_material(results)
    page = page_of(material, Pictures(results))
    texts = {"report.html": html(page), "report.md": markdown(page), "report.json": report_json(material)}
    for name, text in texts.items():
        _write(results.root / name, text)
        say(f"written: {results.root / name}")
    return 0


def _results_dir(settings: Sequence[str], default: str) -> str:
    """The folder that ``results_dir=FOLDER`` names."""
    folder = default
    for text in settings:
        key, _, folder = text.partition("=")
        if key != KEY or not folder:
            raise unknown_choice("key", text, [f"{KEY}=FOLDER"])
    return folder


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"{KEY}={path.parent}: cannot be written to ({error})") from error
