"""The code that decides a run's timeline, and a record's origin: versions, commit, time.

The code is that of modules that a run's targets import, without comments and docstrings.

Of this suite's core only the packages in ``DECISIVE`` count. Metrics, records, figures and the rest of ``base`` read a
timeline or carry it, so a change of them keeps every record. Of an installed library that the modules import its
version counts, and of Python the minor version: from 3.12 on, for one, ``sum`` adds floats otherwise.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path
from typing import Any

from entrain_bench.base.errors import OWN_PACKAGES, UserError
from entrain_bench.base.store import Store

# Libraries that a record names: their arithmetic, solvers, random numbers, compilers or parsers decide results.
LIBRARIES = ("numba", "llvmlite", "numpy", "ortools", "pandas", "pyarrow", "scipy", "torch", "megatron-core")
# Distributions of modules whose names differ, or whose compiler counts as well.
DISTRIBUTIONS = {
    "PIL": ("pillow",),
    "matplotlib": ("matplotlib", "pillow"),
    "megatron": ("megatron-core",),
    "numba": ("numba", "llvmlite"),
}
# Resolve configurations, which keys hold resolved, or start processes: they decide no result.
INDIFFERENT = frozenset({"hydra", "omegaconf", "ray", "yaml"})
GIT_TIMEOUT_S = 10.0


# Makes the program of every iteration and lets the executor run it.
DRIVER = "entrain_bench.run.experiment"
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
    """A module's file, and a hash of its code; of an installed library no file, and its version."""

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

    ``folder`` and errors are those of ``sources_of``.
    """
    modules = {target.rpartition(".")[0] for target in targets}
    return hash_of(sources_of(modules | {DRIVER}, folder, decides_timeline))


@cache
def planning_version(targets: frozenset[str]) -> str:
    """Return a hash of the code that planning with these ``_target_``s uses, without executors."""
    modules = {target.rpartition(".")[0] for target in targets}
    planning = sources_of(modules | {"entrain_bench.balancing.interface"}, counts=decides_timeline)
    # The driver prepares a run, but its other imports are not planning.
    return hash_of(planning | sources_of({DRIVER}, counts=lambda module: module == DRIVER))


def sources_of(
    modules: Collection[str], folder: str = "", counts: Callable[[str], bool] = lambda _: True
) -> dict[str, Source]:
    """Return these modules and their imports, recursively, as far as they belong to this suite or a user's folder.

    ``folder`` is searched before ``sys.path``, without imports. ``UserError`` for missing modules, invalid Python.
    """
    roots = {name: root for name in OWN_PACKAGES if (root := _root_of(name))}
    for top in sorted({module.partition(".")[0] for module in modules} - roots.keys()):
        root = _root_of(top, folder)
        if root is None:
            raise UserError(f"_target_: no module named {top or repr(top)}")
        # A single module may import files next to it; a package contains all that it needs.
        roots |= {top: root} if root.is_dir() else {place.stem: place for place in root.parent.iterdir()}
    sources = import_closure(modules, roots, counts)
    _store().save()
    return sources


def hash_of(sources: Mapping[str, Source]) -> str:
    """Return one hash of the code of all modules, under this Python."""
    text = "\n".join([PYTHON, *(f"{module} {sources[module].meaning}" for module in sorted(sources))])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def import_closure(
    modules: Iterable[str], roots: Mapping[str, Path], counts: Callable[[str], bool] = lambda _: True
) -> dict[str, Source]:
    """``sources_of`` for the top-level modules in ``roots``: a package's folder, or a file, by name."""
    sources: dict[str, Source] = {}
    waiting = sorted(modules)
    while waiting:
        module = waiting.pop()
        if module in sources or not counts(module):
            continue
        top, *inner = module.split(".")
        if top not in roots:
            if releases := releases_of(top):
                sources[top] = Source(None, releases)
            continue
        root = roots[top]
        place = root.joinpath(*inner)
        lone = [root] if root.suffix == ".py" and not inner else []
        files = (place / INIT, place.with_suffix(".py")) if root.is_dir() else lone
        if path := next((file for file in files if file.is_file()), None):
            # Strategies share most imports, and the suite's own modules do not change during a process.
            meaning, imported = (_read_own if top in OWN_PACKAGES else _read)(path, module)
            sources[module] = Source(path, meaning)
            waiting += imported - sources.keys()
    return sources


def _read(path: Path, module: str) -> tuple[str, frozenset[str]]:
    """Return a hash of a module's code, and the imported modules with their packages."""
    content = path.read_bytes()
    key = [hashlib.sha256(content).hexdigest()]
    package = module if path.name == INIT else module.rpartition(".")[0]
    try:
        known = _store().get(key)
        if known is None:
            tree = ast.parse(content)
            imported = sorted({name for node in import_statements(tree) for name in _imported_names(node)})
            for node in ast.walk(tree):
                if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                    node.body = node.body[1:]
            known = [hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16], imported]
            _store().put(key, known)
        return known[0], frozenset(name for one in known[1] for name in _with_parents(absolute(one, package)))
    except SyntaxError as error:
        raise UserError(f"{path}: line {error.lineno}: {error.msg}") from error
    except ImportError as error:
        raise UserError(f"{path}: {error}") from error


_read_own = cache(_read)


@cache
def _store() -> Store:
    return Store("code", PYTHON)


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return all imports of a module, except those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from import_statements(ast.Module(node.orelse, []))
        else:
            yield from import_statements(node)


def _imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return names of modules and possible modules that a statement imports; relative ones begin with dots."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = "." * node.level + (node.module or "")
    return [base, *(f"{base}{'' if base.endswith('.') else '.'}{alias.name}" for alias in node.names)]


def absolute(name: str, package: str) -> str:
    """Return the absolute name of an import in a package; ``ImportError`` if it is above all packages."""
    return resolve_name(name, package) if package else name.lstrip(".")


def _with_parents(module: str) -> list[str]:
    """A module and the packages it is in, all of which an import runs."""
    return [*accumulate(module.split("."), "{}.{}".format)]


def _root_of(top: str, folder: str = "") -> Path | None:
    """The folder of a package, or the file of a lone module."""
    with suppress(ImportError, ValueError):
        spec = (PathFinder.find_spec(top, [folder]) if folder else None) or find_spec(top)
        if spec and (places := [*(spec.submodule_search_locations or ()), spec.origin]) and places[0]:
            return Path(places[0])
    return None


@cache
def versions() -> dict[str, str]:
    """Versions of Python, of the suite and of the decisive libraries, by name; a library that is absent is left out."""
    return {"python": platform.python_version()} | _installed(("entrain-bench", *LIBRARIES))


@cache
def releases_of(module: str) -> str:
    """Versions of a top-level module's library for keys; empty if it is Python's, decides nothing, or is absent."""
    if module in INDIFFERENT or module in sys.stdlib_module_names:
        return ""
    return " ".join(f"{name}=={one}" for name, one in _installed(DISTRIBUTIONS.get(module, (module,))).items())


def _installed(names: Sequence[str]) -> dict[str, str]:
    installed = {}
    for name in names:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def made_by() -> dict[str, Any]:
    """Return a file's record of its origin: ``versions``, ``commit`` and ``made_at``."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"versions": versions(), "commit": current_commit(), "made_at": now}


@cache
def current_commit() -> str:
    """The commit of the suite's repository, marked if tracked files differ from it; empty where there is none."""
    here = Path(__file__)
    if not _git("ls-files", "--error-unmatch", here.name):
        return ""
    dirty = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "HEAD") + ("+changes" if dirty else "")


def _git(*arguments: str) -> str:
    """Return git's output; empty if git fails or is not installed."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout.strip()
    return ""
