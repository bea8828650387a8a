"""Words of a command line, sorted by kind, without anything that takes long to import."""

from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from entrain_bench.base.errors import UserError, either, similar
from entrain_bench.config.tree import GROUPS, choices

RUN = "run"
MULTIRUN = "--multirun"
CONFIG_DIR = "--config-dir"
HELP = "--help"
VERSION = "--version"
OF_COMPLETION = "--shell-completion"
# Our options and those that Hydra handles, by long names, with their arguments for argparse.
FLAG = {"action": "store_const", "const": ""}
SHELLS = [f"{verb}={shell}" for verb in ("install", "uninstall", "query") for shell in ("bash", "fish", "zsh")]
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
OWN_OPTIONS = {
    MULTIRUN: ("-m", FLAG),
    VERSION: ("", FLAG),
    HELP: ("-h", {"nargs": "?", "const": ""}),
    CONFIG_DIR: ("", {}),
}
HYDRA_OPTIONS = {
    "--hydra-help": ("", FLAG),
    "--resolve": ("", FLAG),
    "--cfg": ("-c", {"choices": ("job", "hydra", "all")}),
    "--package": ("-p", {}),
    "--info": ("-i", {"nargs": "?", "const": "", "choices": INFO}),
    OF_COMPLETION: ("-sc", {"choices": SHELLS}),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A command line, its words sorted by kind."""

    words: tuple[str, ...]  # without ``=``
    overrides: tuple[str, ...]  # ``key=value``
    options: Mapping[str, str]  # by name; empty values for flags, and for ``--help`` without a topic
    unknown: tuple[str, ...]  # options that do not exist
    hydra: tuple[str, ...]  # options that Hydra answers, with their values


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def split(arguments: Sequence[str]) -> Line:
    """Sort the words of a command line; options may stand anywhere; ``UserError`` for a wrong value of one."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, (short, told) in (OWN_OPTIONS | HYDRA_OPTIONS).items():
        parser.add_argument(name, *filter(None, [short]), dest=name, **told)  # type: ignore[arg-type]
    parsed, rest = parser.parse_known_args(arguments)
    given: dict[str, str] = {name: value for name, value in vars(parsed).items() if value is not None}
    others = [text for text in rest if not text.startswith("-")]
    overrides = tuple(text for text in others if "=" in text or text.startswith("~"))
    return Line(
        tuple(text for text in others if text not in overrides),
        overrides,
        {name: value for name, value in given.items() if name in OWN_OPTIONS},
        tuple(text for text in rest if text.startswith("-")),
        tuple(text for name in HYDRA_OPTIONS if name in given for text in filter(None, [name, given[name]])),
    )


def verb_of(line: Line, verbs: Collection[str]) -> tuple[str, Line]:
    """The verb of a command line, ``run`` without one, and the line without it; ``UserError`` for another word."""
    if line.unknown:
        return next((word for word in line.words if word in verbs), RUN), line
    if not line.words:
        return RUN, line
    first, *others = line.words
    if first not in verbs:
        near = similar(first, [*verbs, HELP])
        hint = (
            f". Did you mean {either(near)}?" if near else choice_hint(first) or f". Verbs: {', '.join(sorted(verbs))}"
        )
        raise UserError(f"unknown verb {first}{hint}")
    return first, replace(line, words=tuple(others))


def choice_hint(word: str) -> str:
    """Return a hint at the group that has a word among its choices; empty if none has."""
    group = next((group for group in GROUPS if word.lower() in choices(group)), "")
    return f". Did you mean {group}={word.lower()}?" if group else ""
