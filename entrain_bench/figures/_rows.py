"""What a figure's YAML sweeps; one with rows has a sweep for each, by the overrides that are added to its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def params_of(experiment: str) -> dict[str, str]:
    """Values that ``experiments/figure/<experiment>.yaml`` combines, by key, as on the command line."""
    return {str(key): str(value) for key, value in _yaml(experiment)["hydra"]["sweeper"]["params"].items()}


def shown_in(experiment: str) -> SweepOverrides:
    """The override that has ``glob(*)`` find the strategies that it finds for a figure."""
    return (f"+{SHOWN}=[{','.join(_figure(experiment).get('strategies', IN_FIGURES[:1]))}]",)


def rows_of(experiment: str) -> dict[str, SweepOverrides]:
    """Overrides of every row of ``experiments/figure/<experiment>.yaml`` by its label; empty if it has none.

    Raises:
        UserError: for a row that is not a list of overrides.
    """
    rows = _figure(experiment).get("rows", {})
    for label, overrides in rows.items():
        listed = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
        require(listed, f"figure.rows.{label}", overrides, "a list of overrides")
    return {str(label): tuple(overrides) for label, overrides in rows.items()}


def sweeps_of(experiment: str) -> Sweeps:
    """The sweeps of a figure."""
    own = f"figure={experiment}"
    return {label: (own, *overrides) for label, overrides in rows_of(experiment).items()} or {UNLABELLED: (own,)}


def cells_of(sweeps: Sweeps, study: Study) -> Sequence[Cell] | Mapping[str, Sequence[Cell]]:
    """The cells of a figure, by the labels of its rows if it has any."""
    cells = {label: study.cells(*sweep) for label, sweep in sweeps.items()}
    return cells.get(UNLABELLED, cells)


def _figure(experiment: str) -> dict[str, Any]:
    values: dict[str, Any] = _yaml(experiment).get("figure", {})
    return values


def _yaml(experiment: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((config_tree() / "figure" / f"{experiment}.yaml").read_text())
    return values
