"""What a run is known by: a hash of all that decides its result."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from entrain_bench.config.instantiate import COSMETIC, instantiate
from entrain_bench.config.schema import RunConfig
from entrain_bench.errors import UserError
from entrain_bench.specs.workload import Workload

# Keys that say nothing about the result, and what of this package only shows or measures.
COSMETIC_KEYS = frozenset({"label", "display_order", "source", "sources"})
COSMETIC_CODE = frozenset(
    {"analysis.py", "bench", "cli.py", "documents", "figures", "report.py", "sweeps.py", "tracking.py"}
)


def identify(config: RunConfig) -> tuple[str, str]:
    """Key of a run (configuration, workload data, code) and the code version in it."""
    content = config.content()
    version = code_version(frozenset(_targets(content)))
    text = json.dumps([_decisive(content), workload_of(config).fingerprint(), version], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16], version


def workload_of(config: RunConfig) -> Workload:
    """The workload of a run; cells that differ elsewhere share it."""
    return _workload(json.dumps(config.workload, sort_keys=True))


@lru_cache(maxsize=64)
def _workload(node: str) -> Workload:
    workload: Workload = instantiate(json.loads(node), "workload", "source")
    return workload


def _decisive(node: Any) -> Any:
    if isinstance(node, Mapping):
        # What a class is built of decides, whatever its name.
        cosmetic = {COSMETIC} if "_target_" in node else COSMETIC_KEYS
        return {key: _decisive(value) for key, value in node.items() if key not in cosmetic}
    return [_decisive(value) for value in node] if isinstance(node, list) else node


@cache
def code_version(targets: frozenset[str]) -> str:
    """Hash of the source files of this package and of every package, or folder of modules, that holds a target.

    What only shows results (figures, command line, tracking) or measures the harness is left out.
    """
    digest = hashlib.sha256()
    for name in sorted({"entrain_bench", *(target.split(".", 1)[0] for target in targets)}):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise UserError(f"_target_: no module named {name}")
        folder = Path(spec.origin).parent
        own = name == "entrain_bench"
        # A module may import its neighbours; a package holds all it needs.
        for file in sorted(folder.rglob("*.py") if spec.submodule_search_locations else folder.glob("*.py")):
            path = file.relative_to(folder)
            if not (own and path.parts[0] in COSMETIC_CODE):
                digest.update(path.as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _targets(node: Any) -> Iterable[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield str(value)
            else:
                yield from _targets(value)
