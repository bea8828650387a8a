"""Runs out of the configuration tree: what Hydra composes of overrides, each set of choices once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.config.command_line import CONFIG_NAME, add_config_dir, first_line, in_tree, one_line_errors
from entrain_bench.config.schema import (
    ConfigSchema,
    LayoutConfig,
    RunConfig,
    SpeedConfig,
    plain_values,
    register_schema,
)
from entrain_bench.config.tree import config_tree
from entrain_bench.errors import UserError
from entrain_bench.specs.framework import Framework
from entrain_bench.store import Store

# Mappings of plain keys.
NESTED: Mapping[str, type[LayoutConfig | SpeedConfig]] = {"layout": LayoutConfig, "speed": SpeedConfig}
# Keys that no choice of a group depends on: cells that differ in them alone share one composition.
PLAIN_KEYS = frozenset(
    {"seed", "iterations", "global_batch", "microbatch_size", "belief_error", "belief_bias", "action_noise"}
    | {*Framework.__dataclass_fields__, "memory_fraction", "results_dir", "mlflow"}
    | {f"{group}.{name}" for group, config in NESTED.items() for name in config.__dataclass_fields__}
)


INTERPOLATION = "${"


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep's overrides say.

    Attributes:
        cells: the overrides of every run, in the sweeper's order.
        launcher: the class of Hydra's launcher.
        num_processes: how many it is to use; -1 for all there is.
    """

    cells: tuple[tuple[str, ...], ...]
    launcher: str
    num_processes: int


class Composer:
    """Composes runs; what it composed is known to later processes for as long as no YAML changes.

    Args:
        config_dir: a folder of the user's, whose YAMLs and Python files are found beside ours; None for none.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        register_schema()
        self._search = add_config_dir(config_dir)
        self._store = Store("compositions", _tree_hash(config_dir))

    def run(self, overrides: Sequence[str]) -> RunConfig:
        """The run that the overrides describe.

        Raises:
            UserError: for unknown keys, unknown choices, wrong types and values out of range.
        """
        with one_line_errors([*self._search, *overrides]):
            plain = dict(_plain(text) for text in overrides if _is_plain(_parse(text)))
            values = self._choices(tuple(text for text in overrides if not _is_plain(_parse(text))))
            for group in NESTED:
                given = values[group].items()
                values = values | {group: {name: plain.pop(f"{group}.{name}", value) for name, value in given}}
            values = values | plain
            if INTERPOLATION in json.dumps(values):
                values = plain_values(OmegaConf.create(values))
            return RunConfig.from_values(values)

    def sweep(self, overrides: Sequence[str]) -> Sweep:
        """The cells of a sweep, those of a figure's ``hydra.sweeper.params`` included, and how it is to be run.

        Raises:
            UserError: for unknown choices, and for overrides that cannot be understood.
        """
        key = ["sweep", *overrides]
        stored = self._store.get(key)
        if stored is None:
            with one_line_errors([*self._search, *overrides]), in_tree():
                stored = self._expand(overrides)
            self._store.put(key, stored)
        return Sweep(tuple(map(tuple, stored["cells"])), stored["launcher"], stored["num_processes"])

    def save(self) -> None:
        """Write down what was composed, for the next process."""
        self._store.save()

    def _choices(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        """What Hydra composes of overrides that choose, interpolations left as they are."""
        key = ["run", *overrides]
        values: dict[str, Any] | None = self._store.get(key)
        if values is None:
            with in_tree():
                config = hydra.compose(CONFIG_NAME, overrides=[*self._search, *overrides])
            values = plain_values(config, resolve=False)
            self._store.put(key, values)
        return values

    def _expand(self, overrides: Sequence[str]) -> dict[str, Any]:
        # The loader knows the choices of a group, which glob(*) asks for; of the user's folder it has to be told.
        loader = GlobalHydra.instance().config_loader()
        loader.get_group_options = partial(  # type: ignore[method-assign]
            loader.get_group_options, overrides=self._search
        )
        parser = OverridesParser.create(loader)
        parsed = parser.parse_overrides(list(overrides))
        fixed = [text for text, one in zip(overrides, parsed, strict=True) if not one.is_sweep_override()]
        base: DictConfig = hydra.compose(CONFIG_NAME, overrides=[*self._search, *fixed], return_hydra_config=True)
        swept = [f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()]
        batches = BasicSweeper.split_arguments(parser.parse_overrides([*swept, *overrides]), None)
        return {
            "cells": [list(cell) for batch in batches for cell in batch],
            "launcher": str(base.hydra.launcher["_target_"]),
            "num_processes": int(base.hydra.launcher.get("n_jobs") or 1),
        }


def compose(*overrides: str, config_dir: str | None = None) -> RunConfig:
    """The run that overrides describe, as on the command line; without any the default one.

    Args:
        *overrides: ``key=value``.
        config_dir: a folder of the user's with further choices.

    Raises:
        UserError: for unknown keys, unknown choices, wrong types and values out of range.
    """
    composer = Composer(config_dir)
    config = composer.run(overrides)
    composer.save()
    return config


@cache
def _parse(text: str) -> Override:
    (override,) = OverridesParser.create().parse_overrides([text])
    return override


@cache
def _plain(text: str) -> tuple[str, Any]:
    """Key and value of a plain override, the value checked and converted by the schema."""
    override = _parse(text)
    typed = OmegaConf.structured(ConfigSchema)
    try:
        OmegaConf.update(typed, override.key_or_group, override.value())
    except OmegaConfBaseException as error:
        raise UserError(f"{text}: {first_line(error)}") from error
    value = OmegaConf.select(typed, override.key_or_group)
    return override.key_or_group, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _is_plain(override: Override) -> bool:
    """Whether an override gives a plain key one value."""
    changes = override.type is OverrideType.CHANGE and override.package is None
    return changes and override.key_or_group in PLAIN_KEYS and not override.is_sweep_override()


def _tree_hash(config_dir: str | None) -> str:
    """Hash of all that compositions depend on, besides their overrides."""
    digest = hashlib.sha256(f"hydra {version('hydra-core')}, omegaconf {version('omegaconf')}".encode())
    for module in ("compose.py", "schema.py"):
        digest.update(Path(__file__).with_name(module).read_bytes())
    for folder in (config_tree(), *([Path(config_dir).resolve()] if config_dir else [])):
        digest.update(str(folder).encode() + b"\0")
        for file in sorted(folder.rglob("*.yaml")):
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
