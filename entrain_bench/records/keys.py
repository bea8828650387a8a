"""The key of a run: a hash of everything that decides its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from entrain_bench.config.constants import speed_of
from entrain_bench.config.schema import GROUP_KEYS, RunConfig
from entrain_bench.config.targets import COSMETIC, instantiate
from entrain_bench.costs.profiled.times import ProfiledDevice
from entrain_bench.records.code import code_version, planning_version
from entrain_bench.specs.workload import Workload

# Keys that say nothing about the result.
# Records of before 2026-12 have ``within_megatron``.
COSMETIC_KEYS = frozenset(
    {"label", "display_order", "family", "in_figures", "source", "sources", "switch_on", "contends", "within_megatron"}
)
# The option by which planners name a file that they read; its content is part of the key.
PLAN_FILE = "path"
# Keys that are used after planning only: a plan belongs to a job, not to a seed.
BEYOND_PLANS = frozenset({"iterations", "harness", "seed", "action_noise", "slow_rank", "slow_rank_factor", "on_oom"})


def identify(config: RunConfig, fingerprints: dict[str, list[str]] | None = None) -> tuple[str, str]:
    """Key of a run (configuration, workload data, device profile, code) and the code version in it.

    ``fingerprints`` keeps those of the files behind equal groups, which a sweep reads and hashes once.
    """
    content = _content(config)
    groups = [json.dumps(content.pop(group), sort_keys=True) for group in GROUP_KEYS]
    decisive = [_group(text) for text in groups]
    version = code_version(frozenset[str]().union(*(targets for _, targets in decisive)))
    files = "\n".join(groups)
    known = {} if fingerprints is None else fingerprints
    if files not in known:
        known[files] = _data(config)
    rest = json.dumps([content, known[files], version], sort_keys=True)
    text = "\n".join([rest, *(text for text, _ in decisive)])
    return hashlib.sha256(text.encode()).hexdigest()[:16], version


@lru_cache(maxsize=256)
def _group(text: str) -> tuple[str, frozenset[str]]:
    """Return the decisive values of a group's JSON, and the targets of the group."""
    node = json.loads(text)
    return json.dumps(_decisive(node), sort_keys=True), frozenset(targets_of(node))


def plan_key(config: RunConfig) -> str:
    """Return the key of all values that a planner can see: runs that differ elsewhere have the same plan."""
    content = {name: value for name, value in _content(config).items() if name not in BEYOND_PLANS}
    content["strategy"] = {name: config.strategy[name] for name in ("planner", "assigner", "scheduler")}
    content["strategy"]["options"] = config.strategy.get("options", {})
    version = planning_version(frozenset(targets_of([content["strategy"], content["workload"]])))
    text = json.dumps([_decisive(content), *_data(config), version], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(config: RunConfig) -> dict[str, Any]:
    """All keys that decide the result; a draw of constants with its factors, which are in a file."""
    drawn = {"constants": [config.constants, asdict(speed_of(config))]} if config.constants else {}
    return config.content() | drawn


def _data(config: RunConfig) -> list[str]:
    """Fingerprints of the files behind a run: its workload's, its device's if profiled, its plan's if that is given."""
    device = ProfiledDevice.of(config.cluster)
    found = [workload_of(config).fingerprint(), *([device.fingerprint()] if device else [])]
    if PLAN_FILE in config.strategy["planner"]:
        planner = instantiate(config.strategy["planner"], "strategy.planner", "plan")
        found += [planner.fingerprint()] if hasattr(planner, "fingerprint") else []
    return found


def workload_of(config: RunConfig) -> Workload:
    """The workload of a run; cells that differ elsewhere share it."""
    return _workload(json.dumps(config.workload, sort_keys=True))


@lru_cache(maxsize=64)
def _workload(node: str) -> Workload:
    workload: Workload = instantiate(json.loads(node), "workload", "source")
    return workload


def _decisive(node: Any) -> Any:
    if isinstance(node, Mapping):
        # The values of a class decide, not its name.
        cosmetic = {COSMETIC} if "_target_" in node else COSMETIC_KEYS
        return {key: _decisive(value) for key, value in node.items() if key not in cosmetic}
    return [_decisive(value) for value in node] if isinstance(node, list) else node


def targets_of(node: Any) -> Iterable[str]:
    """Every ``_target_`` in a configuration."""
    if isinstance(node, Mapping):
        yield from (str(value) for key, value in node.items() if key == "_target_")
        node = [value for key, value in node.items() if key != "_target_"]
    if isinstance(node, list):
        for value in node:
            yield from targets_of(value)
