"""Words of the documentation and of ``--help``: no sentence over 35 words, no word that a reader must read twice.

``make lint`` runs it. Code, tables that are generated, and addresses of links do not count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from entrain_bench.commands.help import KEYS, help_text, verbs

ROOT = Path(__file__).parents[1]
MAX_WORDS = 35
# Each has a plainer word: again, next to, the same, no strategy, available, separately, N, resumes, is in, unmodified.
UNCLEAR = re.compile(
    r"\b(anew|beside|alike|at hand|by itself|so many|goes on|stands (?:in|for|behind)|told apart|as it is|of which"
    r"|likewise|nobody|anybody|whoever|whatever|dealt out)\b"
    r"|\b\w*(?:behaviour|colour|modell|synchronis|utilis|optimis(?:e|ing|ation))\w*",
    re.IGNORECASE,
)
GENERATED = re.compile(r"<!-- (?:table|columns|names)\b.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"```.*?```|^ {4}(?![-*]).*$", re.DOTALL | re.MULTILINE)
# A blank line, an item of a list or a row of a table begins a new block.
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s|#|\|)|\|")
SENTENCE = re.compile(r"(?<=[.!?;:])\s+")
# Generated from other files, whose words are theirs.
OTHERS = ("docs/results.md", "docs/claims.md", "docs/claims/", "docs/calibration.md")
# Not rewritten yet; take a page out with its rewriting.
PENDING = (
    *(f"docs/strategies/{name}.md" for name in ("README", "braid", "dflop", "dip", "disttrain", "entrain", "hetero")),
    "docs/tuning.md",
)


def problems(text: str) -> Iterator[str]:
    """Long sentences and unclear words of a Markdown text."""
    for block in BLOCK.split(CODE.sub("", GENERATED.sub("", text))):
        plain = re.sub(r"`[^`]*`", "`code`", re.sub(r"\]\([^)]*\)", "]", " ".join(block.split())))
        for sentence in SENTENCE.split(plain):
            if (count := len(sentence.split())) > MAX_WORDS:
                yield f"{count} words: {sentence[:80]}..."
            yield from (f"{found[0]}: {sentence[:80]}" for found in UNCLEAR.finditer(sentence))


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of every page that is written by hand, and of every screen of help."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md")]
    for path in [*pages, *sorted((ROOT / "docs").rglob("*.md"))]:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith((*OTHERS, *PENDING)):
            yield name, path.read_text()
    for topic in ("", KEYS, *verbs()):
        screen = re.sub(r"\n +(?=\S)", "\n- ", help_text(topic))
        yield f"--help={topic}", screen


def main() -> int:
    """Print every problem; return 1 if there is one."""
    found = [f"{name}: {problem}" for name, text in texts() for problem in problems(text)]
    print("\n".join(found), file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
