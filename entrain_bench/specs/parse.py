"""Build frozen dataclasses from plain mappings, with errors that name the field."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_origin, get_type_hints

from entrain_bench.errors import UserError, unknown_choice


def check_keys(cls: type, values: Mapping[str, Any], where: str) -> None:
    """Raise ``UserError`` for keys that the dataclass does not have and for required ones that are missing."""
    known = {field.name: field for field in fields(cls)}
    for key in values:
        if key not in known:
            raise unknown_choice(f"{where} key", str(key), known)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{where}.{name}: missing")


def parse[T](cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of a flat dataclass: keys and scalar types checked, numbers given as ``1e9`` accepted as integers."""
    check_keys(cls, values, where)
    hints = get_type_hints(cls)
    return cls(**{key: _scalar(hints[key], value, f"{where}.{key}") for key, value in values.items()})


def _scalar(hint: object, value: Any, where: str) -> Any:
    if hint is bool and not isinstance(value, bool):
        raise UserError(f"{where}={value}: must be true or false")
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise UserError(f"{where}={value}: must be an integer")
        return int(value)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{where}={value}: must be a number")
        return float(value)
    if hint is str and not isinstance(value, str):
        raise UserError(f"{where}={value}: must be text")
    if get_origin(hint) is tuple and not isinstance(value, list | tuple):
        raise UserError(f"{where}={value}: must be a list")
    return tuple(value) if isinstance(value, list) else value
