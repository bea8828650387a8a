"""``python -m prose``: words with a plainer one and long sentences in pages, YAML texts and ``--help``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.commands.help import KEYS, help_text, verbs

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "results/README.md", "experiments/**/*.md")
# Texts of generated pages, and YAML files whose comments are read.
TEMPLATES = "entrain_bench/**/templates/*.md"
TEXTS = ("experiments/claim/*.yaml", "experiments/table/*.yaml")
COMMENTS = ("experiments/config.yaml", "experiments/strategies.yaml")
# Whole pages, and blocks of others, whose texts are checked where they come from.
GENERATED = re.compile(r"docs/(?:claims(?:/\w+)?|results|calibration)\.md")
BLOCK = re.compile(r"<!-- (?!end)\w.*?<!-- end -->", re.DOTALL)
MAX_WORDS = 35
MAX_WORDS_OF_DOCS = 23_500
# Pattern of a word, and what to write instead.
PLAINER = {
    r"anew": "again, or re-",
    r"beside": "next to, or in addition to",
    r"alike": "the same",
    r"nobody|whoever|anybody": "the actor's name",
    r"(?:stand|stands|standing) (?:in|for)": "is in, or means",
    r"as (?:it is|they are)": "unmodified",
    r"so many": "the number",
    r"by (?:itself|themselves)": "separately",
    r"(?:go|goes) on": "resumes",
    r"told apart|tell apart|tells apart": "significantly different",
    r"at hand": "available",
    r"whatever": "any",
    r"all but|nothing but|but for": "except",
    r"\w*(?:behaviour|colour|modell|synchronis|utilis|optimis(?:e|ing|ation))\w*": "American spelling",
}
# Not prose: fenced and indented code, comments.
SKIPPED = re.compile(r"^(```+|~~~+).*?^\1[ ]*$|<!--.*?-->|^(?: {4}|\t).*?$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^()]*\)")
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
# A paragraph, an item, a heading and a cell of a table are texts of their own.
BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.|#+|\||:::?)\s)|(?<=\|)\n|(?<!\\)\|")
SENTENCE = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(*_`]*[A-Z`])")
WORD = re.compile(r"\w[\w'/.,:=%x-]*")
# Of a public function or class.
RIDDLE = re.compile(r'(?:def|class) [A-Za-z][^"]*"""(?:What|Who|Which)\b.*')
NAME = re.compile(r"^ {2}\S.*?(?: {2,}|$)", re.MULTILINE)


def main() -> int:
    texts = read()
    lines = [f"{name}: {problem}" for name, text in texts.items() for problem in problems(text)]
    pages = (text for name, text in texts.items() if name.startswith("docs/"))
    count = sum(len(WORD.findall(sentence)) for page in pages for sentence in sentences(page))
    for name, code in _files("entrain_bench/**/*.py", "strategies/**/*.py", "workloads/**/*.py"):
        lines += [f"{name}: {riddle}: write what is returned or represented" for riddle in RIDDLE.findall(code)]
    if count > MAX_WORDS_OF_DOCS:
        lines.append(f"docs: {count} hand-written words (at most {MAX_WORDS_OF_DOCS})")
    print("\n".join(lines) or f"no sentence to rewrite; {count} hand-written words in docs")
    return int(bool(lines))


def read() -> dict[str, str]:
    texts = {name: BLOCK.sub("", text) for name, text in _files(*PAGES, TEMPLATES) if not GENERATED.fullmatch(name)}
    texts |= {name: "\n\n".join(leaves(yaml.safe_load(text))) for name, text in _files(*TEXTS)}
    texts |= {name: "\n".join(re.findall(r"(?:^|\s)# ?(.*)|$", text, re.MULTILINE)) for name, text in _files(*COMMENTS)}
    screens = (help_text(topic) for topic in ("", KEYS, *verbs()))
    return texts | {"--help": "\n\n".join(described(screen) for screen in screens)}


def _files(*patterns: str) -> Iterator[tuple[str, str]]:
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def described(screen: str) -> str:
    return "\n".join(line.strip() for line in NAME.sub("\n", screen).splitlines())


def leaves(node: Any) -> Iterator[str]:
    if isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from leaves(value)
    elif isinstance(node, str) and " " in node and "=" not in node:
        yield node


def problems(text: str) -> list[str]:
    lines = []
    for sentence in sentences(text):
        count = len(WORD.findall(sentence))
        if count > MAX_WORDS:
            lines.append(f"{count} words (at most {MAX_WORDS}): {sentence[:60]}...")
        for pattern, better in PLAINER.items():
            for word in re.findall(rf"\b(?:{pattern})\b", sentence, re.IGNORECASE):
                lines.append(f"{word!r}: write {better}: {sentence[:60]}...")
    return lines


def sentences(text: str) -> Iterator[str]:
    """Every sentence; code counts as a word, and links are shown without their addresses."""
    for block in BREAK.split(SKIPPED.sub("", text)):
        plain = " ".join(re.sub(r"[*_>#]+", "", CODE.sub("code", LINK.sub(r"\1", block))).split())
        yield from filter(None, SENTENCE.split(plain))


if __name__ == "__main__":
    sys.exit(main())
