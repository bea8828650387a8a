"""Configurations as text, which ranks of tests are handed."""

from __future__ import annotations

import json

from entrain_bench.config.schema import ASIDE, RunConfig


def config_to_json(config: RunConfig) -> str:
    """A run's configuration for ranks."""
    return json.dumps(config.content() | {name: getattr(config, name) for name in ASIDE})


def config_from_json(text: str) -> RunConfig:
    """The configuration that ``config_to_json`` wrote."""
    return RunConfig.from_values(json.loads(text))
