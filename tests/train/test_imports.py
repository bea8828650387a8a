"""Imports point one way: no circle among modules of the package; settings and samples are read without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import entrain_bench

PACKAGE = Path(str(entrain_bench.__file__)).parent


def imports_of_package(folder: Path) -> dict[str, set[str]]:
    """Modules of a package that each of its modules imports anywhere in it, but for types only."""
    files = {}
    for file in sorted(folder.rglob("*.py")):
        parts = (folder.name, *file.relative_to(folder).with_suffix("").parts)
        files[".".join(parts).removesuffix(".__init__")] = file
    return {
        module: {name for name in _imports(ast.parse(file.read_text()), files) if name in files}
        for module, file in files.items()
    }


def _imports(node: ast.AST, files: Mapping[str, Path]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in files else str(child.module) for name in names)
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _imports(child, files)


def circle_of(folder: Path) -> list[str]:
    """Modules of a package that import each other in a circle; empty if none do."""
    try:
        TopologicalSorter(imports_of_package(folder)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.wide
def test_no_modules_import_each_other() -> None:
    assert circle_of(PACKAGE) == []


def test_settings_are_checked_without_torch() -> None:
    check = "import sys, entrain_bench.train.trainer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.wide
def test_samples_are_read_and_preprocessed_without_torch() -> None:
    modules = "entrain_bench.train.features, entrain_bench_workloads.dataset.samples"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
