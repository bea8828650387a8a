"""The folder that Sphinx reads: pages at their paths in the repository, and generated pages among them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Template

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.answers.documents.claims import FINDINGS, holding_sentence, read_claims
from entrain_bench.answers.labels import strategy_facts
from entrain_bench.answers.text import markdown_table
from entrain_bench.commands.help import help_text, verbs
from entrain_bench.config.comments import groups
from entrain_bench.figures._runner import discover
from entrain_bench.records.records import Results
from sitegen.strategies import overview, simulate, strategy_page

DOCS = Path("docs")
HOME = Path(__file__).parent / "home.md"
# The figure on the first page.
PICTURE = "iteration_time"
STRATEGIES = DOCS / "strategies"
GALLERY = DOCS / "gallery"
# With pages, and files that pages link.
COPIED = (DOCS, *map(Path, ("entrain_bench", "examples", "experiments", "results/reference", "workloads")))
COPIED_FILES = ("README.md", "CITATION.cff", "CONTRIBUTING.md", "results/README.md")
IGNORED = ("sitegen", "__pycache__", "*.nb[ic]")
REFERENCE = Path("results/reference")
FIGURES = REFERENCE / "figures"
# The origin of a clone whose pages are on the web: host and path.
WEB = re.compile(r"(?:https://|(?:ssh://)?git@)([^/:]+)[/:](.+?)(?:\.git)?/?")


@dataclass(frozen=True, slots=True)
class Shown:
    """A committed figure: its file without suffix, title, first sentence, caption and command (empty: not known)."""

    name: str
    title: str
    summary: str
    caption: str
    command: str


def repository_address(root: Path) -> str:
    """Return the web address of the repository that ``root`` is cloned from; empty for one without."""
    command = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    return web_address(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())


def web_address(origin: str) -> str:
    """Return the web address of a repository's origin; empty for a folder."""
    found = WEB.fullmatch(origin)
    return f"https://{found[1]}/{found[2]}" if found else ""


def assemble(root: Path, results: Results, source: Path) -> None:
    """Empty and write the folder that Sphinx reads; schedules that ``results`` lacks are simulated.

    ``UserError`` naming page and strategy if a strategy cannot run the job of the schedules.
    """
    shutil.rmtree(source, ignore_errors=True)
    for folder in COPIED:
        shutil.copytree(root / folder, source / folder, ignore=shutil.ignore_patterns(*IGNORED))
    for name in COPIED_FILES:
        shutil.copyfile(root / name, source / name)
    for path, text in _generated(root, results, source):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)


def _generated(root: Path, results: Results, source: Path) -> Iterator[tuple[Path, str]]:
    facts = strategy_facts()
    claims = load_claims()
    papers = {claim.file: claim.system for claim in claims}
    figures = shown_figures(root)
    yield (
        Path("index.md"),
        Template(HOME.read_text()).render(
            strategies=len(facts),
            picture=PICTURE,
            caption=next(figure.summary for figure in figures if figure.name == PICTURE),
            holding=holding_sentence(read_claims(claims, root / REFERENCE / FINDINGS)),
            version=version("entrain-bench"),
            repository=repository_address(root),
        ),
    )
    yield GALLERY.with_suffix(".md"), gallery_page(figures)
    for figure in figures:
        yield GALLERY / f"{figure.name}.md", figure_page(figure)
    yield DOCS / "command_line.md", command_line_page()
    cells = simulate([strategy.name for strategy in facts], results)
    for strategy in facts:
        page = STRATEGIES / f"{strategy.name}.md"
        text = (root / page).read_text() if (root / page).exists() else ""
        yield page, strategy_page(strategy, text, papers, cells, results, source / STRATEGIES)
    committed = (path.stem for path in sorted((root / STRATEGIES).glob("*.md")))
    pages = toctree(dict.fromkeys(["README", *(strategy.name for strategy in facts), *committed]))
    text = "The work that every strategy balances, its schedule, and where it runs today."
    yield STRATEGIES / "index.md", "\n\n".join(["# Strategies", text, overview(facts), pages])


def toctree(documents: Iterable[str]) -> str:
    """The navigation to other pages, with their titles; the page itself has its own list of them."""
    return "\n".join(["```{toctree}", ":hidden:", "", *documents, "```", ""])


def shown_figures(root: Path) -> list[Shown]:
    """Every committed figure; ``caption`` and ``command`` are empty for one whose data are not in its JSON."""
    summaries = discover()
    figures = []
    for path in sorted((root / FIGURES).glob("*.png")):
        described = path.with_suffix(".json")
        sidecar: dict[str, Any] = json.loads(described.read_text()) if described.exists() else {}
        caption = sidecar.get("caption", "").replace("*", "")
        summary = summaries.get(path.stem) or f"{caption.partition('. ')[0]}."
        title = path.stem.replace("_", " ").capitalize()
        figures.append(Shown(path.stem, title, summary, caption, sidecar.get("command", "")))
    return figures


def gallery_page(figures: Iterable[Shown]) -> str:
    """A card with a cropped picture for each figure, which leads to its page."""
    intro = (
        "Every figure is drawn from simulated runs by one command, and `make verify` recomputes its data. A figure "
        "that measures this machine says so. Draw one over your own job: [figures](figures.md)."
    )
    figures = [*figures]
    cards = [
        f":::{{grid-item-card}} {figure.title}\n:link: gallery/{figure.name}\n:link-type: doc\n"
        f":img-top: ../{FIGURES}/{figure.name}.png\n{figure.summary}\n:::"
        for figure in figures
    ]
    grid = "\n".join(["::::{grid} 1 2 3 3", ":gutter: 3", ":class-container: gallery", *cards, "::::"])
    return "\n\n".join(["# Gallery", intro, grid, toctree(f"gallery/{figure.name}" for figure in figures)])


def figure_page(figure: Shown) -> str:
    """A figure in full, with its caption, command and files."""
    picture = f"../../{FIGURES}/{figure.name}"
    parts = [f"# {figure.title}", figure.summary, f"[![{figure.title}]({picture}.png)]({picture}.png)"]
    if figure.caption:
        parts += [f"*{figure.caption}*", f"```sh\n{figure.command}\n```"]
    files = (f"[{suffix.upper()}]({picture}.{suffix})" for suffix in ("png", "pdf", "csv"))
    return "\n\n".join([*parts, f"Files: {', '.join(files)}"]) + "\n"


def command_line_page() -> str:
    """The screens of ``--help``: overview, every verb, every group of choices."""
    parts = ["# Command line", "Generated from `entrain-bench --help`.", f"```text\n{help_text()}\n```", "## Commands"]
    for verb, purpose in verbs().items():
        parts += [f"### {verb}", f"{purpose[:1].upper()}{purpose[1:]}.", f"```text\n{help_text(verb)}\n```"]
    parts.append("## Choices")
    for group, known in groups().items():
        rows = [[f"`{name}`", sentence] for name, sentence in known.items()]
        parts += [f"### {group}", markdown_table([f"`{group}=`", "meaning"], rows)]
    return "\n\n".join(parts) + "\n"
