"""Figures whose YAML has rows: a sweep for each, by the overrides that are added to the figure's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from entrain_bench.config.tree import config_tree
from entrain_bench.errors import require
from entrain_bench.records.cells import Cell
from entrain_bench.study import Study, SweepOverrides


def rows_of(experiment: str) -> dict[str, SweepOverrides]:
    """Overrides of every row of ``experiments/figure/<experiment>.yaml`` by its label; empty if it has none.

    Raises:
        UserError: for a row that is not a list of overrides.
    """
    values = yaml.safe_load((config_tree() / "figure" / f"{experiment}.yaml").read_text())
    rows = values.get("figure", {}).get("rows", {})
    for label, overrides in rows.items():
        listed = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
        require(listed, f"figure.rows.{label}", overrides, "a list of overrides")
    return {str(label): tuple(overrides) for label, overrides in rows.items()}


def sweeps_of(experiment: str) -> list[SweepOverrides]:
    """The sweeps of a figure: one, or one for each row."""
    own = f"figure={experiment}"
    return [(own, *overrides) for overrides in rows_of(experiment).values()] or [(own,)]


def cells_of(experiment: str, study: Study) -> Sequence[Cell] | Mapping[str, Sequence[Cell]]:
    """The cells of a figure, by the labels of its rows if it has any."""
    rows = rows_of(experiment)
    cells = [study.cells(*sweep) for sweep in sweeps_of(experiment)]
    return dict(zip(rows, cells, strict=True)) if rows else cells[0]
