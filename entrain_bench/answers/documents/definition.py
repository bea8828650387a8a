"""Files of claims and tables: plain YAML, in which lists may hold lists and texts may be lists of texts.

``defaults`` are values of all entries. Anchors stand mostly under ``shared``, which is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.base.errors import UserError, require, unknown_choice

FIELD = re.compile(r"\{([a-z_0-9]+)\}")
# Overrides by their keys.
type Overrides = dict[str, str]


def read_definitions[T](path: Path, kind: str, parse: Callable[[str, Mapping[str, Any]], Iterable[T]]) -> Iterator[T]:
    """Parse every entry of a file: the mapping under ``kind``, each entry with the keys of ``defaults`` it lacks.

    Raises:
        UserError: naming the file, the entry and the problem.
    """
    where = path.name
    try:
        content = yaml.safe_load(path.read_text()) or {}
        check_keys(content, (kind, "shared", "defaults"), (kind,))
        for name, values in content[kind].items():
            where = f"{path.name}: {name}"
            yield from parse(name, {**content.get("defaults", {}), **values})
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from error


def check_keys(values: Mapping[str, Any], known: Iterable[str], needed: Iterable[str] = (), where: str = "") -> None:
    """Raise ``UserError`` for an unknown or missing key; ``where`` is the mapping, if it is inside another."""
    names = [*known]
    for key in values:
        if key not in names:
            raise unknown_choice(f"{where}key", str(key), names)
    for key in needed:
        require(key in values, f"{where}{key}", "missing", "stated")


def flat(value: Any) -> Iterator[Any]:
    """The values of a list, of lists in it, and of lists in these; of anything else the value itself."""
    for inner in value if isinstance(value, list | tuple) else (value,):
        yield from flat(inner) if isinstance(inner, list | tuple) else (inner,)


def insert(values: Any, fields: Mapping[str, Any]) -> Any:
    """Plain values in whose texts ``{name}`` is replaced by the field of this name; ``UserError`` if it is unknown."""

    def field(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise unknown_choice("field", match[1], fields)
        return json.dumps(str(fields[match[1]]))[1:-1]

    return json.loads(FIELD.sub(field, json.dumps(values)))


def words(value: Any) -> str:
    """A text, or a list of texts joined by spaces; whitespace becomes single spaces."""
    return " ".join(" ".join(map(str, flat(value))).split())


def overrides(value: Any) -> Overrides:
    """Overrides from a list; a later one replaces an earlier one of the same key, in its place."""
    return {text.partition("=")[0].lstrip("+~"): text for text in map(str, flat(value))}
