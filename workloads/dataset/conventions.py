"""Conventions of data (conventions.yaml): where rows hold texts and media; and the fields that a user chose."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml

from entrain_bench.base.errors import UserError
from entrain_bench.specs.parse import OneOf, check_mapping, parse

from .source import one_line

# In place of a field's name: where a convention has it.
AUTO = "auto"
KINDS = ("images", "audio", "video")
COMPARE = "compare"
IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Convention:
    """A way to lay out rows, as conventions.yaml explains."""

    when: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    json: tuple[str, ...] = ()
    one: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()
    video: tuple[str, ...] = ()

    def fits(self, names: Sequence[str]) -> bool:
        """Whether a row with these fields is of this convention."""
        return all(name in names for name in self.when) if self.when else any(n in names for n in self.text + self.one)


@dataclass(frozen=True, slots=True)
class Table:
    """All that conventions.yaml states; ``turns``, ``types`` and ``endings`` by name."""

    conventions: Mapping[str, Convention]
    turns: Mapping[str, str]
    types: Mapping[str, str]
    endings: Mapping[str, str]
    marks: re.Pattern[str]
    media: Mapping[str, Sequence[str]]
    paths: Sequence[str]
    seconds: Sequence[str]
    lists: Sequence[str]

    def names(self, *roles: str) -> set[str]:
        """Return all fields of some roles; ``images``, ``audio``, ``video`` include those that any convention has."""
        own = {name for one in self.conventions.values() for role in roles for name in getattr(one, role)}
        return own.union(*(self.media.get(role, ()) for role in roles))


@lru_cache(maxsize=8)
def table_of(path: str | None) -> Table:
    """Return the conventions of the suite, after those of a file; ``UserError`` for a file that states none."""
    own = yaml.safe_load(Path(__file__).with_name("conventions.yaml").read_text())
    given: Mapping[str, Any] = {}
    if path is not None:
        where = f"source.conventions={path}"
        try:
            given = check_mapping(yaml.safe_load(Path(path).expanduser().read_text()), where)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{where}: cannot be read ({one_line(error)})") from error
        if unknown := [key for key in given if key not in ("conventions", "turns", "types")]:
            raise UserError(f"{where}: {unknown[0]}: unknown. Must be conventions, turns or types")
    conventions = {
        name: parse(Convention, values, f"conventions.{name}")
        for source in (given, own)
        for name, values in check_mapping(source.get("conventions", {}), "conventions").items()
    }
    by_name = {
        key: {name: role for source in (own, given) for role, names in source.get(key, {}).items() for name in names}
        for key in ("turns", "types", "endings")
    }
    marks = "|".join(own["marks"].values())
    pattern = re.compile(rf"(?:<img>(?P<path>[^<>]+)</img>|{marks})\n?")
    return Table(**own | by_name | {"conventions": conventions, "marks": pattern})


def kind_of(name: str) -> str | None:
    """Return the kind of a file by the ending of its name: images, audio, video, or None."""
    return table_of(None).endings.get(name.partition("?")[0].rpartition(".")[2].lower())


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Fields that the user chose, of text, of each kind of medium, and of lengths; ``auto``: by convention."""

    text: Sequence[str] | str | None = AUTO
    images: str | None = AUTO
    audio: str | None = AUTO
    video: str | None = AUTO
    seconds: str | None = AUTO
    marks: Annotated[str, OneOf([COMPARE, IGNORE])] = COMPARE
    conventions: str | None = None

    def __post_init__(self) -> None:
        # Hashable, as a key of caches.
        object.__setattr__(self, "text", (self.text,) if isinstance(self.text, str) else tuple(self.text or ()))

    @property
    def names(self) -> list[str]:
        """All names that are given."""
        given = (*(self.text or ()), self.images, self.audio, self.video, self.seconds)
        return [name for name in dict.fromkeys(given) if name not in (None, AUTO)]

    @property
    def compares(self) -> bool:
        """Whether marks in texts are compared with media."""
        return self.marks == COMPARE and None not in (self.images, self.audio, self.video)


@lru_cache(maxsize=4096)
def roles_of(names: tuple[str, ...], chosen: Chosen) -> Mapping[str, str]:
    """Return the role of each field of a row: text, json, one (of a list), images, audio, video, path, seconds."""
    table = table_of(chosen.conventions)
    convention = next((each for each in table.conventions.values() if each.fits(names)), Convention())
    texts = chosen.text or ()
    roles = dict[str, str]()
    if AUTO in texts:
        roles |= {name: role for role in ("json", "one", "text") for name in getattr(convention, role)}
    roles |= {name: "text" for name in texts if name != AUTO}
    roles |= {name: "path" for name in table.paths if name not in roles}
    for kind in (*KINDS, "seconds"):
        usual = table.seconds if kind == "seconds" else (*getattr(convention, kind), *table.media[kind])
        known = usual if getattr(chosen, kind) == AUTO else (getattr(chosen, kind),)
        found = [each for each in known if each in names and roles.get(each, "path") == "path"]
        roles |= dict.fromkeys(found[:1], kind)
    return {name: role for name, role in roles.items() if name in names}
