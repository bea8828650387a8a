"""Cells: the runs of a sweep with their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.keys import identify


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep.

    Attributes:
        overrides, config: the overrides as given, and the resulting configuration.
        key: hash of configuration, data and code; ``code_version``: of the code alone.
        config_dir: the user's folder of choices, as given; empty for none.
        timeline: whether an output needs its timeline.
    """

    overrides: tuple[str, ...]
    config: RunConfig
    key: str
    code_version: str
    config_dir: str = ""
    timeline: bool = True

    @classmethod
    def composed(cls, overrides: Sequence[str], composer: Composer) -> Cell:
        """The cell that overrides describe; ``UserError`` for bad ones, and for data that cannot be read."""
        return cls.of(overrides, composer.run(overrides), composer.config_dir or "", composer.fingerprints)

    @classmethod
    def of(
        cls,
        overrides: Sequence[str],
        config: RunConfig,
        config_dir: str = "",
        fingerprints: dict[str, list[str]] | None = None,
    ) -> Cell:
        """The cell of a configuration, its last argument as in ``identify``; ``UserError`` for unreadable data."""
        try:
            return cls(tuple(overrides), config, *identify(config, fingerprints), config_dir)
        except UserError as error:
            raise UserError(f"{error} (in {' '.join(overrides) or 'defaults'})") from error
