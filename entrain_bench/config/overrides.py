"""What single overrides do: choose, give a plain key a value, or change a value inside of a choice."""

from __future__ import annotations

import re
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType

from entrain_bench.config.schema import ASIDE, NESTED
from entrain_bench.specs.framework import FrameworkOptions

# Keys that no choice of a group depends on: cells that differ in them alone share one composition.
PLAIN_KEYS = frozenset(
    {"seed", "iterations", "global_batch", "microbatch_size", "belief_error", "belief_bias", "action_noise"}
    | {*FrameworkOptions.__dataclass_fields__, "memory_fraction", *ASIDE}
    | {f"{group}.{name}" for group, config in NESTED.items() for name in config.__dataclass_fields__}
)


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


def _changes(override: Override) -> bool:
    return override.type is OverrideType.CHANGE and override.package is None
