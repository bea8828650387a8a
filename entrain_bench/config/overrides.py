"""Classify overrides: choose, set a plain key, or change a value inside a choice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType

from entrain_bench.base.errors import UserError
from entrain_bench.config.schema import ASIDE, GROUP_KEYS, NESTED
from entrain_bench.specs.framework import FrameworkOptions

# Keys that no choice of a group depends on: cells that differ in them alone share one composition.
PLAIN_KEYS = frozenset(
    {"seed", "iterations", "global_batch", "microbatch_size", "belief_error", "belief_bias", "action_noise"}
    | {"tuning", "tuning_budget", "planning_seed"}
    | {*FrameworkOptions.__dataclass_fields__, "constants", "memory_fraction", *ASIDE}
    | {f"{group}.{name}" for group, config in NESTED.items() for name in config.__dataclass_fields__}
)
# Characters of a file's name: a choice is looked for as one.
MAX_NAME = 250
OF_LAUNCHER = re.compile(r"hydra/launcher|hydra\.launcher(\.[^\W_]\w*)+")


@cache
def parse(text: str) -> Override:
    """One override of the command line, as Hydra understands it."""
    (override,) = OverridesParser.create().parse_overrides([text])
    return override


def is_plain(override: Override) -> bool:
    """Whether an override gives a plain key one value."""
    return _changes(override) and override.key_or_group in PLAIN_KEYS and not override.is_sweep_override()


@cache
def group_of(text: str) -> str:
    """The group that an override chooses in, or inside of; nothing for what is more than a choice."""
    override = parse(text)
    return re.split(r"[./]", override.key_or_group)[0] if _changes(override) else ""


def is_inside(override: Override) -> bool:
    """Whether an override gives one plain value to something inside of a choice."""
    plain = not override.is_sweep_override() and not isinstance(override.value(), dict | list)
    return _changes(override) and "." in override.key_or_group and plain


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse what Hydra's parser lets pass and its composition breaks over, and what would reach past the choices.

    Raises:
        UserError: for an override without a key, for choices of a group that are no names, and for keys of Hydra's
            other than a launcher's: they name places to search and classes to build.
    """
    for text in overrides:
        override = parse(text)
        group = override.key_or_group
        if not group:
            raise UserError(f"{text}: has no key. Write KEY=VALUE")
        if group.startswith("hydra") and not OF_LAUNCHER.fullmatch(group):
            raise UserError(
                f"{text}: is not supported. Of Hydra's keys only hydra/launcher and hydra.launcher.* are. To use a "
                "folder of YAML files, pass --config-dir"
            )
        if group not in GROUP_KEYS and "/" not in group:
            continue
        value = override.value()
        several = value.list if isinstance(value, ChoiceSweep) else value
        chosen = several if isinstance(several, list) else [several]
        names = isinstance(value, list) and value and all(isinstance(choice, str) for choice in value)
        if isinstance(value, list | dict) and not names:
            raise UserError(f"{text}: must be one of the choices of that group")
        if any(len(str(choice)) > MAX_NAME for choice in chosen):
            raise UserError(f"{group}: the name of a choice must have at most {MAX_NAME} characters")


def _changes(override: Override) -> bool:
    return override.type is OverrideType.CHANGE and override.package is None
