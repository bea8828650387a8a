"""Sentences of Markdown and help, those that are too long, and words that have a plainer one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_WORDS = 35
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
BANNED = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), better) for word, better in PLAINER.items()]
# Nothing in these is prose; each keeps its lines.
SKIPPED = re.compile(r"^(```+|~~~+).*?^\1[ ]*$|<!--.*?-->|^(?: {4}|\t).*?$", re.MULTILINE | re.DOTALL)
# Shown without its address; code counts as a word.
LINK, CODE = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^()]*\)"), re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
MARKS = re.compile(r"[*_>#]+")
# A list's item, a heading, a row of a table and an empty line begin a new text.
STARTS = re.compile(r"\s*(?:[-*+]|\d+\.|#+|\||:::?)\s|\s*$")
SENTENCE = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(*_`]*[A-Z`])")
# A sentence that a list continues, and an item that does so.
CONTINUED, CONTINUES = re.compile(r"[:;,]$"), re.compile(r"(?:[-*+]|\d+\.) [a-z]")
WORD = re.compile(r"\w[\w'/.,:=%x-]*")


@dataclass(frozen=True, slots=True)
class Hit:
    """A place to rewrite: its line, and what is wrong."""

    line: int
    problem: str


def hits(text: str) -> list[Hit]:
    """Return the places of a Markdown text that the rules of prose forbid, by line."""
    found = []
    for line, sentence in with_items(sentences(text)):
        count = len(WORD.findall(sentence))
        if count > MAX_WORDS:
            found.append(Hit(line, f"{count} words (at most {MAX_WORDS}): {sentence[:60]}..."))
    for line, sentence in sentences(text):
        for pattern, better in BANNED:
            found += [Hit(line, f"{word[0]!r}: write {better}") for word in pattern.finditer(sentence)]
    return sorted(found, key=lambda hit: hit.line)


def with_items(found: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield sentences, each together with the items of a list that continue it: those in lower case after a colon."""
    first, whole = 0, ""
    for line, sentence in found:
        if CONTINUED.search(whole) and CONTINUES.match(sentence):
            whole += f" {sentence}"
            continue
        if whole:
            yield first, whole
        first, whole = line, sentence
    if whole:
        yield first, whole


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield every sentence with the line on which its text begins; each cell of a table is a text."""
    for line, block in _texts(text):
        for cell in _cells(block):
            plain = " ".join(MARKS.sub("", CODE.sub("code", LINK.sub(r"\1", cell))).split())
            yield from ((line, sentence) for sentence in SENTENCE.split(plain) if sentence)


def num_words(text: str) -> int:
    """How many words a reader has to read, code left out."""
    return sum(len(WORD.findall(sentence)) for _, sentence in sentences(text))


def _texts(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items, headings and rows, each with the number of its first line."""
    blank = SKIPPED.sub(lambda found: "\n" * found[0].count("\n"), text)
    start, lines = 1, list[str]()
    for number, line in enumerate(blank.splitlines(), start=1):
        if STARTS.match(line) and lines:
            yield start, "\n".join(lines)
            lines = []
        if not line.strip():
            continue
        start = number if not lines else start
        lines.append(line)
        if line.lstrip().startswith(("#", "|")):
            yield start, line
            lines = []
    if lines:
        yield start, "\n".join(lines)


def _cells(block: str) -> list[str]:
    row = block.strip()
    return re.split(r"(?<!\\)\|", row.strip("|")) if row.startswith("|") else [block]
