"""The configuration tree: the YAMLs that choices are."""

from __future__ import annotations

import importlib
from pathlib import Path

CONFIG_MODULE = "entrain_bench_experiments"


def config_tree() -> Path:
    """The folder that holds the tree."""
    (folder,) = importlib.import_module(CONFIG_MODULE).__path__
    return Path(folder)


def choices(group: str) -> list[str]:
    """Names of a group's YAMLs (``strategy``, ``strategy/planner``, ``workload`` ...), sorted."""
    return sorted(path.stem for path in (config_tree() / group).glob("*.yaml"))
