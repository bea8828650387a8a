"""Choices that no YAML states: clusters by their number of GPUs (``cluster=16xh100``), and ``data=FILE``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.tree import config_tree

MODEL = "model"
CLUSTER = "cluster"
# The workload of a shape trace, in one word.
DATA = "data"
TRACE = "trace"
# 16xh100 or 8xa100-80g, and the same as the choices of a cluster are called: h100x16.
COUNTED = re.compile(r"(?P<count>\d+)x(?P<device>[a-z]+\d+)(?P<words>(?:-\w+)*)")
NAMED = re.compile(r"(?P<device>[a-z]+\d+)(?P<words>(?:-\w+)*)x(?P<count>\d+)")
# Choices that others of a device are made of: one node of eight GPUs.
NODE = "x8"
# Words behind a device's name, of which its memory must be right.
WORDS = frozenset({"sxm", "sxm4", "sxm5"})
MEMORY = re.compile(r"(\d+)gb?")
MEMORY_GB = {"a100": 80, "a40": 48, "h100": 80, "h20": 96, "h200": 141, "h800": 80}


def cluster_values(name: str, tree: Path) -> dict[str, Any] | None:
    """Return the YAML of a cluster that is named by its device and its number of GPUs, such as ``16xh100``.

    None if the tree has a YAML of this name, or none of this device.

    Raises:
        UserError: for an unknown variant of a device, and a number of GPUs that makes no whole nodes.
    """
    match = COUNTED.fullmatch(name) or NAMED.fullmatch(name)
    if not match or (tree / CLUSTER / f"{name}.yaml").is_file():
        return None
    device = match["device"]
    count = int(match["count"])
    same, node = (tree / CLUSTER / f"{device}{size}.yaml" for size in (f"x{count}", NODE))
    if not same.is_file() and not node.is_file():
        return None
    for word in filter(None, match["words"].split("-")):
        memory = MEMORY.fullmatch(word)
        if not (int(memory[1]) == MEMORY_GB.get(device) if memory else word in WORDS):
            where = f"{CLUSTER}={name}: {device} has no variant {word}"
            raise UserError(f"{where}. Leave it out, or use --config-dir with a YAML")
    if same.is_file():
        return {"defaults": [same.stem]}
    return {"defaults": [node.stem, "_self_"], **resized(_node_values(node), count)}


def resized(cluster: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """Return what differs in a cluster of as many GPUs: whole nodes or a part of one; ``UserError`` for others."""
    width = int(cluster["gpus_per_node"])
    name = f"{re.sub(r'x[0-9]+$', '', str(cluster['name']))}x{num_gpus}"
    allowed = f"from 1 to {width} GPUs, or a multiple of {width}, which a node has"
    fits = 1 <= num_gpus < width or (num_gpus > 0 and num_gpus % width == 0)
    require(fits, CLUSTER, f"{num_gpus}x{name.partition('x')[0]}", allowed)
    if num_gpus >= width:
        return {"name": name, "num_nodes": num_gpus // width}
    inner = cluster["tiers"][:-1]
    outermost = cluster["tiers"][-1]
    # Links inside a node as far as there are GPUs to join; a tier that joins no more than the one before is left out.
    tiers: list[dict[str, Any]] = []
    for tier in inner:
        size = min(int(tier["num_ranks"]), num_gpus)
        if size > max((int(other["num_ranks"]) for other in tiers), default=1):
            tiers.append({**tier, "num_ranks": size})
    return {"name": name, "num_nodes": 1, "gpus_per_node": num_gpus, "tiers": [*tiers, outermost]}


def with_data(overrides: Sequence[str]) -> tuple[str, ...]:
    """Replace ``data=FILE.parquet`` by ``workload=trace workload.path=FILE``; ``UserError`` for a second workload."""
    replaced: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key != DATA:
            replaced.append(text)
            continue
        if other := next((one for one in overrides if one.startswith(("workload=", "workload.path="))), None):
            raise UserError(f"{text}: means workload=trace workload.path={value}. Leave {other} out")
        if not all(name.strip("'\"[] ").endswith(".parquet") for name in value.split(",")):
            scan = "entrain-bench trace source=NAME source.path=FILE output=mine.parquet"
            raise UserError(f"{text}: must be a shape trace (a Parquet file). To make one of a dataset, run `{scan}`")
        replaced += [f"workload={TRACE}", f"workload.path={value}"]
    return tuple(replaced)


def _node_values(file: Path) -> dict[str, Any]:
    """Return the values of a cluster's YAML, and those of the kind of node that it names."""
    values: dict[str, Any] = yaml.safe_load(file.read_text())
    for entry in values.get("defaults", ()):
        for folder in (file.parents[1], config_tree()) if isinstance(entry, dict) and "node" in entry else ():
            kind = folder / CLUSTER / "node" / f"{entry['node']}.yaml"
            if kind.is_file():
                return {**yaml.safe_load(kind.read_text()), **values}
    return values
