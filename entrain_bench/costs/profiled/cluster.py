"""``cluster/device=profiled``: the cluster whose device, layer times and links a profile knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.costs.profiled.file import digest, read_profile
from entrain_bench.costs.profiled.fitting import fit_factors
from entrain_bench.costs.profiled.layers import MEDIAN
from entrain_bench.costs.profiled.points import STATISTICS, CollectivePoint, Constants, DeviceProfile
from entrain_bench.costs.profiled.times import ProfiledTimes
from entrain_bench.specs.cluster import ClusterSpec, DeviceSpec, Speed
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import FULL, ModelSpec
from entrain_bench.specs.parse import check_mapping, parse

LINK_KEYS = ("bandwidth_bytes_per_s", "latency_s")
# Layer times are measured: what a roofline would need beside the peaks is never asked for, and of no consequence.
UNUSED = {
    field.name: 1e-9 if field.name.endswith("_s") else 1.0
    for field in fields(DeviceSpec)
    if field.name not in {"name", "peak_dtype", *Constants.__dataclass_fields__}
}


@dataclass(frozen=True, slots=True)
class ProfiledDevice:
    """``cluster.device`` where it is a profile.

    Attributes:
        path: the profile's file.
        extrapolate: whether packs may lie outside what was measured.
        statistic: of the repetitions of each point, one of ``STATISTICS``.
        name: the device that it must be of; None for any.
    """

    path: str
    extrapolate: bool = False
    statistic: str = "median"
    name: str | None = None

    @classmethod
    def of(cls, cluster: Mapping[str, Any]) -> ProfiledDevice | None:
        """The profile that a cluster's configuration names, if it does."""
        device = cluster.get("device")
        if not isinstance(device, Mapping) or "path" not in device:
            return None
        found = parse(cls, device, "cluster.device")
        if found.statistic not in STATISTICS:
            raise unknown_choice("cluster.device.statistic", found.statistic, STATISTICS)
        return found

    @property
    def where(self) -> str:
        """What errors begin with."""
        return f"cluster.device.path={self.path}"

    def fingerprint(self) -> str:
        """SHA-256 of the file.

        Raises:
            UserError: for a file that cannot be read.
        """
        return digest(Path(self.path).expanduser(), self.where)

    def read(self) -> DeviceProfile:
        """The profile.

        Raises:
            UserError: for a file that is none, or of another device.
        """
        profile = read_profile(Path(self.path).expanduser(), self.where)
        if self.name is not None and profile.subject.device != self.name:
            raise UserError(f"{self.where}: is of {profile.subject.device}, not of cluster.device.name={self.name}")
        return profile.only(self.statistic)


def cluster_with_times(
    config: Mapping[str, Any], model: ModelSpec, framework: FrameworkOptions, speed: Speed
) -> tuple[ClusterSpec, ProfiledTimes | None]:
    """The cluster of a configuration with its constants multiplied, and its layer times where they are profiled.

    Raises:
        UserError: naming what is wrong in the configuration or the profile.
    """
    device = ProfiledDevice.of(config)
    if device is None:
        return ClusterSpec.from_config(config).at(speed), None
    if framework.freeze:
        raise UserError(f"freeze={[*framework.freeze]}: must be empty with a profiled device, which was timed learning")
    if framework.recompute_granularity != FULL:
        raise UserError(
            f"recompute_granularity={framework.recompute_granularity}: must be {FULL} with a profiled device, "
            "which was timed recomputing whole blocks"
        )
    for name in ("gemm", "attention", "memory"):
        require(getattr(speed, name) == 1.0, f"speed.{name}", getattr(speed, name), "1 with a profiled device")
    profile = device.read()
    cluster = ClusterSpec.from_config(filled(config, profile, device.where)).at(speed)
    return cluster, ProfiledTimes.of(profile, model, cluster, framework, device.where, device.extrapolate)


def filled(config: Mapping[str, Any], profile: DeviceProfile, where: str) -> dict[str, Any]:
    """A cluster's configuration with the profile's constants as its device, and as links that are left to it (null).

    Raises:
        UserError: for a link that the profile did not measure.
    """
    constants, sources = profile.constants, dict(check_mapping(config["sources"], "cluster.sources"))
    values = {name: getattr(constants, name) for name in constants.__dataclass_fields__ if name != "sources"}
    sources |= {f"device.{name}": constants.sources[name] for name in values}
    sources |= {f"device.{name}": "not used: layer times are measured" for name in UNUSED}
    tiers = []
    for tier in config["tiers"] if isinstance(config["tiers"], list) else []:
        open_keys = [key for key in LINK_KEYS if key in tier and tier[key] is None]
        measured = fitted_link(profile.collectives, f"{where}: cluster.tiers.{tier.get('name')}") if open_keys else {}
        tiers.append({**tier, **{key: measured[key] for key in open_keys}})
        sources |= {f"tiers.{tier.get('name')}.{key}": f"fitted to {where}" for key in open_keys}
    device = {"name": profile.subject.device, "peak_dtype": profile.subject.dtype, **values, **UNUSED}
    return {**config, "device": device, "sources": sources, "tiers": tiers or config["tiers"]}


def fitted_link(points: tuple[CollectivePoint, ...], where: str) -> dict[str, float]:
    """Bandwidth and latency with which the formulas of ``costs/links.py`` come closest to measured communication.

    Raises:
        UserError: if none was measured.
    """
    if not points:
        raise UserError(f"{where}: has no communication; entrain-bench profile ranks=[...] measures it")
    parts = np.array([link_parts(point) for point in points])
    latency_s, per_byte_s = fit_factors(parts, [point.seconds[MEDIAN] for point in points])
    # A cluster has positive ones.
    return {"bandwidth_bytes_per_s": 1.0 / max(float(per_byte_s), 1e-15), "latency_s": max(float(latency_s), 1e-12)}


def link_parts(point: CollectivePoint) -> tuple[float, float]:
    """Latencies one after the other, and bytes through a rank's link, by the formulas of ``costs/links.py``."""
    steps = point.ranks - 1
    if point.operation == "send":
        return 1.0, float(point.num_bytes)
    rounds = 2 if point.operation == "all_reduce" else 1
    return float(rounds * steps), rounds * point.num_bytes * steps / point.ranks
