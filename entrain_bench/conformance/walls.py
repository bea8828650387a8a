"""Walls: what the modules of a strategy may import, read out of their source."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection, Iterator
from dataclasses import fields

from entrain_bench.balancing.estimates import LayerProfile, ProfiledSamples, UnitEstimates
from entrain_bench.balancing.profile import Profile, ProgramTimes
from entrain_bench.base.errors import OWN_PACKAGES
from entrain_bench.records.code import absolute, import_statements, sources_of

SUITE = "entrain_bench"
STRATEGIES = "entrain_bench_strategies"
# Rooms of the suite that a strategy may import from. The others hold the truth, the simulator and results.
OPEN_ROOMS = frozenset({"balancing", "base", "program", "specs"})
# Modules of open rooms that are closed: they write and keep files.
CLOSED_MODULES = frozenset({"base.files", "base.store"})
# Fields of a profile and its views that strategies may not read.
HIDDEN = frozenset(
    field.name
    for view in (Profile, ProfiledSamples, LayerProfile, UnitEstimates, ProgramTimes)
    for field in fields(view)
    if field.name.startswith("_")
)


def trespasses(modules: Collection[str]) -> list[str]:
    """Lines of these modules, and of their author's that they import, that reach for code closed to strategies.

    ``UserError`` names a module that does not exist, and a file that is not Python.
    """
    lines = []
    for module, source in sorted(sources_of(modules).items()):
        if source.path is None or module.partition(".")[0] in OWN_PACKAGES - {STRATEGIES}:
            continue
        package = module if source.path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(source.path.read_bytes())
        trespassed = [
            (node.lineno, f"imports {name}") for node in import_statements(tree) for name in _closed(node, package)
        ]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in HIDDEN:
                continue
            if getattr(node.value, "id", "") not in ("self", "cls"):
                trespassed.append((node.lineno, f"reads {ast.unparse(node)}"))
        lines += [f"{source.path}:{line}: {what}" for line, what in sorted(trespassed)]
    return lines


def _closed(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    """Yield imports of this suite that are closed to strategies, by where they are defined."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _is_ours(alias.name) and not _is_open(alias.name))
        return
    base = absolute("." * node.level + (node.module or ""), package)
    if not _is_ours(base):
        return
    for alias in node.names:
        home = _home(base, alias.name)
        if not _is_open(home):
            yield f"{home}.{alias.name}" if home == base else home


def _home(module: str, name: str) -> str:
    """The module in which what is imported from a module is defined."""
    try:
        value = getattr(importlib.import_module(module), name, None)
        if value is None:
            return importlib.import_module(f"{module}.{name}").__name__
    except ImportError:
        return module
    home = getattr(value, "__module__", None) or getattr(value, "__name__", None)
    return home if isinstance(home, str) and _is_ours(home) else module


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in OWN_PACKAGES - {STRATEGIES}


def _is_open(module: str) -> bool:
    top, _, rest = module.partition(".")
    return top == SUITE and rest.partition(".")[0] in OPEN_ROOMS and rest not in CLOSED_MODULES
