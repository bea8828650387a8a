"""Links of a built site: every one must lead to a file and an anchor that are there, and nothing may be loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes whose files a browser loads by itself.
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
# Of the page itself, and of scripts that make their own.
OWN_ANCHORS = ("", "top")
# Files of the theme, of which some are templates.
STATIC = "_static"


@dataclass(slots=True)
class Found:
    """Anchors of a page, and its links with their tag and attribute."""

    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, str, str]] = field(default_factory=list)


def problems(folder: Path) -> list[str]:
    """Return a line for every broken link of the pages in a folder, and for all that they load from elsewhere."""
    pages = {path.resolve(): _read(path) for path in sorted(folder.rglob("*.html")) if STATIC not in path.parts}
    return [
        f"{path.relative_to(folder.resolve())}: {text}"
        for path, page in pages.items()
        for text in _of(path, page, pages)
    ]


def _of(path: Path, page: Found, pages: dict[Path, Found]) -> Iterator[str]:
    for tag, attribute, link in dict.fromkeys(page.links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if (tag, attribute) in LOADED and parts.scheme != "data":
                yield f"loads {link}"
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file():
            yield f"{link}: no such file"
        elif (
            target in pages
            and parts.fragment not in OWN_ANCHORS
            and unquote(parts.fragment) not in pages[target].anchors
        ):
            yield f"{link}: no such anchor"


def _read(path: Path) -> Found:
    reader = _Reader()
    reader.feed(path.read_text())
    return reader.found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = Found()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.found.anchors.add(value or "")
            elif name in ("href", "src") and value is not None:
                self.found.links.append((tag, name, value))
