"""Files of definitions (claims, tables, leads): many of one kind, with what they share stated once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.base.errors import UserError, require, unknown_choice

# `{name}` in any text: a field of the case, of its definition, of its source, or of `shared`. `{name[other]}`: of the
# field's entries the one that another field names.
FIELD = re.compile(r"\{([a-z_0-9]+)(?:\[([a-z_0-9]+)\])?\}")
SHARED = "shared"
DEFAULTS = "defaults"
CASES = "cases"
MATRIX = "matrix"
# For definitions that have this key: the name of the matrix that a case is of.
GROUP = "group"
# Lists of overrides: a later layer replaces overrides of the same key in place and appends others.
OVERRIDES = ("common", "of", "to", "at", "against", "against_of", "against_to")


@dataclass(frozen=True, slots=True)
class Source:
    """Where definitions find further fields.

    Attributes:
        key: the key of a definition that names entries.
        fields: fields by the value of that key; fields of the definition come before them.
        axis: the axis of a ``matrix`` whose values are patterns of entries.
        expand: the entries of a pattern.
    """

    key: str
    fields: Callable[[Any], Mapping[str, Any]]
    axis: str
    expand: Callable[[str], Sequence[str]]


def load_definitions[T](
    path: Path,
    kind: str,
    keys: set[str],
    parse: Callable[[str, Mapping[str, Any]], T],
    verbatim: str = "",
    source: Source | None = None,
) -> Iterator[T]:
    """Parse every definition of a file.

    A file holds ``kind`` (definitions by name), ``defaults`` (what all of them share) and ``shared`` (values by name).
    A definition with ``cases`` stands for one definition per case: each case states its name and its differences. One
    with ``matrix`` stands for one definition per combination of the matrix' values, by field; the values make the name.
    ``{name}`` inserts a field: any key that is not in ``keys``, or a value of ``shared``; ``{name[other]}`` inserts the
    entry of the field that another field names. A text that consists of one
    field takes the value itself; a list in a list becomes part of the outer list. The value of ``verbatim`` keeps its
    braces.

    Raises:
        UserError: naming the file, the definition and what is wrong in it.
    """
    content = yaml.safe_load(path.read_text()) or {}
    try:
        for key in content:
            require(key in (kind, SHARED, DEFAULTS), "key", key, f"one of {kind}, {DEFAULTS}, {SHARED}")
        require(kind in content, "key", kind, "stated: the definitions by name")
        for name in content.get(SHARED, {}):
            require(name not in keys, f"{SHARED}.{name}", name, "a name that is no key of a definition")
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from error
    shared = content.get(SHARED, {})
    for name, values in content[kind].items():
        unused = set(values) - keys - {CASES, MATRIX}
        cases = _matrix(name, values[MATRIX], source) if MATRIX in values else values.get(CASES, {name: {}})
        for case, differences in cases.items():
            layers = [content.get(DEFAULTS, {}), values, differences]
            try:
                resolved, used = _resolved(layers, shared, keys, verbatim, source)
                unused -= used
                axes = {*values.get(MATRIX, {})}
                for key in sorted({str(key) for key in differences} - keys - used - axes):
                    raise unknown_choice("key", key, keys)
                if GROUP in keys and MATRIX in values:
                    resolved[GROUP] = name
                yield parse(case, resolved)
            except UserError as error:
                raise UserError(f"{path.name}: {case}: {error}") from error
        for key in sorted(unused, key=str):
            raise UserError(f"{path.name}: {name}: {unknown_choice('key', str(key), keys)}")


def override_key(override: str) -> str:
    """The configuration key of an override."""
    return override.partition("=")[0].lstrip("+~")


def _matrix(name: str, axes: Mapping[str, list[str]], source: Source | None) -> dict[str, dict[str, str]]:
    """The cases of a matrix by name: the entry's, or that of the definition and its values."""
    values = [
        [entry for pattern in patterns for entry in source.expand(str(pattern))]
        if source and axis == source.axis
        else [*map(str, patterns)]
        for axis, patterns in axes.items()
    ]
    cases = {}
    for combination in product(*values):
        case = dict(zip(axes, combination, strict=True))
        alone = source is not None and [*axes] == [source.axis]
        cases[re.sub(r"[^a-z0-9]+", "_", "_".join(([] if alone else [name]) + [*combination]).lower())] = case
    return cases


def _resolved(
    layers: list[Mapping[str, Any]], shared: Mapping[str, Any], keys: set[str], verbatim: str, source: Source | None
) -> tuple[dict[str, Any], set[str]]:
    """The merged layers, the most general first, with all fields inserted; and the names of these fields.

    Raises:
        UserError: for an unknown field, and for a field that contains itself.
    """
    fields = {**shared, **{str(key): value for layer in layers for key, value in layer.items()}}
    used: set[str] = set()

    def field(found: re.Match[str], within: frozenset[str]) -> Any:
        name, key = found.groups()
        if name not in fields:
            raise unknown_choice("field", name, fields)
        require(name not in within, "field", name, "free of itself")
        used.add(name)
        value = fields[name]
        if key:
            entries = {str(each): value[each] for each in value}
            choice = str(insert(f"{{{key}}}", within))
            if choice not in entries:
                raise unknown_choice(name, choice, entries)
            value = entries[choice]
        return insert(value, within | {name})

    def insert(value: Any, within: frozenset[str]) -> Any:
        if isinstance(value, Mapping):
            return {str(insert(str(key), within)): insert(each, within) for key, each in value.items()}
        if isinstance(value, list):
            found = [(each, insert(each, within)) for each in value]
            lists = [new if isinstance(new, list) and isinstance(old, str) else [new] for old, new in found]
            return [each for part in lists for each in part]
        if not isinstance(value, str):
            return value
        whole = FIELD.fullmatch(value)
        return field(whole, within) if whole else FIELD.sub(lambda match: str(field(match, within)), value)

    if source:
        entries = [layer[source.key] for layer in layers if source.key in layer]
        fields = {**source.fields(insert(entries[-1], frozenset())), **fields} if entries else fields
    merged: dict[str, Any] = {}
    for layer in layers:
        own = {key: value for key, value in layer.items() if key in keys}
        merged = _merge(merged, {k: v if k == verbatim else insert(v, frozenset()) for k, v in own.items()})
    return merged, used


def _merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings key by key, lists of overrides override by override; anything else is replaced."""
    merged = dict(base)
    for key, value in more.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value)
        elif key in OVERRIDES and old:
            merged[key] = merge_overrides(old, value)
        else:
            merged[key] = value
    return merged


def merge_overrides(base: list[str], more: list[str]) -> list[str]:
    """Overrides in which later ones replace those of the same key, in their place; others follow."""
    own = {override_key(text): text for text in more}
    return [own.pop(override_key(text), text) for text in base] + [*own.values()]
