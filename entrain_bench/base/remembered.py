"""Cache of results by key."""

from collections.abc import Callable


def remembered[Key, Value](known: dict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """Return the value of a key, computed on first use; the ``most`` most recently used values are kept."""
    value = known.pop(key) if key in known else make()
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
    return value
