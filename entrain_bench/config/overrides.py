"""One override of the command line: Hydra's parse, and the kind of its change."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.base.errors import UserError, unknown_key
from entrain_bench.config.schema import GROUP_KEYS

# Characters of a file's name: a choice is looked for as one.
MAX_NAME = 250


@cache
def parse(text: str) -> Override:
    """One override as Hydra reads it; ``UserError`` for a text that is none, and for choices that are no names."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text])
        value = override.value()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(error_line(error, text)) from error
    group = override.key_or_group
    if not group:
        raise UserError(f"{text}: has no key. Write KEY=VALUE")
    if override.type is not OverrideType.DEL and (group in GROUP_KEYS or "/" in group):
        _check_names(text, group, value)
    return override


def is_inside(override: Override) -> bool:
    """Return whether an override replaces one value inside of a choice."""
    changes = override.type is OverrideType.CHANGE and override.package is None and not override.is_sweep_override()
    return changes and "." in override.key_or_group and not isinstance(override.value(), dict)


def top_of(override: Override) -> str:
    """Return the top-level key that an override changes, or changes something inside of."""
    return override.key_or_group.replace("/", ".").partition(".")[0]


def with_value(node: Any, override: Override, done: int = 0) -> Any:
    """Return nested values with an override applied; ``UserError`` names the keys if its key does not exist."""
    path = override.key_or_group.split(".")
    if done == len(path):
        return override.value()
    key: Any = path[done]
    if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
        key = int(key)
    elif not isinstance(node, Mapping) or key not in node:
        names = [str(name) for name in node if name != "_target_"] if isinstance(node, Mapping) else []
        prefix = ".".join(path[:done])
        raise unknown_key(str(override.input_line), [f"{prefix}.{name}" for name in names])
    copied: Any = [*node] if isinstance(node, list) else dict(node)
    copied[key] = with_value(node[key], override, done + 1)
    return copied


def swept_keys(overrides: Sequence[str]) -> dict[str, bool]:
    """Return the keys of overrides, and whether each has several values; ``UserError`` for a key given twice."""
    several: dict[str, bool] = {}
    for text in overrides:
        override = parse(text)
        if override.key_or_group in several:
            raise UserError(f"{text}: {override.key_or_group} must be given once")
        several[override.key_or_group] = override.is_sweep_override()
    return several


def error_line(error: Exception, text: str = "") -> str:
    """Return one line on an error of Hydra or OmegaConf: the text that caused it, and the first line that says why."""
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {error.message.splitlines()[0]}"
    reasons = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    reason = reasons[0] if reasons else type(error).__name__
    return f"{text}: {reason}" if text else reason


def _check_names(text: str, group: str, value: Any) -> None:
    several = value.list if isinstance(value, ChoiceSweep) else value
    names = several if isinstance(several, list) else [several]
    listed = isinstance(value, list) and value and all(isinstance(name, str) for name in value)
    if isinstance(value, dict | list) and not listed:
        raise UserError(f"{text}: must be one of the choices of that group")
    if any(len(str(name)) > MAX_NAME for name in names):
        raise UserError(f"{group}: the name of a choice must have at most {MAX_NAME} characters")
