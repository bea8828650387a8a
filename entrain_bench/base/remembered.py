"""Results that are kept by what they were made of."""

from collections.abc import Callable


def remembered[Key, Value](known: dict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """The value of a key, made if it is not known; the ``most`` values that were asked for last are kept."""
    value = known.pop(key) if key in known else make()
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
    return value
