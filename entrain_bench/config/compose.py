"""Runs out of the configuration tree: what Hydra composes of overrides, each set of choices once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.base.store import Store
from entrain_bench.config.command_line import CONFIG_NAME, add_config_dir, first_line, in_tree, one_line_errors
from entrain_bench.config.given import Given, given_of, with_value
from entrain_bench.config.given_plan import with_plan
from entrain_bench.config.groups import Groups
from entrain_bench.config.overrides import check_overrides, group_of, is_inside, is_plain, parse
from entrain_bench.config.parts import sources_stamp
from entrain_bench.config.schema import (
    GROUP_KEYS,
    NESTED,
    ConfigSchema,
    RunConfig,
    plain_values,
    register_schema,
)
from entrain_bench.config.targets import check_targets
from entrain_bench.config.tree import config_tree

INTERPOLATION = "${"
# The first key that an interpolation names; nothing for what is no plain path.
INTERPOLATED = re.compile(r"\$\{(\w*)")
# Keys of a figure's YAML that do not change its runs, and overrides that may change how something is swept.
SWEEP_KEYS = frozenset({"hydra", "figure"})
# What joblib's launcher and Ray's call the number of their processes.
NUM_PROCESSES = ("n_jobs", "num_cpus")
SWEEPING = re.compile(r"(figure|hydra)\b")
# Which strategies ``glob(*)`` finds for a figure: those whose YAML says one of these of ``in_figures``.
SHOWN = "figure.strategies"
IN_FIGURES = ("all", "main", "none")


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep and its launcher.

    Attributes:
        cells: the overrides of every run, in the sweeper's order.
        launcher: the class of Hydra's launcher.
        num_processes: how many it is to use; -1 for all there is.
        address: where Ray's cluster is; None for this machine.
    """

    cells: tuple[tuple[str, ...], ...]
    launcher: str
    num_processes: int
    address: str | None


class Composer:
    """Composes runs, and caches them for later processes until a YAML changes.

    Args:
        config_dir: a folder of the user's, whose YAMLs and Python files are found beside ours; None for none.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        register_schema()
        self.config_dir = config_dir
        self._search = add_config_dir(config_dir)
        self._folders = [config_tree(), *([Path(config_dir)] if config_dir else [])]
        # Hash of all that compositions depend on, besides their overrides.
        self.version = _tree_hash(config_dir)
        self._store = Store("compositions", self.version)
        self._groups = Groups(self._search)

    def run(self, overrides: Sequence[str]) -> RunConfig:
        """The run that the overrides describe.

        Raises:
            UserError: for unknown keys, unknown choices, wrong types and values out of range.
        """
        with one_line_errors([*self._search, *overrides]):
            overrides = with_plan(overrides)
            check_overrides(overrides)
            chosen, given = given_of(overrides, self._folders)
            plain = dict(_plain(text) for text in chosen if is_plain(parse(text)))
            values = self._choices(tuple(text for text in chosen if not is_plain(parse(text))), given)
            for group in NESTED:
                usual = values[group].items()
                values = values | {group: {name: plain.pop(f"{group}.{name}", value) for name, value in usual}}
            return given.checked(RunConfig.from_values(_resolved(values | plain)))

    def sweep(self, overrides: Sequence[str]) -> Sweep:
        """Return the runs of a sweep, including those of a figure's ``hydra.sweeper.params``, and its launcher.

        Raises:
            UserError: for unknown choices, invalid overrides, and a sweep without runs.
        """
        key = ["sweep", *overrides]
        stored = self._store.get(key)
        if stored is None:
            with one_line_errors([*self._search, *overrides]), in_tree():
                check_overrides(overrides)
                stored = self._expand(overrides)
            self._store.put(key, stored)
        if not stored["cells"]:
            why = "the sweep is empty, because a glob(...) matches no choice of its group"
            raise UserError(f"{' '.join(overrides)}: {why}. To list the choices, run entrain-bench --help=GROUP")
        return Sweep(tuple(map(tuple, stored["cells"])), stored["launcher"], stored["num_processes"], stored["address"])

    def save(self) -> None:
        """Store what was composed for the next process."""
        self._store.save()

    def _choices(self, overrides: tuple[str, ...], given: Given) -> dict[str, Any]:
        """Return what Hydra composes of overrides that choose, with interpolations unresolved, plus ``given``.

        Values inside a choice are set afterwards, so that runs that differ only in them share one composition. If a
        value cannot be set, Hydra composes all overrides and reports the error.
        """
        parsed = [parse(text) for text in overrides if not self._only_sweeps(text)]
        inside = [override for override in parsed if is_inside(override)]
        chosen = [str(override.input_line) for override in parsed if not is_inside(override)]
        if len({override.key_or_group for override in parsed}) == len(parsed):
            chosen.sort()
        try:
            values = given.put_into(self._composed(tuple(chosen)))
            _check_file(values["workload"], {override.key_or_group: override.value() for override in inside})
            for override in inside:
                values = with_value(values, override.key_or_group.split("."), override.value())
        except KeyError:
            values = given.put_into(self._composed(overrides))
        return values

    def _composed(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        """Return what Hydra composes of overrides; each group separately, unless a choice changes other groups."""
        by_group: dict[str, list[str]] = {}
        for text in overrides:
            by_group.setdefault(group_of(text), []).append(text)
        parts: dict[str, Any] = {}
        for group, own in by_group.items():
            parts[group] = self._store.get(["group", *own])
            if parts[group] is None:
                parts[group] = self._groups.part(group, own)
                self._store.put(["group", *own], parts[group])
        if None in parts.values():
            return self._composed_together(overrides)
        return self._composed_together(()) | parts

    def _composed_together(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        key = ["run", *overrides]
        values: dict[str, Any] | None = self._store.get(key)
        if values is None:
            with in_tree():
                config = hydra.compose(CONFIG_NAME, overrides=[*self._search, *overrides])
            values = plain_values(config, resolve=False)
            self._store.put(key, values)
        return values

    def _only_sweeps(self, override: str) -> bool:
        """Return whether an override chooses a figure whose YAML sets no keys of single runs."""
        group, _, name = override.partition("=")
        if group != "figure":
            return False
        files = [folder / group / f"{name}.yaml" for folder in self._folders]
        return any(file.is_file() and _keys_of(file) <= SWEEP_KEYS for file in files)

    def _expand(self, overrides: Sequence[str]) -> dict[str, Any]:
        # glob(*) asks the loader for a group's choices; the loader does not know the user's folder.
        loader = GlobalHydra.instance().config_loader()
        all_options = partial(loader.get_group_options, overrides=self._search)
        loader.get_group_options = all_options  # type: ignore[method-assign]
        parser = OverridesParser.create(loader)
        parsed = parser.parse_overrides(list(overrides))
        # Only these say how something is swept.
        fixed = [one for one in parsed if not one.is_sweep_override() and SWEEPING.match(one.key_or_group)]
        base = self._sweeper(tuple(str(one.input_line) for one in fixed))
        shown = base["shown"]

        def options(group_name: str, results_filter: Any = ObjectType.CONFIG, **more: Any) -> list[str]:
            found = all_options(group_name, results_filter, **more)
            return [name for name in found if group_name != "strategy" or self._in_figures(name) in shown]

        loader.get_group_options = options  # type: ignore[method-assign,assignment]
        kept = [text for text, one in zip(overrides, parsed, strict=True) if one.key_or_group != SHOWN]
        batches = BasicSweeper.split_arguments(parser.parse_overrides([*base["swept"], *kept]), None)
        return {**base, "cells": [list(cell) for batch in batches for cell in batch]}

    def _in_figures(self, strategy: str) -> str:
        """Return the value of ``in_figures`` in a strategy's YAML.

        Raises:
            UserError: for an unknown value.
        """
        file = next(file for folder in self._folders if (file := folder / "strategy" / f"{strategy}.yaml").is_file())
        word = str((yaml.safe_load(file.read_text()) or {}).get("in_figures", IN_FIGURES[0]))
        if word not in IN_FIGURES:
            raise unknown_choice(f"{strategy}: in_figures", word, IN_FIGURES)
        return word

    def _sweeper(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        """Return the sweep that a figure states, and its launcher."""
        key = ["sweeper", *overrides]
        found: dict[str, Any] | None = self._store.get(key)
        if found is None:
            composed = hydra.compose(CONFIG_NAME, overrides=[*self._search, *overrides], return_hydra_config=True)
            # A run of these overrides, so that it is not composed again.
            self._store.put(
                ["run", *overrides], {k: v for k, v in plain_values(composed, False).items() if k != "hydra"}
            )
            launcher = composed.hydra.launcher
            params = composed.hydra.sweeper.params or {}
            # A sweep that is no figure's finds them all.
            usual = IN_FIGURES[:1] if any(text.startswith("figure=") for text in overrides) else IN_FIGURES
            found = {
                "shown": [*(OmegaConf.select(composed, SHOWN) or usual)],
                "swept": [f"{key}={value}" for key, value in params.items()],
                "launcher": str(launcher["_target_"]),
                "num_processes": _num_processes(launcher),
                "address": launcher.get("address"),
            }
            self._store.put(key, found)
        return found


def swept_keys(overrides: Sequence[str]) -> dict[str, bool]:
    """Return the keys of overrides, in order, and whether each has several values.

    Raises:
        UserError: for an invalid override, and for a key that is given twice.
    """
    found: dict[str, bool] = {}
    for text in overrides:
        with one_line_errors([text]):
            override = parse(text)
        if override.key_or_group in found:
            raise UserError(f"{text}: {override.key_or_group} must be given once")
        found[override.key_or_group] = override.is_sweep_override()
    return found


def compose(*overrides: str, config_dir: str | None = None) -> RunConfig:
    """Return the run of overrides ``key=value``, as on the command line; without overrides the default run.

    Args:
        overrides: as on the command line.
        config_dir: a folder with the user's choices; None for none.

    Raises:
        UserError: for unknown keys, unknown choices, wrong types and values out of range.
    """
    composer = Composer(config_dir)
    config = composer.run(overrides)
    composer.save()
    return config


def _check_file(workload: Mapping[str, Any], inside: Mapping[str, Any]) -> None:
    """Refuse another file for a workload with its own file: tables would show both under one name.

    Raises:
        UserError: if the path changes but the name does not.
    """
    path = inside.get("workload.path")
    own = workload.get("path")
    name = workload.get("name")
    if path is not None and name and path != own and "workload.name" not in inside:
        raise UserError(
            f"workload.path={path}: workload={name} always reads {own}. To use your file, pass workload=trace "
            f"workload.path={path}; to compare both, workload=trace workload.path={path},{own}"
        )


@cache
def _plain(text: str) -> tuple[str, Any]:
    """Return key and value of a plain override; the schema checks and converts the value."""
    override = parse(text)
    typed = _typed()
    try:
        OmegaConf.update(typed, override.key_or_group, override.value())
    except OmegaConfBaseException as error:
        raise UserError(f"{text}: {first_line(error)}") from error
    value = OmegaConf.select(typed, override.key_or_group)
    return override.key_or_group, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


@cache
def _typed() -> DictConfig:
    """Return the keys with their types; the values are arbitrary."""
    typed: DictConfig = OmegaConf.structured(ConfigSchema)
    return typed


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with interpolations resolved and targets checked; runs share the mappings of equal groups."""
    texts = {group: json.dumps(values[group]) for group in GROUP_KEYS}
    interpolated = {group for group, text in texts.items() if INTERPOLATION in text}
    named = {*INTERPOLATED.findall("".join(texts[group] for group in interpolated))}
    rest = json.dumps({key: value for key, value in values.items() if key not in GROUP_KEYS})
    if named <= GROUP_KEYS.keys() and INTERPOLATION not in rest:
        values = values | {group: _checked(group, text) for group, text in texts.items() if group not in interpolated}
        return values | _resolved_text(json.dumps({group: values[group] for group in sorted(interpolated | named)}))
    resolved = plain_values(OmegaConf.create(values))
    check_targets({group: resolved[group] for group in GROUP_KEYS})
    return resolved


@cache
def _checked(group: str, text: str) -> Any:
    values = json.loads(text)
    check_targets(values, group)
    return values


@cache
def _resolved_text(text: str) -> dict[str, Any]:
    resolved = plain_values(OmegaConf.create(json.loads(text)))
    check_targets(resolved)
    return resolved


def _num_processes(launcher: DictConfig) -> int:
    """Return how many processes a launcher uses; 1 if it does not say."""
    key = next((key for key in NUM_PROCESSES if key in launcher), None)
    value = launcher[key] if key else 1
    if not isinstance(value, int) or (value < 1 and value != -1):
        raise UserError(f"hydra.launcher.{key}={value}: must be an integer of at least 1, or -1 for all CPUs")
    return value


@cache
def _keys_of(file: Path) -> frozenset[str]:
    """Top-level keys of a YAML."""
    return frozenset(map(str, yaml.safe_load(file.read_text()) or {}))


def _tree_hash(config_dir: str | None) -> str:
    """Hash of all that compositions depend on, besides their overrides."""
    digest = hashlib.sha256(f"hydra {version('hydra-core')}, omegaconf {version('omegaconf')}".encode())
    for module in ("compose.py", "given.py", "groups.py", "overrides.py", "parts.py", "schema.py"):
        digest.update(Path(__file__).with_name(module).read_bytes())
    for folder in (config_tree(), *([Path(config_dir).resolve()] if config_dir else [])):
        digest.update(str(folder).encode() + b"\0")
        for file in sorted(map(str, folder.rglob("*.yaml"))):
            digest.update(file.removeprefix(str(folder)).encode() + b"\0" + Path(file).read_bytes() + b"\0")
        parts = [file.read_text() for file in sorted((folder / "strategy").glob("*/*.yaml"))]
        digest.update(sources_stamp("\n".join(parts)).encode())
    return digest.hexdigest()[:16]
