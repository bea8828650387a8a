"""Options of a strategy's parts, from their dataclasses: a YAML with ``_target_`` alone has every field as a key."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.config.targets import TARGET, class_of, is_trusted

PART = re.compile(r"/?strategy/(planner|assigner|scheduler)/[^/]+")


def options_of(target: str) -> dict[str, Any]:
    """Return a dataclass's fields that have a default, as a YAML writes it; none for other classes."""
    return dict(_defaults(class_of(target)))


def with_options(group_and_name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A choice's YAML, with the options of the class that it names if it is a part and names nothing else."""
    target = values.get(TARGET)
    if not PART.fullmatch(group_and_name) or {*values} - {"defaults"} != {TARGET} or not is_trusted(target):
        return dict(values)
    try:
        return {**values, **options_of(str(target))}
    except (ImportError, ValueError):
        return dict(values)


def option_lines(group_and_name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """The lines that ``with_options`` adds to a YAML, and docstrings of the class and its bases that explain them."""
    added = {key: value for key, value in with_options(group_and_name, values).items() if key not in values}
    for name, default in added.items():
        text = yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n").strip()
        yield f"{name}: {text}"
    for cls in filter(is_dataclass, class_of(str(values[TARGET])).__mro__ if added else ()):
        yield from textwrap.indent(inspect.cleandoc(cls.__doc__ or ""), "# ", lambda _: True).splitlines()


def sources_stamp(text: str) -> str:
    """Return a text that changes with any source file of the packages that targets in some YAMLs name."""
    modules = {target.rpartition(".")[0] for target in re.findall(rf"{TARGET}: ([\w.]+)", text)}
    names = sorted({module.rpartition(".")[0] or module for module in modules})
    specs = [spec for name in names if (spec := find_spec(name))]
    files = (
        file
        for spec in specs
        for place in spec.submodule_search_locations or [spec.origin or ""]
        for file in ([Path(place)] if place.endswith(".py") else sorted(Path(place).rglob("*.py")))
    )
    return "\n".join(f"{file} {(stat := file.stat()).st_mtime_ns} {stat.st_size}" for file in files)


def _defaults(cls: type) -> Iterator[tuple[str, Any]]:
    for field in fields(cls) if is_dataclass(cls) else ():
        made = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init and made is not MISSING:
            yield field.name, [*made] if isinstance(made, tuple) else made
