"""Words of a command line, sorted by kind, without anything that takes long to import."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from entrain_bench.base.errors import UserError, nearest, unknown_choice
from entrain_bench.config.tree import GROUPS, choices

RUN = "run"
MULTIRUN = "--multirun"
CONFIG_DIR = "--config-dir"
HELP = "--help"
VERSION = "--version"
# Every option by what may be typed.
FLAGS = {MULTIRUN: MULTIRUN, "-m": MULTIRUN, VERSION: VERSION}
HELP_OPTIONS = (HELP, "-h")
# Options that Hydra answers itself, with what may follow; nothing for a flag.
CFG = ("job", "hydra", "all")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
COMPLETION = tuple(f"{verb}={shell}" for verb in ("install", "uninstall", "query") for shell in ("bash", "fish", "zsh"))
OF_COMPLETION = ("--shell-completion", "-sc")
HYDRA_OPTIONS: dict[str, tuple[str, ...]] = {"--hydra-help": (), "--resolve": ()}
HYDRA_OPTIONS |= {"--cfg": CFG, "-c": CFG, "--info": INFO, "-i": INFO} | dict.fromkeys(OF_COMPLETION, COMPLETION)
# Those that may follow without a choice: a path of the configuration, or nothing.
PACKAGE = ("--package", "-p")
INFORM = ("--info", "-i")


@dataclass(frozen=True, slots=True)
class Line:
    """A command line, its words sorted by kind.

    Attributes:
        words: without ``=``.
        overrides: ``key=value``.
        options: values of options by name; nothing for a flag, and for ``--help`` without a topic.
        unknown: what looks like an option and is none, and the value that follows it.
        hydra: options that Hydra answers, with their values.
    """

    words: tuple[str, ...]
    overrides: tuple[str, ...]
    options: Mapping[str, str]
    unknown: Mapping[str, str]
    hydra: tuple[str, ...]


def split(arguments: Sequence[str]) -> Line:
    """Sort the words of a command line; options may stand anywhere; ``UserError`` for an option without its value."""
    words: list[str] = []
    overrides: list[str] = []
    options: dict[str, str] = {}
    unknown: dict[str, str] = {}
    hydra: list[str] = []
    rest = [*arguments]
    while rest:
        text = rest.pop(0)
        name, given, value = text.partition("=")
        follows = rest[0] if rest and not rest[0].startswith("-") else ""
        if not text.startswith("-"):
            (overrides if given or text.startswith("~") else words).append(text)
        elif name in HELP_OPTIONS:
            options[HELP] = value if given or not follows else rest.pop(0)
        elif text in FLAGS:
            options[FLAGS[text]] = ""
        elif name in HYDRA_OPTIONS or name in PACKAGE:
            hydra += _of_hydra(name, value, rest)
        elif name == CONFIG_DIR:
            options[name] = value if given or not follows else rest.pop(0)
            if not options[name]:
                raise UserError(f"{name}: needs a value")
        else:
            unknown[name] = value if given else "" if "=" in follows else follows
    return Line(tuple(words), tuple(overrides), options, unknown, tuple(hydra))


def _of_hydra(name: str, value: str, rest: list[str]) -> list[str]:
    """Return an option that Hydra answers, and its value, which may be the first of the words that follow."""
    allowed = HYDRA_OPTIONS.get(name, ())
    if not allowed and name not in PACKAGE:
        return [name]
    is_value = bool(rest) and not rest[0].startswith("-") and ("=" not in rest[0] or name in OF_COMPLETION)
    value = value or (rest.pop(0) if is_value else "")
    if not value and name not in INFORM:
        raise UserError(f"{name}: needs a value{f', one of {", ".join(allowed)}' if allowed else ''}")
    if value and allowed and value not in allowed:
        raise unknown_choice(name, value, allowed)
    return [name, value] if value else [name]


def verb_of(line: Line, verbs: Collection[str]) -> tuple[str, Line]:
    """The verb of a command line, ``run`` without one, and the line without it; ``UserError`` for another word."""
    if line.unknown:
        return next((word for word in line.words if word in verbs), RUN), line
    if not line.words:
        return RUN, line
    first, *others = line.words
    if first not in verbs:
        raise UserError(_no_verb(first, verbs))
    return first, replace(line, words=tuple(others))


def _no_verb(word: str, verbs: Iterable[str]) -> str:
    """Return the error for a first word that is no verb: the nearest verb, or the key whose choice it is."""
    if word == "figure":
        return "unknown verb figure. Use figures NAME key=value"
    near = nearest(word, verbs)
    hint = f". Did you mean {near}?" if near else choice_hint(word) or f". Verbs: {', '.join(sorted(verbs))}"
    return f"unknown verb {word}{hint}"


def choice_hint(word: str) -> str:
    """Return a hint at the group that has a word among its choices; empty if none has."""
    group = next((group for group in GROUPS if word.lower() in choices(group)), "")
    return f". Did you mean {group}={word.lower()}?" if group else ""
