"""The configuration of ``entrain-bench profile``: a model, and the options of experiments/profile.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from entrain_bench.config.command_line import add_config_dir, in_tree, one_line_errors
from entrain_bench.config.schema import plain_values

CONFIG_NAME = "profile"


@dataclass
class ProfileSchema:
    """Keys and their types; values are in experiments/profile.yaml. Hydra rejects others and wrong types."""

    model: Any = MISSING
    tokens: list[int] = MISSING
    tp: list[int] | None = MISSING
    ranks: list[int] | None = MISSING
    message_bytes: list[int] = MISSING
    device: str = MISSING
    sequence_parallel: bool = MISSING
    dtype: str | None = MISSING
    threads: int = MISSING
    min_repetitions: int = MISSING
    max_repetitions: int = MISSING
    precision: float = MISSING
    point_s: float = MISSING
    peak_bf16_flops: float | None = MISSING
    memory_bytes: int | None = MISSING
    host_bandwidth_bytes_per_s: float | None = MISSING
    output: str | None = MISSING


def compose_profile(
    overrides: Sequence[str], config_dir: str | None = None
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The model, and all other options, as the overrides have them.

    Args:
        overrides: ``key=value``.
        config_dir: a folder of the user's with further models.

    Raises:
        UserError: for unknown keys, unknown models and wrong types.
    """
    ConfigStore.instance().store(name="profile_schema", node=ProfileSchema)
    search = add_config_dir(config_dir)
    with one_line_errors([*search, *overrides], CONFIG_NAME, ProfileSchema.__dataclass_fields__), in_tree():
        values = plain_values(hydra.compose(CONFIG_NAME, overrides=[*search, *overrides]))
    return values.pop("model"), values
