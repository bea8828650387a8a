"""The configuration tree: the YAMLs that choices are."""

import importlib
from pathlib import Path

CONFIG_MODULE = "entrain_bench_experiments"
CONFIG_NAME = "config"
# Groups of choices that a run or a sweep is made of; other folders of the tree hold none.
GROUPS = ("strategy", "workload", "model", "cluster", "harness", "figure")


def config_tree() -> Path:
    """Return the folder that holds the tree."""
    (folder,) = importlib.import_module(CONFIG_MODULE).__path__
    return Path(folder)


def folders(config_dir: str | None) -> list[Path]:
    """Return the folders of choices: the suite's, and the user's if there is one."""
    return [config_tree(), *([Path(config_dir).resolve()] if config_dir else [])]


def choices(group: str, config_dir: str | None = None) -> list[str]:
    """Return the names of a group's YAMLs (``strategy``, ``strategy/planner``, ``workload`` ...), sorted."""
    return sorted({path.stem for folder in folders(config_dir) for path in (folder / group).glob("*.yaml")})
