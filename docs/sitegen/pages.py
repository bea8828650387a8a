"""The folder that Sphinx reads: pages at their paths in the repository, and generated pages among them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.answers.labels import strategy_facts
from entrain_bench.answers.text import markdown_table
from entrain_bench.commands.help import help_text, verbs
from entrain_bench.config.comments import groups
from entrain_bench.figures._runner import discover
from entrain_bench.records.records import Results
from sitegen.strategies import overview, strategy_page

DOCS = Path("docs")
HOME = "README"
STRATEGIES = DOCS / "strategies"
# With pages, and files that pages link.
COPIED = (DOCS, *map(Path, ("entrain_bench", "examples", "experiments", "results/reference", "workloads")))
COPIED_FILES = ("CITATION.cff", "CONTRIBUTING.md", "results/README.md")
IGNORED = ("sitegen", "__pycache__", "*.nb[ic]")
REFERENCE = Path("results/reference")
FIGURES = REFERENCE / "figures"
SECTIONS = ("tutorials/index", "guides", "strategies/index", "results/index", "method", "reference")


def assemble(root: Path, results: Results, source: Path) -> None:
    """Empty and write the folder that Sphinx reads; schedules that ``results`` lacks are simulated.

    ``UserError`` if a strategy cannot run the job of the schedules.
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
    papers = {claim.file: claim.system for claim in load_claims()}
    yield DOCS / "gallery.md", gallery_page(root)
    yield DOCS / "command_line.md", command_line_page()
    for strategy in facts:
        page = STRATEGIES / f"{strategy.name}.md"
        text = (root / page).read_text() if (root / page).exists() else ""
        yield page, strategy_page(strategy, text, papers, results, source / STRATEGIES)
    committed = (path.stem for path in sorted((root / STRATEGIES).glob("*.md")))
    pages = toctree(dict.fromkeys(["README", *(strategy.name for strategy in facts), *committed]))
    text = "What every strategy balances, its schedule, and where it runs today."
    yield STRATEGIES / "index.md", "\n\n".join(["# Strategies", text, overview(facts), pages])
    head, mark, rest = (root / f"{HOME}.md").read_text().partition("\n## ")
    yield Path(f"{HOME}.md"), f"{head}\n{toctree(f'/docs/{name}' for name in SECTIONS)}{mark}{rest}"


def toctree(documents: Iterable[str]) -> str:
    """The navigation to other pages, with their titles."""
    return "\n".join(["```{toctree}", ":maxdepth: 1", "", *documents, "```", ""])


def gallery_page(root: Path) -> str:
    """A section for each committed figure."""
    intro = (
        "Every figure is drawn from simulated runs by one command, and `make verify` recomputes its data. A figure "
        "that measures this machine says so. Draw one over your own job: [figures](figures.md)."
    )
    summaries = discover()
    sections = []
    for path in sorted((root / FIGURES).glob("*.png")):
        name = path.stem
        title = name.replace("_", " ").capitalize()
        described = path.with_suffix(".json")
        sidecar: dict[str, Any] = json.loads(described.read_text()) if described.exists() else {}
        summary = summaries.get(name) or f"{sidecar['caption'].partition('. ')[0]}."
        files = [f"[{suffix.upper()}](../{FIGURES}/{name}.{suffix})" for suffix in ("pdf", "csv")]
        sections += [f"## {title}", f"![{title}](../{FIGURES}/{name}.png)", summary]
        if sidecar:
            sections += [f"*{sidecar['caption'].replace('*', '')}*", f"```sh\n{sidecar['command']}\n```"]
        sections.append(f"Download: {', '.join(files)}")
    return "\n\n".join(["# Gallery", intro, *sections]) + "\n"


def command_line_page() -> str:
    """The screens of ``--help``: overview, every verb, every group of choices."""
    parts = ["# Command line", "Generated from `entrain-bench --help`.", f"```text\n{help_text()}\n```", "## Commands"]
    for verb, purpose in verbs().items():
        parts += [f"### {verb}", f"{purpose[:1].upper()}{purpose[1:]}.", f"```text\n{help_text(verb)}\n```"]
    parts.append("## Choices")
    for group, known in groups().items():
        rows = [[f"`{name}`", sentence] for name, sentence in known.items()]
        parts += [f"### {group}", markdown_table([f"`{group}=`", "what it is"], rows)]
    return "\n\n".join(parts) + "\n"
