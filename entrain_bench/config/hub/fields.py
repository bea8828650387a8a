"""Fields of a JSON file: typed, and errors that name them; flags and words may have their class's default."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from importlib.metadata import version
from typing import Any

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.base.store import Store

MAX_FIELD = 2**31
# Numbers that a file may leave out: the default of the class in transformers holds for all published models.
MAY_DEFAULT = ("in_channels", "max_position_embeddings", "max_window_layers", "num_channels", "temporal_patch_size")


@cache
def class_defaults(model_type: str) -> Mapping[str, Any]:
    """Defaults of a type's class in transformers by field, stored because it takes seconds to import; maybe none."""
    store = Store("model-defaults", version("transformers"))
    known: dict[str, Any] | None = store.get([model_type])
    if known is None:
        from transformers import CONFIG_MAPPING

        known = {}
        for one in fields(CONFIG_MAPPING[model_type]) if model_type in CONFIG_MAPPING else ():
            value = one.default if one.default_factory is MISSING else one.default_factory()
            if isinstance(value, bool | int | float | str | list | tuple):
                known[one.name] = [*value] if isinstance(value, tuple) else value
        store.put([model_type], known)
        store.save()
    return known


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping of a file."""

    values: Mapping[str, Any]  # as the file states them
    file: str  # its name, for errors
    path: str = ""  # where in the file the mapping is, with a dot behind it; empty for the whole file
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that the file leaves out; never of sizes

    def get(self, name: str) -> Any:
        """The value of a field, null included, or its default; None for neither."""
        return self.values[name] if name in self.values else self.defaults.get(name)

    def needed(self, name: str) -> Any:
        """The value of a field; ``UserError`` if there is none, or if it is a size that only the class states."""
        if (value := self.get(name)) is None:
            raise UserError(f"{self.path}{name}: missing in {self.file}")
        is_size = not isinstance(value, bool | str) and name not in MAY_DEFAULT
        if is_size and name not in self.values:
            raise UserError(
                f"{self.path}{name}: missing in {self.file}. A size has no default ({value} of the class in "
                "transformers may be another model's); add the published value"
            )
        return value

    def integer(self, name: str, least: int = 1) -> int:
        """A whole number of at least ``least``; ``UserError`` otherwise."""
        value = self.needed(name)
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_FIELD
        require(fits, self.named(name), value, f"a whole number from {least} to {MAX_FIELD} ({self.file})")
        return int(value)

    def number(self, name: str) -> float:
        """A number above 0; ``UserError`` otherwise."""
        value = self.needed(name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_FIELD
        require(fits, self.named(name), value, f"a number above 0 ({self.file})")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false, false where nothing is stated; ``UserError`` for anything else."""
        value = self.get(name)
        require(value is None or isinstance(value, bool), self.named(name), value, f"true or false ({self.file})")
        return bool(value)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of some words; ``UserError`` for another one."""
        value = self.needed(name)
        if value not in choices:
            raise unknown_choice(self.named(name), str(value), choices)
        return str(value)

    def square(self, name: str) -> int:
        """A side that is stated once, or twice as two equal ones; ``UserError`` for two that differ."""
        value = self.needed(name)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return Fields({name: value[0]}, self.file, self.path).integer(name)
        return self.integer(name)

    def integers(self, name: str) -> list[int]:
        """Whole numbers of at least 0; ``UserError`` for anything else."""
        value = self.needed(name)
        fits = isinstance(value, list) and all(isinstance(one, int) and 0 <= one <= MAX_FIELD for one in value)
        require(fits, self.named(name), value, f"whole numbers ({self.file})")
        return [*value]

    def part(self, name: str, model_type: str = "") -> "Fields":
        """A mapping of the file as fields, with the defaults of its ``model_type``, or else of the given one."""
        values = self.needed(name)
        require(isinstance(values, Mapping), self.named(name), values, f"a mapping ({self.file})")
        kind = values.get("model_type") or model_type
        return Fields(values, self.file, f"{self.path}{name}.", class_defaults(str(kind)))

    def part_as(self, name: str, model_type: str) -> "Fields":
        """A mapping of the file with the defaults of a given type: older files state another one there."""
        return replace(self.part(name), defaults=class_defaults(model_type))

    def refuse(self, name: str, reason: str) -> None:
        """Raise ``UserError`` if a field states anything but nothing, zero or false."""
        if value := self.get(name):
            raise UserError(f"{self.named(name)}={value}: {reason}")

    def named(self, name: str) -> str:
        """A field with its path."""
        return f"{self.path}{name}"
