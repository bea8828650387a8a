"""What choices of the configuration tree stand for: labels, parameters and settings of runs that say no more."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from entrain_bench.answers.compare import read_text
from entrain_bench.answers.labels import ORDER, label_columns
from entrain_bench.answers.report.commands import differing_settings
from entrain_bench.answers.report.parameters import differing, parameters
from entrain_bench.answers.report.runs import IDENTITY, NAMED, PARTS
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.records.records import Record, labels_of, parameters_text, table_csv

# The choice that runs of a file of the user's are made with; they are called after the file.
OWN_DATA = "trace"


class Tree:
    """The configuration tree, a folder of the user's beside it; each choice is composed once.

    Args:
        config_dir: the folder; None for none.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        self._composer = Composer(config_dir)
        self._known: dict[tuple[str, ...], RunConfig | None] = {}

    def save(self) -> None:
        """Write down what was composed, for the next process."""
        self._composer.save()

    def usual(self) -> dict[str, str]:
        """The row of ``table.csv`` of the run that nobody asked anything of."""
        config = self._composer.run(())
        record = Record("", "ok", "", labels_of(config), config.content(), "")
        row = read_text(table_csv([record])).iloc[0]
        return {str(name): str(value) for name, value in row.items()}

    def labels(self, group: str, name: str) -> dict[str, Any]:
        """``<group>_label`` of a choice, empty where it states none; of a strategy also its display order."""
        config = self.composed(f"{group}={name}")
        known = label_columns(config) if config else {}
        found = {f"{group}_label": known.get(f"{group}_label", "")}
        return found | ({ORDER: known.get(ORDER)} if group == "strategy" else {})

    def overrides(self, group: str, row: Mapping[str, str]) -> list[str]:
        """The choice of a group, and what a run's parameters change in it; of a name that is no choice the nearest."""
        own = parameters(row[f"{group}_parameters"])
        choice = self.choice(group, row[group], own)
        parts = self._parts(choice, row) if group == "strategy" else []
        file = _own_file(row[group], own) if group == "workload" and choice == OWN_DATA else []
        config = self.composed(f"{group}={choice}", *parts, *file)
        usual = _parameters(config, group) if config else {}
        renamed = [f"{group}.name={row[group]}"] if choice != row[group] and group in ("cluster", "model") else []
        changed = [f"{group}.{path}={text}" for path, text in differing(own, usual).items()]
        return [f"{group}={choice}", *parts, *renamed, *file, *changed]

    def choice(self, group: str, name: str, own: Mapping[str, str]) -> str:
        """The choice that a name is, or whose parameters are nearest to those of a run."""
        known = choices(group)
        if name in known or not own:
            return name
        if group == "workload" and "path" in own:
            return OWN_DATA
        configs = {choice: self.composed(f"{group}={choice}") for choice in known}
        distance = {
            choice: len(differing(own, _parameters(config, group))) for choice, config in configs.items() if config
        }
        return min(distance, key=lambda choice: (distance[choice], choice))

    def _parts(self, choice: str, row: Mapping[str, str]) -> list[str]:
        """Overrides of the parts of a strategy that are not its own."""
        config = self.composed(f"strategy={choice}")
        own = labels_of(config) if config else {}
        return [
            f"strategy/{part}={name}"
            for part in PARTS
            if own.get(part, row[part]) != row[part] and (name := _part_choice(part, row[part]))
        ]

    def composed(self, *overrides: str) -> RunConfig | None:
        """The run that overrides describe; None if there is no such choice any more."""
        if overrides not in self._known:
            self._known[overrides] = None
            with suppress(UserError):
                self._known[overrides] = self._composer.run(overrides)
        return self._known[overrides]


def _parameters(config: RunConfig, group: str) -> dict[str, str]:
    return parameters(parameters_text(getattr(config, group)))


def _own_file(name: str, own: Mapping[str, str]) -> list[str]:
    """Overrides of a file of the user's, and of its name where that is not the file's."""
    if "path" not in own:
        return []
    named = Path(json.loads(own["path"])).stem == name
    return [f"workload.path={own['path']}", *([] if named else [f"workload.name={json.dumps(name)}"])]


def _part_choice(part: str, class_name: str) -> str:
    """The first choice of a part that is an instance of a class; empty if none is."""
    folder = config_tree() / "strategy" / part
    files = ((name, (folder / f"{name}.yaml").read_text().splitlines()) for name in choices(f"strategy/{part}"))
    return next((name for name, lines in files if any(_is_target(line, class_name) for line in lines)), "")


def _is_target(line: str, class_name: str) -> bool:
    return line.startswith("_target_:") and line.split("#")[0].strip().endswith(f".{class_name}")


def with_tree(rows: pd.DataFrame, tree: Tree) -> pd.DataFrame:
    """The rows with labels and display order, and what runs them again: the overrides ``own`` and ``shared``.

    ``own`` are those of the strategy, ``shared`` all others but the seed, both as words of a shell.
    """
    usual = tree.usual()
    labels = {
        group: {name: tree.labels(group, name) for name in rows[group].unique()}
        for group in ("strategy", "workload", "model")
    }
    known: dict[tuple[str, ...], dict[str, str]] = {}
    found = []
    for row in rows[[name for name in IDENTITY if name != "seed"]].to_dict("records"):
        texts = {str(name): str(text) for name, text in row.items()}
        key = tuple(texts.values())
        if key not in known:
            known[key] = _overrides(texts, tree, usual)
        found.append({**known[key], **{k: v for group, each in labels.items() for k, v in each[texts[group]].items()}})
    added = pd.DataFrame(found, index=rows.index)
    return pd.concat([rows.drop(columns=[*added], errors="ignore"), added], axis="columns")


def _overrides(row: Mapping[str, str], tree: Tree, usual: Mapping[str, str]) -> dict[str, str]:
    groups = [tree.overrides(group, row) for group in NAMED]
    # What nobody has to say of how programs are executed.
    named = [each for each in groups if each != [f"harness={usual['harness']}"]]
    shared = [text for each in named for text in each] + differing_settings(row, usual)
    return {"own": shlex.join(tree.overrides("strategy", row)), "shared": shlex.join(shared)}
