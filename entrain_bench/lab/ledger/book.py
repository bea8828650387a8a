"""What all rows of a source have in common, and what models' names say (``experiments/ledger.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.tree import config_tree
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.parse import check_mapping, check_values, parse

# Columns that a source may fill (``given``) or leave open between values (``open``).
# What is said of tables that are not in the book: users' own measurements.
OWN = "own"
BOUNDED = ("sequence_parallel", "microbatch_size", "vpp", "recompute", "zero_stage", "dtype", "dp", "cp")


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose name has one of ``words``: what of their architecture widths do not say.

    Attributes:
        words: in lower case.
        skip: why no model of the family is predicted; empty if they are.
        model: fields of ``ModuleConfig``.
        causal: whether attention is masked.
        outputs: numbers that the head makes of a token; 0 for a vocabulary's.
    """

    words: tuple[str, ...]
    skip: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = True
    outputs: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster that a source's type of GPU may stand for: a choice of ``cluster``, with other bandwidths by tier."""

    cluster: str
    bandwidth: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """What all rows of a table have in common.

    Attributes:
        name: in tables and figures.
        devices: machines that a type of GPU may stand for, by the text in ``gpu_type``.
        framework: fields of ``FrameworkOptions``.
        pipelined: likewise, of runs with a pipeline alone.
        given: values for empty columns.
        open: what an empty column may be.
    """

    name: str
    devices: Mapping[str, Any]
    framework: Mapping[str, Any]
    pipelined: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    open: Mapping[str, Any] = field(default_factory=dict)

    def machines(self, gpu_type: str) -> tuple[Machine, ...]:
        """The machines of a type of GPU; none if it is not known."""
        return tuple(parse(Machine, machine, gpu_type) for machine in self.devices.get(gpu_type, ()))


@dataclass(frozen=True, slots=True)
class Book:
    """How rows become jobs."""

    families: tuple[Family, ...]
    sources: Mapping[str, Source]

    def source(self, name: str) -> Source:
        """What is known of a table's rows; of a table that is not in the book what is said of users' own."""
        return self.sources.get(name, self.sources[OWN])

    def family(self, model: str) -> Family | None:
        """The first family with a word in a model's name; None if there is none."""
        name = model.lower()
        return next((each for each in self.families if any(word in name for word in each.words)), None)


def load_book(path: Path | None = None) -> Book:
    """The committed book, or that of a file; ``UserError`` names the file and what is wrong."""
    path = path or config_tree() / "ledger.yaml"
    values = check_mapping(yaml.safe_load(path.read_text()), path.name)
    families = tuple(parse(Family, each, f"{path.name}: families") for each in values["families"])
    return Book(families, {name: _source(each, f"{path.name}: {name}") for name, each in values["sources"].items()})


def _source(values: Any, where: str) -> Source:
    source = parse(Source, values, where)
    for name in ("framework", "pipelined"):
        check_values(FrameworkOptions, getattr(source, name), f"{where}.{name}")
    for name in ("given", "open"):
        for column in getattr(source, name):
            require(column in BOUNDED, f"{where}.{name}", column, f"of {', '.join(BOUNDED)}")
    for gpu, machines in source.devices.items():
        if not isinstance(machines, list):
            raise UserError(f"{where}.devices.{gpu}={machines}: must be a list of clusters")
        source.machines(gpu)
    return source
