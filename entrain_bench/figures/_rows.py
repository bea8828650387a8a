"""What a figure's YAML sweeps; one with rows has a sweep for each, by the overrides that are added to its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.base.errors import require
from entrain_bench.config.compose import IN_FIGURES, SHOWN
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.run.study import Study, SweepOverrides

# The sweeps of a figure by the labels of its rows; one sweep without a label if it has none.
type Sweeps = Mapping[str, SweepOverrides]
UNLABELLED = ""


def params_of(experiment: str, config_dir: str | None = None) -> dict[str, str]:
    """Values that ``experiments/figure/<experiment>.yaml`` combines, by key, as on the command line."""
    return {str(key): str(value) for key, value in _yaml(experiment, config_dir)["hydra"]["sweeper"]["params"].items()}


def shown_in(experiment: str, config_dir: str | None = None) -> SweepOverrides:
    """The override that has ``glob(*)`` find the strategies that it finds for a figure."""
    return (f"+{SHOWN}=[{','.join(_figure(experiment, config_dir).get('strategies', IN_FIGURES[:1]))}]",)


def rows_of(experiment: str, config_dir: str | None = None) -> dict[str, SweepOverrides]:
    """Overrides of every row of ``experiments/figure/<experiment>.yaml`` by its label; ``UserError`` for others."""
    rows = _figure(experiment, config_dir).get("rows", {})
    for label, overrides in rows.items():
        listed = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
        require(listed, f"figure.rows.{label}", overrides, "a list of overrides")
    return {str(label): tuple(overrides) for label, overrides in rows.items()}


def sweeps_of(experiment: str, config_dir: str | None = None) -> Sweeps:
    """The sweeps of a figure."""
    own = f"figure={experiment}"
    rows = rows_of(experiment, config_dir)
    return {label: (own, *overrides) for label, overrides in rows.items()} or {UNLABELLED: (own,)}


def cells_of(sweeps: Sweeps, study: Study) -> Sequence[Cell] | Mapping[str, Sequence[Cell]]:
    """The cells of a figure, by the labels of its rows if it has any."""
    cells = {label: study.cells(*sweep) for label, sweep in sweeps.items()}
    return cells.get(UNLABELLED, cells)


def drawing_of(path: Path) -> str:
    """The figure whose module draws the sweep of a YAML of the user's; empty if none is named."""
    values = yaml.safe_load(path.read_text()) or {}
    return str((values.get("figure") or {}).get("drawing") or "")


def _figure(experiment: str, config_dir: str | None) -> dict[str, Any]:
    values: dict[str, Any] = _yaml(experiment, config_dir).get("figure") or {}
    return values


def _yaml(experiment: str, config_dir: str | None) -> dict[str, Any]:
    folders = [config_tree(), *([Path(config_dir)] if config_dir else [])]
    files = [file for folder in folders if (file := folder / "figure" / f"{experiment}.yaml").is_file()]
    require(bool(files), "EXPERIMENT", experiment, "the name of a YAML in figure/")
    values: dict[str, Any] = yaml.safe_load(files[0].read_text())
    return values
