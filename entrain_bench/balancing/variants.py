"""Variants of a plan: values other than the layout that the tuner may change, one at a time."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import yaml

from entrain_bench.base.errors import require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import check_mapping, check_values

WHERE = "strategy.options"
# Parts whose options may vary; planners offer their own alternatives as candidates.
VARYING = ("assigner", "scheduler")


@dataclass(frozen=True, slots=True)
class Variant:
    """One value of a key that a plan may have."""

    key: str  # the key of the configuration; a plan has one value of it
    value: Any
    of: Callable[[Layout], Layout]  # returns a plan with this value


@dataclass(frozen=True, slots=True)
class Option:
    """An option of an assigner or scheduler, with the values that the tuner may choose."""

    part: str
    name: str
    values: tuple[Any, ...]  # the strategy's own first

    @property
    def key(self) -> str:
        """Its key in the configuration."""
        return f"strategy.{self.part}.{self.name}"

    def chosen(self, layout: Layout, value: Any) -> Layout:
        """Return the plan with a value of the option; the strategy's own value is not written down."""
        kept = [text for text in layout.options if text.partition("=")[0] != self.key]
        text = value if isinstance(value, str) else json.dumps(value)
        added = [] if value == self.values[0] else [f"{self.key}={text}"]
        return replace(layout, options=tuple(sorted([*kept, *added])))


def free_options(declared: Any, parts: Mapping[str, object]) -> Iterator[Option]:
    """Yield the options of a strategy's YAML (``options: {assigner: {carry: [false, true]}}``) that are free.

    An option whose value is not the first one is the user's, and stays. A part that replaces the strategy's own may
    lack an option. ``UserError`` names a part or value that is not allowed.
    """
    for part, named in check_mapping(declared, WHERE).items():
        require(part in VARYING, WHERE, part, f"one of {', '.join(VARYING)}")
        for name, values in check_mapping(named, f"{WHERE}.{part}").items():
            where = f"{WHERE}.{part}.{name}"
            listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
            require(listed, where, values, "a list of values, the strategy's own first")
            own = parts[part]
            if not is_dataclass(own) or name not in {field.name for field in fields(own)}:
                continue
            for value in values:
                check_values(type(own), {name: value}, f"{WHERE}.{part}")
            if len(values) > 1 and getattr(own, name) == values[0]:
                yield Option(part, name, tuple(values))


def with_options[Part](part: Part, name: str, texts: Sequence[str]) -> Part:
    """Return a part with its own overrides applied; ``UserError`` for a value that it does not allow."""
    prefix = f"strategy.{name}."
    pairs = (text.removeprefix(prefix).partition("=") for text in texts if text.startswith(prefix))
    values = {key: yaml.safe_load(value) for key, _, value in pairs}
    if not values:
        return part
    return replace(part, **check_values(type(part), values, f"strategy.{name}"))  # type: ignore[type-var]
