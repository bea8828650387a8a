"""Read the comments of the configuration tree: keys of a run with defaults, and choices of groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import yaml

from entrain_bench.config.parts import option_lines
from entrain_bench.config.tree import CONFIG_NAME, GROUPS, config_tree, folders

# Keys of the file that are none of a run.
LIST = "defaults"
OF_HYDRA = "hydra"
# Where Hydra puts a choice is no part of what it says.
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
    text = (config_tree() / f"{CONFIG_NAME}.yaml").read_text()
    lines = text.splitlines()
    chosen: list[Key] = []
    keys: list[Key] = []
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    for name, value in root.value:
        if name.value == LIST:
            entries = (entry for entry in value.value if isinstance(entry, yaml.MappingNode))
            chosen = [key for entry in entries for key in _inner(entry, lines) if key.comment]
        elif isinstance(value, yaml.MappingNode) and name.value != OF_HYDRA:
            keys += _nested(Key(name.value, "", _above(name, lines)), [*_inner(value, lines)])
        elif name.value != OF_HYDRA:
            keys.append(Key(name.value, _text(value, lines), _beside(value, lines) or _above(name, lines)))
    return (*chosen, *keys)


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


def _inner(node: yaml.MappingNode, lines: Sequence[str]) -> Iterator[Key]:
    """Yield the keys of a mapping, each with the comment on its line."""
    for name, value in node.value:
        yield Key(name.value, _text(value, lines), _beside(value, lines))


def _nested(key: Key, inner: Sequence[Key]) -> list[Key]:
    """Return the keys inside of one; a single key if they share a default."""
    defaults = {one.default for one in inner}
    if len(defaults) == 1:
        names = ", ".join(one.name for one in inner)
        return [Key(f"{key.name}.*", defaults.pop(), f"{names}: {key.comment[:1].lower()}{key.comment[1:]}")]
    return [Key(f"{key.name}.{one.name}", one.default, one.comment) for one in inner]


def _text(value: yaml.Node, lines: Sequence[str]) -> str:
    """Return a value of one line as it is written."""
    return lines[value.start_mark.line][value.start_mark.column : value.end_mark.column]


def _beside(value: yaml.Node, lines: Sequence[str]) -> str:
    """Return the comment behind a value; empty if there is none."""
    return lines[value.end_mark.line][value.end_mark.column :].strip().removeprefix("#").strip()


def _above(name: yaml.Node, lines: Sequence[str]) -> str:
    """Return the comment above a key; empty if there is none."""
    above = takewhile(lambda line: line.startswith("#"), reversed(lines[: name.start_mark.line]))
    return " ".join(line.removeprefix("#").strip() for line in reversed([*above]))
