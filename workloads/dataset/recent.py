"""What was made most recently, kept for who asks again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Recent[V]:
    """As many values as fit, by key; those that were not asked for longest go first.

    To other processes it travels empty.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not at hand."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        self.put(key, value)
        return value

    def find(self, key: Hashable) -> V | None:
        """The value of a key, if it is at hand."""
        return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Keep a value."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._most:
            self._values.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Recent, (self._most,))
