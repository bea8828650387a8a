"""Read the comments of the configuration tree: keys of a run with defaults, and choices of groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import yaml

from entrain_bench.config.command_line import CONFIG_NAME
from entrain_bench.config.parts import option_lines
from entrain_bench.config.tree import config_tree

# A group under defaults, a key, and a key inside of one; each with its value, and a comment on its line.
GROUP_LINE = re.compile(r"  - (?P<name>\w+): (?P<value>\S+)  # (?P<comment>.+)")
KEY_LINE = re.compile(r"(?P<indent>  )?(?P<name>\w+):(?: (?P<value>.+?))?(?:  # (?P<comment>.+))?")
COMMENT_LINE = re.compile(r"# ?(?P<comment>.*)")
# Where the tree's keys end and Hydra's begin.
END = "hydra:"
# Where Hydra puts a choice is no part of what it says.
PACKAGE = "# @package"


@dataclass(frozen=True, slots=True)
class Key:
    """A key that a run has, as ``config.yaml`` states it.

    Attributes:
        name: its path; ``speed.*`` for keys that share a default.
        default: as YAML writes it.
        comment: all that is said of it.
    """

    name: str
    default: str
    comment: str

    @property
    def meaning(self) -> str:
        """The comment up to its first full stop or semicolon, in a capital."""
        first = re.split(r"[.;](?: |$)", self.comment)[0]
        return first[:1].upper() + first[1:]


@cache
def documented_keys() -> tuple[Key, ...]:
    """Every key with its comment: the groups, then the others in the order of the file."""
    lines = (config_tree() / f"{CONFIG_NAME}.yaml").read_text().splitlines()
    chosen = [Key(each["name"], each["value"], each["comment"]) for each in map(GROUP_LINE.fullmatch, lines) if each]
    keys: list[Key] = []
    for key, inner in _blocks(lines[: lines.index(END)]):
        defaults = {each.default for each in inner}
        if len(defaults) == 1:
            names = ", ".join(each.name.rpartition(".")[2] for each in inner)
            keys.append(Key(f"{key.name}.*", defaults.pop(), f"{names}: {key.comment[:1].lower()}{key.comment[1:]}"))
        else:
            keys += inner or [key]
    return (*chosen, *keys)


def groups(config_dir: str | None = None) -> dict[str, dict[str, str]]:
    """Return the choices of every group, with the first sentence on each.

    Args:
        config_dir: a folder of the user's with further choices; None for none.
    """
    found: dict[str, dict[str, str]] = {}
    for key in documented_keys():
        for root in _roots(config_dir):
            for path in sorted((root / key.name).rglob("*.yaml")):
                group = path.parent.relative_to(root).as_posix()
                found.setdefault(group, {})[path.stem] = first_sentence(path)
    return {group: dict(sorted(found[group].items())) for group in sorted(found)}


def text_of(group: str, choice: str, config_dir: str | None = None) -> str:
    """The YAML of a choice, a folder's of the user's before the suite's, without where Hydra puts it.

    Options that a part's YAML leaves to its class are shown with their defaults and meanings.
    """
    paths = [root / group / f"{choice}.yaml" for root in _roots(config_dir)]
    text = next(path for path in reversed(paths) if path.exists()).read_text()
    lines = [line for line in text.splitlines() if not line.startswith(PACKAGE)]
    return "\n".join([*lines, *option_lines(f"{group}/{choice}", yaml.safe_load(text) or {})])


def first_sentences(group: str) -> dict[str, str]:
    """The choices of a group, and the first sentence on each."""
    return {path.stem: first_sentence(path) for path in sorted((config_tree() / group).glob("*.yaml"))}


def _roots(config_dir: str | None) -> list[Path]:
    return [config_tree(), *([Path(config_dir)] if config_dir else [])]


def _blocks(lines: Sequence[str]) -> Iterator[tuple[Key, list[Key]]]:
    """Every top-level key with its comment, and the keys inside of it."""
    comment: list[str] = []
    key: Key | None = None
    inner: list[Key] = []
    for line in lines:
        if said := COMMENT_LINE.fullmatch(line):
            comment.append(said["comment"])
        elif (found := KEY_LINE.fullmatch(line)) and found["indent"] and key:
            inner.append(Key(f"{key.name}.{found['name']}", found["value"], found["comment"] or ""))
        else:
            if key and key.name != "defaults":
                yield key, inner
            key = None
            inner = []
            if found:
                key = Key(found["name"], found["value"] or "", found["comment"] or " ".join(comment))
            comment = []
    if key:
        yield key, inner


def first_sentence(path: Path) -> str:
    """Return the first sentence of a choice's comment, or the class that it names."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith(PACKAGE)]
    leading = takewhile(lambda line: line.startswith("#"), lines)
    comment = " ".join(line.removeprefix("#").strip() for line in leading)
    if not comment:
        target = next((line for line in lines if line.startswith("_target_: ")), "")
        return target.rpartition(".")[2]
    return re.split(r"(?<=\.) (?=[A-Z])", comment)[0]
