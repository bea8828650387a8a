"""A cache of the most recent values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Recent[V]:
    """As many values, and bytes of them, as fit, by key; the longest unused go first. It travels to processes empty."""

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._bytes: dict[Hashable, int] = {}

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key; make it if it is not cached."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        self.put(key, value)
        return value

    def find(self, key: Hashable) -> V | None:
        """Return the value of a key if it is cached."""
        return self._values.get(key)

    def put(self, key: Hashable, value: V, num_bytes: int = 0) -> None:
        """Keep a value, unless it alone has more bytes than fit."""
        self._values[key] = value
        self._bytes[key] = num_bytes
        self._values.move_to_end(key)
        while len(self._values) > self._most or self._too_large():
            gone, _ = self._values.popitem(last=False)
            del self._bytes[gone]

    def _too_large(self) -> bool:
        return self._most_bytes is not None and sum(self._bytes.values()) > self._most_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return (Recent, (self._most, self._most_bytes))
