"""``python -m prose [--record]``: fail where docs or help have more hits than ``known.yaml`` says.

``--record`` writes the present numbers to that file. It refuses a number that has grown, unless the file is removed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.commands.help import KEYS, help_text, verbs

from .sentences import hits, num_words

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).with_name("known.yaml")
PAGES = (
    *("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "results/README.md", "experiments/**/*.md"),
    "entrain_bench/**/templates/*.md",
)
# Their texts stand on generated pages.
TEXTS = ("experiments/claim/*.yaml", "experiments/table/*.yaml")
COMMENTS = ("experiments/config.yaml", "experiments/strategies.yaml")
HELP = "--help"
# What the suite writes, of texts that are checked where they come from: whole pages, and blocks of others.
GENERATED = re.compile(r"docs/(?:claims(?:/\w+)?|results|free_degrees|calibration)\.md")
BLOCK = re.compile(r"<!-- (?!end)\w.*?<!-- end -->", re.DOTALL)
# On the left of a screen of help.
NAME = re.compile(r" {2}\S.*?(?: {2,}|$)")
HAND_WRITTEN, LIMIT = "hand-written words of docs", 25_000


def main(arguments: list[str]) -> int:
    """Print what remains by file; 1 if any file has more than is known, with the places."""
    texts = read()
    found = {name: hits(text) for name, text in texts.items()}
    counts = {name: len(each) for name, each in found.items() if each}
    counts[HAND_WRITTEN] = hand_written(texts)
    known = yaml.safe_load(KNOWN.read_text()) if KNOWN.exists() else None
    worse = grown(counts, known) if known is not None else {}
    for name in worse:
        print(f"{name}: {counts[name]}, was {worse[name]}", file=sys.stderr)
        for hit in found.get(name, ()):
            print(f"  {name}:{hit.line}: {hit.problem}", file=sys.stderr)
    if worse:
        return 1
    if "--record" in arguments:
        KNOWN.write_text(HEAD + yaml.safe_dump(counts, sort_keys=True))
    print(summary(counts))
    return 0


HEAD = "# Sentences and words that are left to rewrite, by file; a number may only fall (python -m prose --record).\n"


def read() -> dict[str, str]:
    """Every text that is checked: pages, comments of YAML files, and the help, by name."""
    texts = {name: BLOCK.sub(_blank, text) for name, text in _files(*PAGES) if not GENERATED.fullmatch(name)}
    texts |= {name: "\n\n".join(leaves(yaml.safe_load(text))) for name, text in _files(*TEXTS)}
    for name in COMMENTS:
        texts[name] = comments((ROOT / name).read_text())
    screens = (help_text(topic) for topic in ("", KEYS, *verbs()))
    texts[HELP] = "\n\n".join(map(described, screens))
    return texts


def described(screen: str) -> str:
    """A screen of help without the names on its left; what stands next to a name is a paragraph of its own."""
    lines = (NAME.sub("\n", line) if NAME.match(line) else line.strip() for line in screen.splitlines())
    return "\n".join(lines)


def _files(*patterns: str) -> Iterator[tuple[str, str]]:
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def _blank(block: re.Match[str]) -> str:
    """As many lines as a block has, so that those behind it keep their numbers."""
    return "\n" * block[0].count("\n")


def leaves(node: Any) -> Iterator[str]:
    """Every text of a YAML that has words; overrides have none."""
    if isinstance(node, dict):
        node = [*node.values()]
    if isinstance(node, list):
        for value in node:
            yield from leaves(value)
    elif isinstance(node, str) and " " in node and "=" not in node:
        yield node


def comments(text: str) -> str:
    """The comments of a YAML as paragraphs; lines without one end a paragraph."""
    lines = (re.search(r"(?:^|\s)# ?(.*)", line) for line in text.splitlines())
    return "\n".join(found[1] if found else "" for found in lines)


def hand_written(texts: Mapping[str, str]) -> int:
    """Words of the pages of docs that no program writes."""
    return sum(num_words(text) for name, text in texts.items() if name.startswith("docs/"))


def grown(counts: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
    """Files with more hits than are known, and how many those were; words once they have been within their limit."""
    limits = {name: known.get(name, 0) for name in counts}
    limits[HAND_WRITTEN] = LIMIT if limits[HAND_WRITTEN] <= LIMIT else counts[HAND_WRITTEN]
    return {name: known.get(name, 0) for name, count in counts.items() if count > limits[name]}


def summary(counts: Mapping[str, int]) -> str:
    """Remaining hits, most first."""
    files = {name: count for name, count in counts.items() if name != HAND_WRITTEN}
    lines = [f"{count:6} {name}" for name, count in sorted(files.items(), key=lambda one: (-one[1], one[0]))]
    words = f"{HAND_WRITTEN}: {counts[HAND_WRITTEN]:,} (limit {LIMIT:,})"
    return "\n".join([*lines, f"{sum(files.values()):6} sentences and words to rewrite in {len(files)} files; {words}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
