"""Compose the choices of one group, which reads a fraction of the files of a whole run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from entrain_bench.config.command_line import in_tree
from entrain_bench.config.overrides import parse
from entrain_bench.config.schema import GROUP_KEYS, SCHEMA, plain_values


class Groups:
    """Composes groups, reading every YAML once.

    Args:
        search: the overrides that Hydra needs to find the user's folder.
    """

    def __init__(self, search: Sequence[str]) -> None:
        self._search = [*search]

    def part(self, group: str, overrides: Sequence[str]) -> Any:
        """A group's part of a configuration; None if it takes more than choices, or Hydra has to say what is wrong."""
        parsed = [parse(text) for text in overrides]
        chooses = all("." not in one.key_or_group and isinstance(one.value(), str) for one in parsed)
        if group not in GROUP_KEYS or not chooses:
            return None
        # The group itself is added: the schema alone has no choice that could be changed.
        added = [f"+{text}" if text.startswith(f"{group}=") else text for text in overrides]
        with suppress(HydraException, OmegaConfBaseException):
            values = self._composed(added)
            # Nothing but the group, or the choice reaches into others.
            if {**self._schema, group: values[group]} == values:
                return values[group]
        return None

    def _composed(self, overrides: Sequence[str]) -> dict[str, Any]:
        loader, files = self._loader
        parsed = OverridesParser.create().parse_overrides([*overrides])
        found = create_defaults_list(files, SCHEMA, parsed, prepend_hydra=False, skip_missing=False)
        return plain_values(loader._compose_config_from_defaults_list(found.defaults, files), resolve=False)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return self._composed([])

    @cached_property
    def _loader(self) -> tuple[ConfigLoaderImpl, CachingConfigRepository]:
        with in_tree():
            loader = GlobalHydra.instance().config_loader()
            assert isinstance(loader, ConfigLoaderImpl)
            return loader, loader._parse_overrides_and_create_caching_repo(SCHEMA, self._search)[1]
