"""What results follow from: what other devices, code or options gave is neither repeated as theirs nor reported."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from entrain_bench.base.errors import OWN_PACKAGES
from entrain_bench.config.tree import config_tree
from entrain_bench.lab.gpu_check.machine import Machine
from entrain_bench.lab.gpu_check.settings import Setup
from entrain_bench.records.code import hash_of, sources_of

# What a profile follows from, with all that this imports.
PROFILING = frozenset({"entrain_bench.train.profiling.session"})
# Files that runs read beside code.
DATA = (".yaml", ".parquet")


def origin_of(machine: Machine) -> str:
    """Of whatever is measured: another machine, packages, variables or code that measures give another one."""
    return _digest([machine.identity, hash_of(sources_of(PROFILING))])


def identity_of(setup: Setup, tests: Iterable[Path]) -> str:
    """Of a step's result: its origin, devices and options, all code, configuration and data of the suite.

    Args:
        setup: origin, devices and options.
        tests: files of the tests that a step runs.
    """
    roots = {package: _folder(package) for package in sorted(OWN_PACKAGES)}
    modules = {_module(package, root, path) for package, root in roots.items() for path in root.rglob("*.py")}
    places = [config_tree(), *roots.values()]
    read = sorted(path for place in places for path in place.rglob("*") if path.suffix in DATA)
    files = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in [*read, *sorted(tests)]]
    devices = [setup.origin, setup.kind, setup.num_devices, setup.everything]
    return _digest([*devices, hash_of(sources_of(modules)), files])


def _folder(package: str) -> Path:
    return Path(next(iter(importlib.import_module(package).__path__)))


def _module(package: str, root: Path, path: Path) -> str:
    inner = path.relative_to(root).with_suffix("").parts
    return ".".join((package, *(inner[:-1] if inner[-1] == "__init__" else inner)))


def _digest(values: Any) -> str:
    # Not the values: they have names of folders and machines in them.
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
