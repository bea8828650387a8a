"""Classes that a configuration may name by ``_target_``, of the suite or a folder of the user's, and their objects."""

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from entrain_bench.base.errors import OWN_PACKAGES, UserError, explain
from entrain_bench.specs.parse import check_values

TARGET = "_target_"
COSMETIC = "label"
CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_trusted: list[str] = []


def trust(folder: Path) -> None:
    """Let targets name classes of a folder, and this process import them."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if str(folder) not in _trusted:
        _trusted.append(str(folder))


def is_trusted(target: object) -> bool:
    """Whether a target lies in a module of the suite or of a trusted folder; nothing is imported to find out."""
    if not isinstance(target, str) or not CLASS_PATH.fullmatch(target):
        return False
    top, *inner = target.split(".")[:-1]
    if top in OWN_PACKAGES:
        return _is_module(_place(find_spec(top))[-1], *inner)
    found = [_place(PathFinder.find_spec(top, [folder])) for folder in _trusted]
    if top in sys.modules:
        return bool(imported := _place(sys.modules[top].__spec__)) and imported in found
    return any(found)


def check_targets(node: Any, where: str = "") -> None:
    """Raise ``UserError`` for targets that are not trusted, and for keys that Hydra would act on (``_args_``, ...)."""
    if isinstance(node, list):
        node = {str(index): value for index, value in enumerate(node)}
    for key, value in node.items() if isinstance(node, Mapping) else ():
        path = f"{where}.{key}" if where else str(key)
        if key == TARGET and not is_trusted(value):
            packages = ", ".join(sorted(OWN_PACKAGES))
            raise UserError(f"{path}={value}: must be a class of {packages} or of a folder named by --config-dir")
        if key != TARGET and str(key).startswith("_"):
            raise UserError(f"{path}={value}: is not supported. {TARGET} is the only key that starts with _")
        check_targets(value, path)


def import_file(file: Path, name: str) -> ModuleType:
    """The module of a user's file under a name of its own; ``UserError`` if it cannot be imported."""
    spec = spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file}: cannot be imported ({explain(error)})") from error
    return module


def class_of(target: str) -> type:
    """The class that ``module.Class`` names; ``ImportError`` if there is none, or the suite only imports it."""
    module, _, name = target.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type):
        raise ImportError(f"{module} has no class {name}")
    if module.partition(".")[0] in OWN_PACKAGES and found.__module__.partition(".")[0] not in OWN_PACKAGES:
        raise ImportError(f"{name} is not a class of the suite")
    return found


@cache
def _is_module(folder: str, *inner: str) -> bool:
    path = Path(folder, *inner)
    return (path / "__init__.py").is_file() or path.with_suffix(".py").is_file()


def _place(spec: ModuleSpec | None) -> list[str]:
    return [str(spec.origin), *(spec.submodule_search_locations or ())] if spec else []


def instantiate(node: Any, where: str, method: str | tuple[str, ...], **arguments: Any) -> Any:
    """The object of ``node``, whose keys besides ``_target_`` and ``label`` are constructor arguments.

    It has one of the methods, and takes further arguments unmodified. ``UserError``, which begins with ``where``, for a
    target or arguments that are missing, unknown or rejected.
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
