"""Choices that no YAML states: ``model=hf:ORG/NAME`` or a path, ``cluster=16xh100``, and ``data=FILE``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.hub.files import is_reference, published_model
from entrain_bench.config.overrides import is_inside, parse
from entrain_bench.config.schema import RunConfig

MODEL = "model"
CLUSTER = "cluster"
# The workload of a shape trace, in one word.
DATA = "data"
TRACE = "trace"
# 16xh100 or 8xa100-80g, and the same as the choices of a cluster are called: h100x16.
COUNTED = re.compile(r"(\d+)x([a-z]+\d+)((?:-\w+)*)")
NAMED = re.compile(r"([a-z]+\d+)((?:-\w+)*)x(\d+)")
# Choices that others of a device are made of: one node of eight GPUs.
NODE = "x8"
# Words behind a device's name, of which its memory must be right.
WORDS = frozenset({"sxm", "sxm4", "sxm5"})
MEMORY = re.compile(r"(\d+)gb?")
MEMORY_GB = {"a100": 80, "a40": 48, "h100": 80, "h20": 96, "h200": 141, "h800": 80}
SIMULATED = "entrain_bench.simulate.Simulator"


@dataclass(frozen=True, slots=True)
class Given:
    """Models and clusters that replace what Hydra composes.

    Attributes:
        model: a published model; None for a choice of the configuration.
        num_gpus: of the cluster; None for as many as its choice has.
        changes: overrides inside of these groups.
    """

    model: Mapping[str, Any] | None
    num_gpus: int | None
    changes: tuple[Override, ...]

    def put_into(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace groups of a run by the given model and cluster, and apply their changes.

        Raises:
            UserError: for a number of GPUs that makes no whole nodes, and for changes of keys that are not there.
        """
        found = dict(values)
        if self.model is not None:
            found[MODEL] = self.model
        if self.num_gpus is not None:
            found[CLUSTER] = resized(found[CLUSTER], self.num_gpus)
        for change in self.changes:
            try:
                found = with_value(found, change.key_or_group.split("."), change.value())
            except KeyError as error:
                group = change.key_or_group.partition(".")[0]
                raise UserError(
                    f"{change.input_line}: {group}={found[group]['name']} has no such key, or it holds several values"
                ) from error
        return found

    def checked(self, config: RunConfig) -> RunConfig:
        """The run itself; ``UserError`` if it trains a model that is only simulated."""
        if self.model is not None and config.harness["_target_"] != SIMULATED:
            raise UserError(
                f"model={self.model['name']}: can only be simulated. Use harness=simulate, or a model of "
                "experiments/model"
            )
        return config


def given_of(overrides: Sequence[str], folders: Sequence[Path]) -> tuple[tuple[str, ...], Given]:
    """Split overrides into those that YAML files answer, and models and clusters that they do not.

    Args:
        overrides: of one run.
        folders: configuration trees, whose clusters others are made of.

    Raises:
        UserError: for a model that cannot be read or mapped, and for changes that a given group cannot take.
    """
    chosen = {key: text for text in overrides if (key := text.partition("=")[0]) in (MODEL, CLUSTER)}
    model = None
    num_gpus = None
    base = None
    if MODEL in chosen and is_reference(name := _chosen(chosen[MODEL])):
        model = published_model(str(name))
    if CLUSTER in chosen and (counted := _counted(_chosen(chosen[CLUSTER]))):
        base, num_gpus = _base(chosen[CLUSTER], *counted, folders)
    replaced = {MODEL: model is not None, CLUSTER: num_gpus is not None}
    rest: list[str] = []
    changes: list[Override] = []
    for text in overrides:
        override = parse(text)
        group = re.split(r"[./@]", override.key_or_group)[0]
        if text == chosen.get(MODEL) and model is not None:
            continue
        if text == chosen.get(CLUSTER) and base is not None:
            rest.append(f"{CLUSTER}={base}")
        elif replaced.get(group) and is_inside(override):
            changes.append(override)
        elif group == MODEL and model is not None:
            raise UserError(f"{text}: is not supported with {chosen[MODEL]}. Set single values, such as model.name=x")
        else:
            rest.append(text)
    return tuple(rest), Given(model, num_gpus, tuple(changes))


def with_data(overrides: Sequence[str]) -> tuple[str, ...]:
    """Replace ``data=FILE`` by ``workload=trace workload.path=FILE``.

    Raises:
        UserError: for a second workload, and for a file whose name does not end with .parquet.
    """
    found: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key != DATA:
            found.append(text)
            continue
        if other := next((one for one in overrides if one.startswith(("workload=", "workload.path="))), None):
            raise UserError(f"{text}: means workload=trace workload.path={value}. Leave {other} out")
        if not all(name.strip("'\"[] ").endswith(".parquet") for name in value.split(",")):
            scan = "entrain-bench trace source=NAME source.path=FILE output=mine.parquet"
            raise UserError(f"{text}: must be a shape trace (a Parquet file). To make one of a dataset, run `{scan}`")
        found += [f"workload={TRACE}", f"workload.path={value}"]
    return tuple(found)


def resized(cluster: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """A cluster of as many GPUs: whole nodes of its kind, or a part of one.

    Raises:
        UserError: for a number that is more than a node and no multiple of it.
    """
    width = int(cluster["gpus_per_node"])
    name = f"{re.sub(r'x[0-9]+$', '', str(cluster['name']))}x{num_gpus}"
    allowed = f"from 1 to {width} GPUs, or a multiple of {width}, which a node has"
    fits = 1 <= num_gpus < width or (num_gpus > 0 and num_gpus % width == 0)
    require(fits, CLUSTER, f"{num_gpus}x{name.partition('x')[0]}", allowed)
    if num_gpus >= width:
        return {**cluster, "name": name, "num_nodes": num_gpus // width}
    inner = cluster["tiers"][:-1]
    outermost = cluster["tiers"][-1]
    # Links inside a node as far as there are GPUs to join; a tier that joins no more than the one before is left out.
    tiers: list[dict[str, Any]] = []
    for tier in inner:
        size = min(int(tier["num_ranks"]), num_gpus)
        if size > max((int(other["num_ranks"]) for other in tiers), default=1):
            tiers.append({**tier, "num_ranks": size})
    return {**cluster, "name": name, "num_nodes": 1, "gpus_per_node": num_gpus, "tiers": [*tiers, outermost]}


def with_value(node: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    """A mapping with one of its values exchanged; ``KeyError`` if there is no such value."""
    first, *rest = path
    if not isinstance(node, Mapping) or isinstance(old := node[first], list) or (not rest and isinstance(old, Mapping)):
        raise KeyError(first)
    return {**node, first: with_value(old, rest, value) if rest else value}


def _chosen(text: str) -> Any:
    """The value of an override that chooses; None of one that does more."""
    override = parse(text)
    plain = override.type is OverrideType.CHANGE and override.package is None and not override.is_sweep_override()
    return override.value() if plain else None


def _counted(name: Any) -> tuple[int, str, str] | None:
    """Number of GPUs, device and words behind it, of a name that states them; None of any other."""
    if found := COUNTED.fullmatch(str(name)):
        return int(found[1]), found[2], found[3]
    if found := NAMED.fullmatch(str(name)):
        return int(found[3]), found[1], found[2]
    return None


def _base(text: str, count: int, device: str, words: str, folders: Sequence[Path]) -> tuple[str | None, int | None]:
    """The choice that a cluster is made of, and how many GPUs it then has; neither if there is no such device."""

    def has(name: str) -> bool:
        return any((folder / CLUSTER / f"{name}.yaml").is_file() for folder in folders)

    for word in filter(None, words.split("-")):
        memory = MEMORY.fullmatch(word)
        fits = int(memory[1]) == MEMORY_GB.get(device) if memory else word in WORDS
        if not fits:
            raise UserError(f"{text}: {device} has no variant {word}. Leave it out, or use --config-dir with a YAML")
    if has(f"{device}x{count}"):
        return f"{device}x{count}", None
    if not has(f"{device}{NODE}"):
        return None, None
    return f"{device}{NODE}", count
