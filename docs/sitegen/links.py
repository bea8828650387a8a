"""Links of Markdown pages: from the places of files in the repository to the places of pages on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Code, in which nothing is a link; a link or an image, also one of HTML that states its width.
CODE_OR_LINK = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)[ ]*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|^(?: {4}|\t).*?$)"
    r"|(?P<before>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(|<img src=\")(?P<target>[^()\s\"]+)"
    r"(?P<after>(?:\s+\"[^\"]*\")?\)|\"(?: \w+=\"[^\"]*\")*>)",
    re.MULTILINE | re.DOTALL,
)
OUTSIDE = re.compile(r"[a-z][a-z+.-]*:|#")
# Where files that are no pages stand on the site, at their path in the repository.
FILES = "files"


@dataclass(frozen=True, slots=True)
class Site:
    """The possible targets of links.

    Attributes:
        root: the repository.
        places: place on the site of every page, by its path in the repository.
    """

    root: Path
    places: Mapping[str, str]

    def rewritten(
        self, text: str, source: str, place: str, used: Callable[[str], None], broken: Callable[[str], None]
    ) -> str:
        """Return a page's text with links as they must be on the site.

        Args:
            text: the page.
            source: its path in the repository.
            place: its place on the site.
            used: called with the path of every file that is linked and no page.
            broken: called with a line for every link to nothing, which is left unchanged.
        """

        def replace(found: re.Match[str]) -> str:
            if found["code"] or OUTSIDE.match(found["target"]):
                return found[0]
            path, hash_, anchor = found["target"].partition("#")
            there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
            new = self._place(there)
            if new is None:
                broken(f"{source}: link to {found['target']}, which does not exist")
                return found[0]
            if new.startswith(f"{FILES}/"):
                used(there)
            link = posixpath.relpath(new, posixpath.dirname(place) or ".")
            return found["before"] + link + hash_ + anchor + found["after"]

        return CODE_OR_LINK.sub(replace, text)

    def _place(self, path: str) -> str | None:
        """Where a file or folder of the repository stands on the site; None for one that does not exist."""
        for page in (path, f"{path}/README.md"):
            if page in self.places:
                return self.places[page]
        return f"{FILES}/{path}" if (self.root / path).is_file() else None
