"""The gallery: a card and a section for every committed figure, with words of its module and of its sidecar."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import entrain_bench.figures

FOLDER = "results/reference/figures"
MODULES = Path(entrain_bench.figures.__path__[0])
SUFFIXES = ("pdf", "csv")


def gallery_page(root: Path) -> str:
    """Return the page; links are those of the repository, from its root."""
    names = [path.stem for path in sorted((root / FOLDER).glob("*.png"))]
    texts = {name: described(name, root) for name in names}
    cards = [_card(name, texts[name][0]) for name in names]
    sections = [section for name in names for section in _section(name, root, *texts[name])]
    intro = (
        "Every figure is drawn from simulated runs by one command, and `make verify` recomputes its data. A figure "
        "that measures this machine says so. Draw one over your own job: [figures](docs/figures.md)."
    )
    grid = "::::{grid} 1 2 3 3\n:gutter: 2\n\n" + "\n".join(cards) + "\n::::"
    return "\n\n".join(["# Gallery", intro, grid, *sections]) + "\n"


def described(name: str, root: Path) -> tuple[str, str]:
    """Return a sentence on what a figure shows, and the rest of its module's docstring, as Markdown."""
    module = MODULES / f"{name}.py"
    if module.exists():
        first, _, rest = (ast.get_docstring(ast.parse(module.read_text())) or "").partition("\n")
        return markdown_of(first), markdown_of(rest.strip())
    # Drawn by a program of its own: its sidecar says what it is.
    return markdown_of(str(_sidecar(name, root)["caption"]).partition(". Setting:")[0] + "."), ""


def markdown_of(docstring: str) -> str:
    """Docstrings have code between two backticks and lines as the source wraps them."""
    return re.sub(r"``(.+?)``", r"`\1`", docstring).replace(".. ", "")


def title_of(name: str) -> str:
    """A figure's name as a heading."""
    return name.replace("_", " ").capitalize()


def _card(name: str, sentence: str) -> str:
    return (
        f":::{{grid-item-card}} {title_of(name)}\n:link: {_anchor(name)}\n:link-type: ref\n"
        f":img-top: files/{FOLDER}/{name}.png\n:img-alt: {title_of(name)}\n\n{sentence}\n:::\n"
    )


def _section(name: str, root: Path, sentence: str, more: str) -> Iterator[str]:
    yield f"({_anchor(name)})=\n## {title_of(name)}"
    yield f"![{sentence.replace('`', '')}]({FOLDER}/{name}.png)"
    yield sentence
    if more:
        yield more
    sidecar = _sidecar(name, root)
    if sidecar:
        yield f"*{_setting(str(sidecar['caption']))}*"
        yield f"```sh\n{sidecar['command']}\n```"
    files = [
        f"[{suffix.upper()}]({FOLDER}/{name}.{suffix})"
        for suffix in SUFFIXES
        if (root / FOLDER / f"{name}.{suffix}").exists()
    ]
    yield "Download: " + ", ".join(files)


def _setting(caption: str) -> str:
    """The setting, seeds and costs of a caption, without its first sentence, which the module has too."""
    _, found, rest = caption.partition("Setting: ")
    return (f"Setting: {rest}" if found else caption).replace("*", "")


def _anchor(name: str) -> str:
    return f"figure-{name.replace('_', '-')}"


def _sidecar(name: str, root: Path) -> dict[str, object]:
    path = root / FOLDER / f"{name}.json"
    found: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    return found
