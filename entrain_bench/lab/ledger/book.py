"""Settings that all rows of a source share, and models by name (``experiments/ledger.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.tree import config_tree
from entrain_bench.lab.ledger.options import LedgerOptions
from entrain_bench.lab.ledger.rows import COLUMNS, LedgerRow
from entrain_bench.specs.cluster import DeviceSpec
from entrain_bench.specs.module_layers import ModuleConfig
from entrain_bench.specs.parse import check_mapping, check_values, parse

# What is said of tables that are not in the book: users' own measurements.
OWN = "own"


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose name has one of ``words``: what of their architecture widths do not say.

    Attributes:
        words: in lower case.
        skip: why no model of the family is predicted; empty if they are.
        model: fields of ``ModuleConfig``.
        causal: whether attention is masked.
        outputs: numbers that the head makes of a token; 0 for a vocabulary's.
        dropout: whether scores and both results of a block are dropped, by kernels of their own.
    """

    words: tuple[str, ...]
    skip: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = True
    outputs: int = 0
    dropout: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that a source's type of GPU may be: device and node of a cluster choice, with other constants.

    Attributes:
        cluster: the choice.
        bandwidth: bytes per second of tiers, by name.
        device: fields of ``DeviceSpec``.
        tiers: names of the tiers inside a node, if not all.
        gpus_per_node: None: the choice's.
    """

    cluster: str
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()
    gpus_per_node: int | None = None

    def __hash__(self) -> int:
        return hash((self.cluster, *self.bandwidth.items(), *self.device.items(), self.tiers, self.gpus_per_node))


@dataclass(frozen=True, slots=True)
class Source:
    """The settings that all rows of a table share.

    Attributes:
        name: in tables and figures.
        devices: machines that a type of GPU may be, by a pattern of the text in ``gpu_type``.
        framework: fields of ``LedgerOptions``.
        pipelined: likewise, of runs with a pipeline alone.
        given: values for empty columns.
        open: what an empty column may be.
        releases: what rows of a release have instead, by how its name begins.
    """

    name: str
    devices: Mapping[str, Any]
    framework: Mapping[str, Any]
    pipelined: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    open: Mapping[str, Any] = field(default_factory=dict)
    releases: Mapping[str, Any] = field(default_factory=dict)

    def machines(self, gpu_type: str) -> tuple[Machine, ...]:
        """The machines of a type of GPU: those of the first pattern that it matches; none if it matches none."""
        listed = next((each for pattern, each in self.devices.items() if fnmatchcase(gpu_type, pattern)), ())
        return tuple(parse(Machine, machine, gpu_type) for machine in listed)

    def of(self, release: str) -> Source:
        """Return the settings that rows of a release share."""
        changes: dict[str, Any] = next((each for start, each in self.releases.items() if release.startswith(start)), {})
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Book:
    """How rows become jobs; ``products``: devices by the types of GPU of published products."""

    families: tuple[Family, ...]
    sources: Mapping[str, Source]
    products: Mapping[str, str]

    def source(self, row: LedgerRow) -> Source:
        """Return the settings of a row's table and release; of an unknown table, those of users' own tables."""
        return self.sources.get(row.source, self.sources[OWN]).of(row.release)

    def family(self, model: str) -> Family | None:
        """The first family with a word in a model's name; None if there is none."""
        name = model.lower()
        return next((each for each in self.families if any(word in name for word in each.words)), None)

    def name(self, source: str) -> str:
        """Return the display name of a table."""
        return self.sources[source].name if source in self.sources else source

    @property
    def tables(self) -> tuple[Path, ...]:
        """The committed tables."""
        return tuple(config_tree() / "ledger" / f"{name}.csv" for name in self.sources if name != OWN)


def load_book(path: Path | None = None) -> Book:
    """The committed book, or that of a file; ``UserError`` names the file and what is wrong."""
    path = path or config_tree() / "ledger.yaml"
    values = check_mapping(yaml.safe_load(path.read_text()), path.name)
    families = tuple(_family(each, f"{path.name}: families") for each in values["families"])
    sources = {name: _source(each, f"{path.name}: {name}") for name, each in values["sources"].items()}
    return Book(families, sources, check_mapping(values["products"], f"{path.name}: products"))


def _family(values: Any, where: str) -> Family:
    family = parse(Family, values, where)
    check_values(ModuleConfig, family.model, f"{where}: {', '.join(family.words)}")
    return family


def _source(values: Any, where: str) -> Source:
    source = parse(Source, values, where)
    known = {field.name for field in fields(Source)} - {"releases", "name"}
    for start, changes in source.releases.items():
        for name in check_mapping(changes, f"{where}.releases.{start}"):
            require(name in known, f"{where}.releases.{start}", name, f"of {', '.join(sorted(known))}")
    for each in (source, *(source.of(start) for start in source.releases)):
        for name in ("framework", "pipelined"):
            check_values(LedgerOptions, getattr(each, name), f"{where}.{name}")
        for name in ("given", "open"):
            for column in getattr(each, name):
                require(column in COLUMNS, f"{where}.{name}", column, "a column")
        for gpu, machines in each.devices.items():
            if not isinstance(machines, list):
                raise UserError(f"{where}.devices.{gpu}={machines}: must be a list of clusters")
            for machine in machines:
                check_values(DeviceSpec, parse(Machine, machine, f"{where}.devices.{gpu}").device, f"{where}.{gpu}")
    return source
