"""Datasets of runs as MLflow knows them: name, digest and source of a workload's samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from entrain_bench.base.errors import UserError
from entrain_bench.config.instantiate import instantiate
from entrain_bench.config.targets import check_targets

# What MLflow calls sources that it cannot open itself.
SOURCE_TYPE = "code"
# What MLflow's stores have room for; a name that is longer is cut.
MAX_NAME = 500
DIGEST_LETTERS = 16


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset, with the fields of ``mlflow.entities.Dataset`` in its order.

    Attributes:
        digest: hash of the workload's configuration and of its files.
        source: the workload's configuration as JSON.
    """

    name: str
    digest: str
    source_type: str
    source: str


def dataset_of(workload: Mapping[str, Any], name: str) -> Dataset | None:
    """The dataset of a run by its workload's configuration; None if its files cannot be read now."""
    return _dataset(json.dumps(workload, sort_keys=True), name)


@lru_cache(maxsize=256)
def _dataset(source: str, name: str) -> Dataset | None:
    workload = json.loads(source)
    try:
        check_targets(workload, "workload")
        fingerprint = instantiate(workload, "workload", "source").fingerprint()
    except UserError:
        return None
    digest = hashlib.sha256(f"{source}\n{fingerprint}".encode()).hexdigest()[:DIGEST_LETTERS]
    return Dataset(name[:MAX_NAME], digest, SOURCE_TYPE, source)
