"""Sweeps of figures (``experiments/figure/NAME.yaml``) and of their rows, narrowed or changed by a user's overrides."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Glob

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.compose import NARROWED
from entrain_bench.config.overrides import parse, swept_keys
from entrain_bench.config.tree import choices, config_tree

# Folder of the YAMLs in a tree of configurations.
FOLDER = "figure"
type Overrides = tuple[str, ...]
# The sweeps of a figure by the labels of its rows; one sweep without a label if it has none.
type Sweeps = Mapping[str, Overrides]
UNLABELLED = ""


def rows_of(experiment: str, config_dir: str | None = None) -> dict[str, Overrides]:
    """Overrides of every row of ``experiments/figure/<experiment>.yaml`` by its label; ``UserError`` for others.

    Of a list of mappings every combination is a row.
    """
    rows = (_yaml(experiment, config_dir).get("figure") or {}).get("rows", {})
    if isinstance(rows, list):
        rows = {
            row_label([label for label, _ in chosen]): [text for _, texts in chosen for text in texts]
            for chosen in product(*(axis.items() for axis in rows))
        }
    for label, overrides in rows.items():
        listed = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
        require(listed, f"figure.rows.{label}", overrides, "a list of overrides")
    return {str(label): tuple(overrides) for label, overrides in rows.items()}


def row_label(parts: Sequence[str]) -> str:
    """The label of a row that combines one entry of each list of a figure's ``rows``."""
    return "; ".join(parts)


def drawing_of(path: Path) -> str:
    """The figure whose module draws the sweep of a YAML of the user's; empty if none is named."""
    values = yaml.safe_load(path.read_text()) or {}
    return str((values.get("figure") or {}).get("drawing") or "")


def _yaml(experiment: str, config_dir: str | None) -> dict[str, Any]:
    folders = [config_tree(), *([Path(config_dir)] if config_dir else [])]
    files = [file for folder in folders if (file := folder / FOLDER / f"{experiment}.yaml").is_file()]
    require(bool(files), "EXPERIMENT", experiment, "the name of a YAML in figure/")
    values: dict[str, Any] = yaml.safe_load(files[0].read_text())
    return values


# Keys of Hydra, and sweeps of other figures.
NOT_OF_A_RUN = ("figure", "hydra")
# Groups of which a figure can tell several entries apart that differ inside.
TRACED = ("workload", "model")


def sweeps_of(experiment: str, config_dir: str | None = None, overrides: Sequence[str] = ()) -> Sweeps:
    """The sweeps of a figure narrowed or changed by overrides of the user's; others are added.

    Values of keys of ``NARROWED`` select among the figure's own; where one is not among them, they replace those.
    ``UserError`` for other keys whose values the figure compares, and for several values of other keys.
    """
    content = _yaml(experiment, config_dir) if overrides else {}
    rows = rows_of(experiment, config_dir)
    # A file without options of the drawing is of the package ``hydra.sweeper.params``.
    params = content["hydra"]["sweeper"]["params"] if "hydra" in content else content
    compared = {key: str(value) for key, value in params.items() if any(swept_keys([f"{key}={value}"]).values())}
    compared |= {key: "in its rows" for row in rows.values() for key in swept_keys(row)}
    aside = list[str]()
    for text in overrides:
        key = parse(text).key_or_group
        _check(key, text)
        values = values_of(text, config_dir)
        in_rows = {each for row in rows.values() for each in row if parse(each).key_or_group == key}
        own = (in_rows, values_of(f"{key}={params.get(key, '')}", config_dir))
        if key in NARROWED and any(values <= known for known in own):
            rows = {label: row for label, row in rows.items() if values & {*row} or not in_rows & {*row}}
            continue
        inside = [other for other in compared if other.startswith(f"{key}.")]
        for other in inside or ([key] if key in compared and (key not in NARROWED or in_rows) else []):
            stated = f"figure {experiment} already compares values of {other} ({compared[other]})"
            raise UserError(f"{key}: {stated}. Leave it out")
        aside += [f"~{other}" for other in params if other.startswith(f"{key}.")]
    # The figure's name comes last: MLflow has the figure's own runs under it.
    last = (*aside, f"figure={experiment}")
    given = swept_keys(overrides)
    return {
        label: (*(text for text, key in zip(overrides, given, strict=True) if key not in swept_keys(row)), *last, *row)
        for label, row in (rows or {UNLABELLED: ()}).items()
    }


def values_of(text: str, config_dir: str | None) -> set[str]:
    """The override of every value of a list; of ``glob`` of every choice that there is."""
    override = parse(text)
    key = override.get_key_element()
    if override.is_sweep_override() and isinstance(override.value(), Glob):
        return {f"{key}={name}" for name in choices(key, config_dir)}
    return {f"{key}={value}" for value in override.sweep_string_iterator()} if override.is_discrete_sweep() else {text}


def _check(key: str, text: str) -> None:
    group = re.split(r"[./]", key)[0]
    if group in NOT_OF_A_RUN:
        raise UserError(f"{key}: is not a key of a run. Leave it out")
    if key not in NARROWED and group not in TRACED and parse(text).is_sweep_override():
        raise UserError(f"{key}: must be one value; only {', '.join(NARROWED)} take several in a figure")
