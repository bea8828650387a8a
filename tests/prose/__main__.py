"""``python -m prose``: words with a plainer one and long sentences in pages, YAML, ``--help`` and Python texts."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import filterfalse
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.commands.help import KEYS, help_text, verbs

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "results/README.md", "experiments/**/*.md")
# Texts of generated pages, and YAML files whose comments are read.
TEMPLATES = "entrain_bench/**/templates/*.md"
TEXTS = ("experiments/claim/*.yaml", "experiments/table/*.yaml")
COMMENTS = ("experiments/*.yaml", "experiments/**/*.yaml")
# Docstrings, comments and messages are read.
PYTHON = ("entrain_bench/**/*.py", "strategies/**/*.py", "workloads/**/*.py", "experiments/*.py", "docs/sitegen/*.py")
# Whole pages, and blocks of others, whose texts are checked where they come from.
GENERATED = re.compile(r"docs/(?:claims(?:/\w+)?|results|calibration|terms)\.md")
BLOCK = re.compile(r"<!-- (?!end)\w.*?<!-- end -->", re.DOTALL)
MAX_WORDS = 35
MAX_WORDS_OF_DOCS = 22_000
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
# Further patterns of Python and YAML comments: each is a noun riddle, or a term that the glossary replaces.
RIDDLES = {
    r"what(?!.*\?)": "the noun",
    r"^(?:who|which)": "the noun that is returned or represented",
    r"somebody|everybody|no one": "the actor's name",
    r"as (?:it was|they were)": "unchanged",
    r"(?:s|seconds|time|bytes|tokens|samples) an iteration|(?:one|two) \w+ a (?:module|stage|rank|run|pair)": "per",
    r"95 ?% (?:intervals?|to|\d)": "95% CI",
    r"(?:second|next)[- ](?:best|fastest)|fastest other": "runner-up",
    r"sources? left out(?! of the fit)|left-out sources?": "leave-one-source-out",
    r"belie(?:f|fs|ve|ves|ved)": "estimate, estimated",
    r"truths?": "cost model",
    r"\w*(?:neighbour|centre|labelled|(?:initial|normal|minim|maxim|recogn)is(?:e|ing|ation))\w*": "American spelling",
}
# Sentences that stay, with the reason.
ALLOWED = {
    "false but for recomputed encoders in one stage": "a change of the code would change the keys of all runs",
    "Fitted constants (standard deviation); error of a source left out: code%": "docs/calibration.md has it",
}
# Not prose: fenced and indented code, comments.
SKIPPED = re.compile(r"^(```+|~~~+).*?^\1[ ]*$|<!--.*?-->|^(?: {4}|\t).*?$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^()]*\)")
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
# A paragraph, an item, a heading and a cell of a table are texts of their own.
BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.|#+|\||:::?)\s)|(?<=\|)\n|(?<!\\)\|")
SENTENCE = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(*_`]*[A-Z`])")
WORD = re.compile(r"\w[\w'/.,:=%x-]*")
# An entry of a docstring's section; Sphinx's roles do not matter.
ENTRY = re.compile(r"^(?=\w+(?:, \w+)*: )", re.MULTILINE)
# Lines of one comment, or a comment behind code.
COMMENT = re.compile(r"^( *)#.*(?:\n\1#.*)*|(?<=\S)  #.*", re.MULTILINE)
NAME = re.compile(r"^ {2}\S.*?(?: {2,}|$)", re.MULTILINE)


def main() -> int:
    texts = read()
    lines = [f"{name}: {problem}" for name, text in texts.items() for problem in problems(text, name)]
    pages = (text for name, text in texts.items() if name.startswith("docs/") and ":" not in name)
    count = sum(len(WORD.findall(sentence)) for page in pages for sentence in sentences(page))
    if count > MAX_WORDS_OF_DOCS:
        lines.append(f"docs: {count} hand-written words (at most {MAX_WORDS_OF_DOCS})")
    print("\n".join(lines) or f"no sentence to rewrite; {count} hand-written words in docs")
    return int(bool(lines))


def read() -> dict[str, str]:
    texts = {name: BLOCK.sub("", text) for name, text in _files(*PAGES, TEMPLATES) if not GENERATED.fullmatch(name)}
    texts |= {name: "\n\n".join(leaves(yaml.safe_load(text))) for name, text in _files(*TEXTS)}
    for name, text in _files(*COMMENTS):
        texts[f"{name}: comments"] = "\n".join(re.findall(r"(?:^|\s)# ?(.*)|$", text, re.MULTILINE))
    for name, code in _files(*PYTHON):
        for line, text in python_texts(code):
            texts[f"{name}:{line}"] = f"{texts.get(f'{name}:{line}', '')}\n\n{text}"
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


def python_texts(code: str) -> Iterator[tuple[int, str]]:
    """Docstrings, strings of several words, and comments, each with its line; values in strings are code."""
    parts: set[ast.AST] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)) as part):
                parts.add(part)
                yield node.lineno, ENTRY.sub("\n", "\n".join(line.strip() for line in text.splitlines()))
            case ast.JoinedStr(values=values):
                parts.update(values)
                yield (
                    node.lineno,
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in values),
                )
            case ast.Constant(value=str(text)) if " " in text and node not in parts:
                yield node.lineno, text
    for comment in COMMENT.finditer(code):
        yield code.count("\n", 0, comment.start()) + 1, re.sub(r"^ *# ?", "", comment[0], flags=re.MULTILINE)


def problems(text: str, name: str = "docs") -> list[str]:
    words = PLAINER | RIDDLES if ":" in name else PLAINER
    lines = []
    pattern = re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)
    for sentence in filterfalse(ALLOWED.__contains__, sentences(text)):
        count = len(WORD.findall(sentence))
        if count > MAX_WORDS:
            lines.append(f"{count} words (at most {MAX_WORDS}): {sentence[:60]}...")
        for word in pattern.findall(sentence):
            better = next(better for one, better in words.items() if re.fullmatch(one, word, re.IGNORECASE))
            lines.append(f"{word!r}: write {better}: {sentence[:60]}...")
    return lines


def sentences(text: str) -> Iterator[str]:
    """Every sentence; code counts as a word, and links are shown without their addresses."""
    for block in BREAK.split(SKIPPED.sub("", text)):
        plain = " ".join(re.sub(r"[*_>#]+", "", CODE.sub("`code`", LINK.sub(r"\1", block))).split())
        yield from (sentence.replace("`code`", "code") for sentence in SENTENCE.split(plain) if sentence)


if __name__ == "__main__":
    sys.exit(main())
