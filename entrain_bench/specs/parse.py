"""Check plain mappings against frozen dataclasses, with errors that name the field."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import inf
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np

from entrain_bench.base.errors import UserError, require, unknown_choice

# Beyond these, times and their squares would leave the range of a double; no constant of a machine or a model is.
LEAST = 1e-30
MOST = 1e30
SCALARS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Allowed:
    """Values that a field may have, as in ``Annotated[int, at_least(1)]``; ``words`` name them in errors."""

    fits: Callable[[Any], bool]
    words: str

    def check(self, value: Any, where: str) -> None:
        """Raise ``UserError`` for another value."""
        require(self.fits(value), where, [*value] if isinstance(value, tuple) else value, self.words)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Texts that a field may have, as in ``Annotated[str, OneOf(NAMES)]``."""

    names: Sequence[str]

    def check(self, value: str, where: str) -> None:
        """Raise ``UserError`` for another text."""
        if value not in self.names:
            raise unknown_choice(where, value, [name for name in self.names if name])


def between(least: float, most: float, words: str = "") -> Allowed:
    """Numbers from ``least`` to ``most``."""
    return Allowed(lambda value: least <= value <= most, words or f"from {least} to {most}")


def at_least(least: float, words: str = "") -> Allowed:
    """Numbers from ``least`` on."""
    return between(least, inf, words or f"at least {least}")


Count = Annotated[int, at_least(1)]
Rate = Annotated[float, at_least(LEAST, "positive")]
Share = Annotated[float, between(LEAST, 1, "in (0, 1]")]


def check_mapping(values: Any, where: str) -> Mapping[str, Any]:
    """The values themselves, if they are a mapping."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}={values}: must be a mapping")
    return values


def check_keys(cls: type, values: Any, where: str) -> None:
    """Raise ``UserError`` for keys that the dataclass does not have and for required ones that are missing."""
    known = {field.name: field for field in fields(cls) if field.init and not field.name.startswith("_")}
    for key in check_mapping(values, where):
        if key not in known:
            raise unknown_choice(f"{where} key", str(key), known)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{where}.{name}: missing")


def check_values(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values with whole numbers as integers where fields are; ``UserError`` for unknown keys, types and ranges."""
    known = {field.name for field in fields(cls) if field.init}
    hints = _hints(cls)
    checked = dict[str, Any]()
    for key, value in values.items():
        if key not in known:
            raise unknown_choice(f"{where} key", str(key), known)
        converted = _convert(hints[key], value, f"{where}.{key}", parses=False)
        checked[key] = converted if isinstance(converted, int) else value
    return checked


def parse[T](cls: type[T], values: Any, where: str) -> T:
    """An instance of a dataclass: keys, types and ranges checked; whole numbers such as ``1e9`` are integers."""
    check_keys(cls, values, where)
    hints = _hints(cls)  # type: ignore[arg-type]
    return cls(**{key: _convert(hints[key], value, f"{where}.{key}") for key, value in values.items()})


def check_fields(instance: Any, where: str = "") -> None:
    """Raise ``UserError`` for a field of a dataclass that its type does not allow; ``where`` goes before its name."""
    for name, hint in _checkable(type(instance)):  # type: ignore[arg-type]
        _convert(hint, getattr(instance, name), where + name, parses=False)


@cache
def _checkable(cls: Hashable) -> list[tuple[str, Any]]:
    """Names and types of a dataclass's fields, without those of other dataclasses."""
    hints = {field.name: _hints(cls)[field.name] for field in fields(cls)}  # type: ignore[arg-type]
    return [(name, hint) for name, hint in hints.items() if not is_dataclass(hint)]


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _convert(hint: Any, value: Any, where: str, parses: bool = True) -> Any:
    """Return the value converted to a field's type; mappings for dataclasses stay mappings unless ``parses``."""
    options = get_args(hint)
    if get_origin(hint) is Annotated:
        converted = _convert(options[0], value, where, parses)
        options[1].check(converted, where)
        return converted
    if NoneType in options:
        known = [option for option in options if option is not NoneType]
        return value if value is None or len(known) > 1 else _convert(known[0], value, where, parses)
    if is_dataclass(hint) and parses and not isinstance(value, hint):  # type: ignore[arg-type]
        return parse(hint, value, where)  # type: ignore[arg-type]
    if hint in SCALARS:
        return _scalar(hint, value, where)
    if get_origin(hint) is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise UserError(f"{where}={value}: must be a list")
        return tuple(_convert(options[0], item, f"{where}[{index}]", parses) for index, item in enumerate(value))
    if get_origin(hint) is Mapping:
        return check_mapping(value, where)
    return value


def _scalar(hint: type, value: Any, where: str) -> Any:
    number = isinstance(value, int | float | np.integer) and not isinstance(value, bool) and -inf < value < inf
    fits = isinstance(value, hint) if hint in (bool, str) else number and (hint is float or value == int(value))
    if not fits:
        raise UserError(f"{where}={value}: must be {SCALARS[hint]}")
    if hint is float:
        sized = value == 0 or LEAST <= abs(value) <= MOST
        require(sized, where, value, f"a number that is 0 or from {LEAST:g} to {MOST:g} in size")
    return hint(value)
