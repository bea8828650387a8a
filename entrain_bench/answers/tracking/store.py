"""What logging needs of a place for runs: the store in the results folder, or a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from entrain_bench.answers.tracking.entries import CONFIGURATION_TAG, DIGEST_TAG, KEY_TAG, Entry
from entrain_bench.answers.tracking.page import CURRENT_TAG

# What ``Logged`` holds besides the identifier, in its order.
LOGGED_TAGS = (KEY_TAG, DIGEST_TAG, CONFIGURATION_TAG, CURRENT_TAG)


@dataclass(frozen=True, slots=True)
class Logged:
    """A run that a store has, by the tags that it was logged with; its digest is empty if it was not logged whole."""

    run_id: str
    key: str
    digest: str
    configuration: str
    current: str


class Store(Protocol):
    """A place for runs."""

    def experiment(self, name: str) -> str:
        """Identifier of an experiment, made if it is not there."""
        ...

    def runs(self, experiment: str) -> list[Logged]:
        """The runs that an experiment has."""
        ...

    def add(self, experiment: str, entries: Sequence[Entry], tags: Mapping[str, str]) -> list[str]:
        """Log runs with further tags; returns their identifiers."""
        ...

    def remove(self, run_ids: Sequence[str]) -> None:
        """Take runs away."""
        ...

    def set_tags(self, run_ids: Sequence[str], tags: Mapping[str, str]) -> None:
        """Set tags of runs."""
        ...

    def describe(self, experiment: str, tags: Mapping[str, str]) -> None:
        """Set tags of an experiment."""
        ...
