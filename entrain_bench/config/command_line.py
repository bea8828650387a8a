"""From command-line arguments to fully resolved runs, with every mistake reported in one line."""

from __future__ import annotations

import copy
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.config.schema import ConfigSchema, LayoutConfig, RunConfig, register_schema
from entrain_bench.config.tree import CONFIG_MODULE
from entrain_bench.errors import UserError, unknown_choice

CONFIG_NAME = "config"
# Keys that no choice of a group depends on.
PLAIN_KEYS = frozenset(
    {"seed", "iterations", "global_batch", "microbatch_size", "belief_error", "belief_bias", "memory_fraction"}
    | {f"layout.{name}" for name in LayoutConfig.__dataclass_fields__}
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep: the overrides that make it, and its configuration."""

    overrides: tuple[str, ...]
    config: RunConfig


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Hydra's own command line; options and overrides may be mixed.

    Raises:
        UserError: for an unknown option.
    """
    parser = get_args_parser()

    def fail(message: str) -> NoReturn:
        raise UserError(message)

    parser.error = fail  # type: ignore[method-assign]
    parsed: Namespace = parser.parse_intermixed_args(arguments)
    return parsed


def add_config_dir(config_dir: str | None) -> list[str]:
    """Make a folder of the user's visible: its YAMLs to Hydra, its Python files to imports.

    Returns:
        The override that Hydra's compose needs for it.
    """
    if config_dir is None:
        return []
    folder = Path(config_dir).resolve()
    if not folder.is_dir():
        raise UserError(f"--config-dir={config_dir}: must be a folder")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    quoted = str(folder).replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"]


def compose_cells(overrides: Sequence[str], config_dir: str | None = None, multirun: bool = False) -> list[Cell]:
    """Every run that the overrides describe, in the sweeper's order; without ``multirun`` exactly one.

    Raises:
        UserError: for unknown keys, unknown choices, wrong types and values out of range.
    """
    register_schema()
    search = add_config_dir(config_dir)
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"), _one_line_errors([*search, *overrides]):
        if not multirun:
            return [Cell(tuple(overrides), _resolve([*search, *overrides]))]
        composed: dict[tuple[str, ...], DictConfig] = {}
        return [Cell(tuple(cell), _resolve([*search, *cell], composed)) for cell in _expand(overrides, search)]


def _resolve(overrides: Sequence[str], composed: dict[tuple[str, ...], DictConfig] | None = None) -> RunConfig:
    """The run that the overrides describe.

    Args:
        overrides: Hydra overrides.
        composed: configurations by the overrides that made them; a sweep's cells often differ by a number only, which
            needs no new composition.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    plain = [
        o
        for o in parsed
        if o.type is OverrideType.CHANGE
        and o.package is None
        and o.key_or_group in PLAIN_KEYS
        and not o.is_sweep_override()
    ]
    rest = tuple(str(o.input_line) for o in parsed if o not in plain)
    composed = {} if composed is None else composed
    if rest not in composed:
        composed[rest] = compose(CONFIG_NAME, overrides=list(rest))
    config = copy.deepcopy(composed[rest])
    for override in plain:
        try:
            OmegaConf.update(config, override.key_or_group, override.value())
        except OmegaConfBaseException as error:
            raise UserError(f"{override.input_line}: {_first_line(error)}") from error
    return RunConfig.from_hydra(config)


def _expand(overrides: Sequence[str], search: Sequence[str]) -> list[list[str]]:
    """The override lists of Hydra's basic sweeper, those of a figure's ``hydra.sweeper.params`` included."""
    # The loader knows the choices of a group, which glob(*) asks for.
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    parsed = parser.parse_overrides(list(overrides))
    fixed = [text for text, override in zip(overrides, parsed, strict=True) if not override.is_sweep_override()]
    base: DictConfig = compose(CONFIG_NAME, overrides=[*search, *fixed], return_hydra_config=True)
    swept = [f"{key}={value}" for key, value in (base.hydra.sweeper.params or {}).items()]
    batches = BasicSweeper.split_arguments(parser.parse_overrides([*swept, *overrides]), None)
    return [list(cell) for batch in batches for cell in batch]


@contextmanager
def _one_line_errors(overrides: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if error.options:
            raise unknown_choice(group or "config", name, error.options) from error
        raise UserError(_first_line(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(error, overrides) from error
    except ValueError as error:
        raise UserError(f"{' '.join(overrides)}: {_first_line(error)}") from error


def _translate(error: Exception, overrides: Sequence[str]) -> UserError:
    """Hydra's and OmegaConf's messages as one line that names the key."""
    text = f"{error}\n{error.__cause__ or ''}"
    if found := re.search(r"(?:Could not override|Error merging override) '?([^'\n]+?)'?\.?(?:\n|$)", text):
        key, _, value = found.group(1).partition("=")
        if "not in struct" in text or "Key '" in text:
            return _unknown_key(key, overrides)
        lines = [
            line.strip() for line in text.splitlines() if not re.search("full_key|object_type|Error merging", line)
        ]
        reason = next(filter(None, lines), "does not fit the configuration")
        return UserError(f"{key}={value}: {reason}" if value else f"{key}: {reason}")
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return UserError(f"{found.group(1)}: several values make a sweep: add --multirun")
    return UserError(_first_line(error))


def _unknown_key(key: str, overrides: Sequence[str]) -> UserError:
    """The error for a key that does not exist, with its siblings as choices."""
    parent, _, name = key.rpartition(".")
    siblings: Iterable[str] = ConfigSchema.__dataclass_fields__
    if parent:
        try:
            # Choices of groups and the search path; other values may be unknown as well.
            rest = [text for text in overrides if "." not in text.partition("=")[0] or text.startswith("hydra.")]
            node = OmegaConf.select(compose(CONFIG_NAME, overrides=rest), parent)
            siblings = [str(k) for k in node if k != "_target_"] if isinstance(node, DictConfig) else []
        except (HydraException, OmegaConfBaseException):
            siblings = []
    return unknown_choice(f"{parent}: key" if parent else "key", name, siblings)


def _first_line(error: Exception) -> str:
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {error.message.splitlines()[0]}"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
