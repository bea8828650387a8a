"""Options of planners, assigners and schedulers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from entrain_bench.base.errors import require, unknown_choice


def check_least(part: Any, where: str, least: int, *names: str) -> None:
    """Refuse options of a part, a dataclass at ``where``, below a number; None only if it is their default."""
    defaults = {option.name: option.default for option in fields(part)}
    for name in names:
        value = getattr(part, name)
        optional = defaults[name] is None
        fits = optional if value is None else value >= least
        require(fits, f"{where}.{name}", value, f"{'null or ' * optional}at least {least}")


def check_choices(part: Any, where: str, **choices: Iterable[str]) -> None:
    """Refuse options of a part that are not among their choices."""
    for name, known in choices.items():
        if getattr(part, name) not in known:
            raise unknown_choice(f"{where}.{name}", getattr(part, name), known)
