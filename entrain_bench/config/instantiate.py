"""Build the object a configuration node names by ``_target_``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from entrain_bench.base.errors import UserError
from entrain_bench.config.targets import TARGET, class_of
from entrain_bench.specs.parse import check_values

COSMETIC = "label"


def instantiate(node: Any, where: str, method: str | tuple[str, ...], **arguments: Any) -> Any:
    """The object of ``node``, whose keys besides ``_target_`` and ``label`` are constructor arguments.

    Args:
        node: a mapping with ``_target_``.
        where: path of the node, for errors.
        method: what the object must be able to do; of several methods, one.
        **arguments: further constructor arguments, passed as they are.

    Raises:
        UserError: for a missing or unknown target, unknown arguments, wrong types, or what the constructor rejects.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get(TARGET), str):
        raise UserError(f"{where}.{TARGET}: missing; it names the class to build")
    methods = (method,) if isinstance(method, str) else method
    if not any(callable(getattr(_class(node, where), name, None)) for name in methods):
        raise UserError(f"{where}.{TARGET}={node[TARGET]}: must be a class with a method {' or '.join(methods)}")
    return _built({key: value for key, value in node.items() if key != COSMETIC}, where, **arguments)


def _class(node: Mapping[str, Any], where: str) -> type:
    try:
        return class_of(node[TARGET])
    except Exception as error:
        raise UserError(
            f"{where}.{TARGET}={node[TARGET]}: must be a class that can be imported ({_one_line(error)})"
        ) from error


def _built(value: Any, where: str, **arguments: Any) -> Any:
    """A copy of a value in which objects are built of nodes with a target."""
    if isinstance(value, list | tuple):
        return [_built(each, f"{where}.{index}") for index, each in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if TARGET not in value:
        return {key: _built(each, f"{where}.{key}") for key, each in value.items()}
    cls = _class(value, where)
    given = {key: each for key, each in value.items() if key != TARGET}
    checked = check_values(cls, given, where) if is_dataclass(cls) else given
    built = {key: _built(each, f"{where}.{key}") for key, each in checked.items()}
    try:
        return cls(**built, **arguments)
    except TypeError as error:
        raise UserError(f"{where}: cannot build {value[TARGET]}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
