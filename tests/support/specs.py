"""Models and clusters of the configuration, as their tests read and change them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from entrain_bench.config.compose import compose
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.tokens import TokenRules


def load(group: str, name: str) -> dict[str, Any]:
    return copy.deepcopy(composed(group, name))


@cache
def composed(group: str, name: str) -> dict[str, Any]:
    section: dict[str, Any] = getattr(compose(f"{group}={name}"), group)
    return section


@cache
def model(name: str) -> ModelSpec:
    return ModelSpec.from_config(load("model", name))


def rules_of(name: str) -> TokenRules:
    """Token rules as a YAML of ``experiments/model/tokens`` has them."""
    return ModelSpec.from_config(compose("model=qwen25vl_llama3_1b", f"model/tokens={name}").model).tokens


@cache
def cluster(name: str) -> ClusterSpec:
    return ClusterSpec.from_config(load("cluster", name))


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, last = path.split("/")
    node: Any = config
    for key in parents:
        node = node[int(key) if isinstance(node, list) else key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return config
