"""Runs of sweeps that were composed before: a large sweep composes thousands, at milliseconds each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from entrain_bench.base.store import Store
from entrain_bench.config.schema import GROUP_KEYS, RunConfig


class KnownRuns:
    """Configurations by their overrides; what runs have in common is stored, parsed and held once.

    Args:
        version: hash of what compositions depend on, besides overrides.
    """

    def __init__(self, version: str) -> None:
        self._version = version
        self._parts: dict[str, Any] = {}
        self._bases: dict[str, RunConfig] = {}

    @cached_property
    def _store(self) -> Store:
        return Store("runs", self._version)

    def get(self, overrides: Sequence[str]) -> RunConfig | None:
        """The run of overrides; None if it is not known."""
        names = self._store.get(["run", *overrides])
        if names is None:
            return None
        rest, *groups = names
        parts = dict(zip(GROUP_KEYS, map(self._part, groups), strict=True))
        if rest not in self._bases:
            self._bases[rest] = RunConfig.from_values({**self._part(rest), **parts})
        return replace(self._bases[rest], **parts)

    def put(self, overrides: Sequence[str], values: Mapping[str, Any]) -> None:
        """Keep the values of a run."""
        rest = {key: value for key, value in values.items() if key not in GROUP_KEYS}
        names = [self._named(part) for part in (rest, *(values[group] for group in GROUP_KEYS))]
        self._store.put(["run", *overrides], names)

    def save(self) -> None:
        """Write down what was kept, for the next process."""
        if "_store" in self.__dict__:
            self._store.save()

    def _named(self, part: Any) -> str:
        text = json.dumps(part)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        if name not in self._parts:
            self._parts[name] = part
            self._store.put(["part", name], part)
        return name

    def _part(self, name: str) -> Any:
        if name not in self._parts:
            self._parts[name] = self._store.get(["part", name])
        return self._parts[name]
