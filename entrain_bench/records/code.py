"""The code that decides a run's timeline: modules that its targets import, without comments and docstrings.

Of this suite's core only the rooms in ``DECISIVE`` count. Metrics, records, figures and the rest of ``base`` read a
timeline or carry it, so a change of them keeps every record. Of an installed library that the modules import its
version counts, and of Python the minor version: from 3.12 on, for one, ``sum`` adds floats otherwise.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path

from entrain_bench.base.errors import OWN_PACKAGES, UserError
from entrain_bench.base.store import Store
from entrain_bench.records.environment import releases_of

# Makes the program of every iteration and lets the executor run it.
DRIVER = "entrain_bench.run.experiment"
# Interface of strategies' parts.
PLANNING = "entrain_bench.balancing.interface"
# Packages and modules of this suite whose code decides a timeline.
DECISIVE = {
    *(f"entrain_bench.{room}" for room in ("specs", "program", "costs", "simulate", "balancing", "train")),
    *(f"entrain_bench.base.{module}" for module in ("arithmetic", "arrays", "compiled")),
    DRIVER,
}
# Modules of these packages that only read a timeline.
READING = {"entrain_bench.costs.bound", "entrain_bench.program.table"}
# Modules whose code computes metrics.
METRICS = {"entrain_bench.costs.bound", "entrain_bench.records.metrics", "entrain_bench.records.time_shares"}
INIT = "__init__.py"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Source:
    """A module's file, and a hash of what it does; of an installed library no file, and its version."""

    path: Path | None
    meaning: str


def decides_timeline(module: str) -> bool:
    """Return whether a module is in ``DECISIVE``, or is not of this suite's core."""
    if module.partition(".")[0] != "entrain_bench":
        return True
    return module not in READING and not DECISIVE.isdisjoint(_with_parents(module))


@cache
def metrics_version() -> str:
    """Hash of the code of the suite's metrics, which is not in the key of a run."""
    return hash_of(sources_of(METRICS, counts=lambda module: module in METRICS))


@cache
def code_version(targets: frozenset[str], folder: str = "") -> str:
    """Hash of all code, and of library versions, that decide the timeline of a run with these ``_target_``s.

    Args:
        targets: of the run.
        folder: looked into before ``sys.path`` is; nothing of it is imported. Empty for none.

    Raises:
        UserError: for a target whose module does not exist, and a file that is not Python.
    """
    modules = {target.rpartition(".")[0] for target in targets}
    return hash_of(sources_of(modules | {DRIVER}, folder, decides_timeline))


@cache
def planning_version(targets: frozenset[str]) -> str:
    """Hash of the code that planning with these ``_target_``s uses; what executes is left out.

    Raises:
        UserError: as for ``code_version``.
    """
    modules = {target.rpartition(".")[0] for target in targets}
    planning = sources_of(modules | {PLANNING}, counts=decides_timeline)
    # The driver prepares a run, but what it imports beside that is not planning.
    return hash_of(planning | sources_of({DRIVER}, counts=lambda module: module == DRIVER))


def sources_of(
    modules: Collection[str], folder: str = "", counts: Callable[[str], bool] = lambda _: True
) -> dict[str, Source]:
    """These modules, those that they import, and so on: of this suite, and of whoever wrote the first.

    Args:
        modules: names to begin with.
        folder: searched before ``sys.path``; empty for none.
        counts: whether a module counts, and with it what it imports.

    Raises:
        UserError: for a module that does not exist, and a file that is not Python.
    """
    roots = {name: root for name in OWN_PACKAGES if (root := _root_of(name))}
    for module in sorted(modules):
        top = module.partition(".")[0]
        root = roots.get(top) or _root_of(top, folder)
        if root is None:
            raise UserError(f"_target_: no module named {top or repr(module)}")
        # A lone module may import its neighbours; a package holds all it needs.
        roots |= {top: root} if root.is_dir() else {place.stem: place for place in root.parent.iterdir()}
    sources = import_closure(modules, roots, counts)
    _store().save()
    return sources


@cache
def _store() -> Store:
    return Store("code", PYTHON)


def hash_of(sources: Mapping[str, Source]) -> str:
    """One hash for what all the modules do, under this Python."""
    text = "\n".join([PYTHON, *(f"{module} {sources[module].meaning}" for module in sorted(sources))])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def import_closure(
    modules: Iterable[str], roots: Mapping[str, Path], counts: Callable[[str], bool] = lambda _: True
) -> dict[str, Source]:
    """As ``sources_of``, from the top-level modules in ``roots``: a package's folder, or a file, by name."""
    sources: dict[str, Source] = {}
    waiting = sorted(modules)
    while waiting:
        module = waiting.pop()
        if module in sources or not counts(module):
            continue
        top = module.partition(".")[0]
        if top not in roots:
            if releases := releases_of(top):
                sources[top] = Source(None, releases)
            continue
        read = _read_own_module if top in OWN_PACKAGES else _read_module
        if known := read(module, roots[top]):
            sources[module] = known[0]
            waiting += known[1] - sources.keys()
    return sources


def _read_module(module: str, root: Path) -> tuple[Source, frozenset[str]] | None:
    """The source of a module and all that it imports, with the packages that those are in; None if it has no file."""
    path = _file(root, *module.split(".")[1:])
    if path is None:
        return None
    package = module if path.name == INIT else module.rpartition(".")[0]
    try:
        meaning, imported = _read(path.read_bytes())
        names = frozenset(name for one in imported for name in _with_parents(absolute(one, package)))
    except SyntaxError as error:
        raise UserError(f"{path}: line {error.lineno}: {error.msg}") from error
    except ImportError as error:
        raise UserError(f"{path}: {error}") from error
    return Source(path, meaning), names


# Strategies share most of what they import, and no process sees the suite's own modules change.
_read_own_module = cache(_read_module)


def _file(root: Path, *inner: str) -> Path | None:
    if not root.is_dir():
        return root if root.suffix == ".py" and not inner else None
    place = root.joinpath(*inner)
    return next((file for file in (place / INIT, place.with_suffix(".py")) if file.is_file()), None)


def _read(content: bytes) -> tuple[str, list[str]]:
    """Hash of what a file does, and ``imported_names`` of it."""
    key = [hashlib.sha256(content).hexdigest()]
    known = _store().get(key)
    if known is None:
        tree = ast.parse(content)
        imported = sorted({name for node in import_statements(tree) for name in imported_names(node)})
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
        known = [hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16], imported]
        _store().put(key, known)
    return known[0], known[1]


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return all imports of a module, except those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from import_statements(ast.Module(node.orelse, []))
        else:
            yield from import_statements(node)


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Names of modules, and of what may be modules, that a statement imports; relative ones begin with dots."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = "." * node.level + (node.module or "")
    return [base, *(f"{base}{'' if base.endswith('.') else '.'}{alias.name}" for alias in node.names)]


def absolute(name: str, package: str) -> str:
    """The absolute name of what a module of a package imports; ``ImportError`` if it is above all packages."""
    return resolve_name(name, package) if package else name.lstrip(".")


def _with_parents(module: str) -> list[str]:
    """A module and the packages it is in, all of which an import runs."""
    parts = module.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _root_of(top: str, folder: str = "") -> Path | None:
    """The folder of a package, or the file of a lone module."""
    try:
        spec = (PathFinder.find_spec(top, [folder]) if folder else None) or find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    return Path(spec.origin) if spec.origin else None
