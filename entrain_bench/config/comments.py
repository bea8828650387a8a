"""Read the comments of the configuration tree: keys of a run with defaults, and choices of groups."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import yaml

from entrain_bench.config.parts import option_lines
from entrain_bench.config.tree import CONFIG_NAME, GROUPS, config_tree, folders

# A key, inside of another one or in a list, with its default and the comment behind it.
LINE = re.compile(r"(?P<inside> +(?:- )?)?(?P<name>\w+):(?: (?P<default>.*?))?(?:  # (?P<comment>.*))?")
# Hydra's package of a choice is not part of its comment.
PACKAGE = "# @package"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a run as ``config.yaml`` states it: its path (``speed.*`` if keys share a default), default, comment."""

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
    """Return every key with its comment: the groups, then the others in the order of the file."""
    listed: dict[str, list[Key]] = {}
    above = ""
    top = ""
    for line in (config_tree() / f"{CONFIG_NAME}.yaml").read_text().splitlines():
        if line.startswith("#"):
            above += line.removeprefix("#").rstrip()
            continue
        if match := LINE.fullmatch(line):
            if match["inside"]:
                listed[top].append(Key(match["name"], match["default"], match["comment"] or ""))
            else:
                top = match["name"]
                listed[top] = [Key(top, match["default"] or "", above.strip())]
        above = ""
    del listed["hydra"]
    chosen = (key for key in listed.pop("defaults") if key.comment and key.default)
    return (*chosen, *(key for first, *inner in listed.values() for key in _nested(first, inner)))


def groups(config_dir: str | None = None) -> dict[str, dict[str, str]]:
    """Return the choices of every group, also those of a user's folder, with the first sentence on each."""
    listed: dict[str, dict[str, str]] = {}
    for top in GROUPS:
        for root in folders(config_dir):
            for path in sorted((root / top).rglob("*.yaml")):
                group = path.parent.relative_to(root).as_posix()
                listed.setdefault(group, {})[path.stem] = first_sentence(path)
    return {group: dict(sorted(listed[group].items())) for group in sorted(listed)}


def text_of(group: str, choice: str, config_dir: str | None = None) -> str:
    """Return the YAML of a choice, with the options that a part leaves to its class; a user's before the suite's."""
    paths = [root / group / f"{choice}.yaml" for root in folders(config_dir)]
    text = next(path for path in reversed(paths) if path.exists()).read_text()
    lines = [line for line in text.splitlines() if not line.startswith(PACKAGE)]
    return "\n".join([*lines, *option_lines(f"{group}/{choice}", yaml.safe_load(text) or {})])


def first_sentences(group: str) -> dict[str, str]:
    """Return the choices of a group, and the first sentence on each."""
    return {path.stem: first_sentence(path) for path in sorted((config_tree() / group).glob("*.yaml"))}


def first_sentence(path: Path) -> str:
    """Return the first sentence of a choice's comment, or the class that it names."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith(PACKAGE)]
    leading = takewhile(lambda line: line.startswith("#"), lines)
    comment = " ".join(line.removeprefix("#").strip() for line in leading)
    if not comment:
        target = next((line for line in lines if line.startswith("_target_: ")), "")
        return target.rpartition(".")[2]
    return re.split(r"(?<=\.) (?=[A-Z])", comment)[0]


def _nested(key: Key, inner: Sequence[Key]) -> list[Key]:
    """Return a key, or those inside of it; a single key if they share a default."""
    if not inner:
        return [key]
    defaults = {one.default for one in inner}
    if len(defaults) == 1:
        names = ", ".join(one.name for one in inner)
        return [Key(f"{key.name}.*", defaults.pop(), f"{names}: {key.comment[:1].lower()}{key.comment[1:]}")]
    return [Key(f"{key.name}.{one.name}", one.default, one.comment) for one in inner]
