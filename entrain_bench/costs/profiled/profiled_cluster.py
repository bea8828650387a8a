"""``cluster/device=profiled``: a cluster whose device, layer times and links come from a device profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from entrain_bench.base.errors import UserError, require
from entrain_bench.costs.profiled.file import digest, read_profile
from entrain_bench.costs.profiled.fitting import fit_factors
from entrain_bench.costs.profiled.layers import MEDIAN
from entrain_bench.costs.profiled.timed_points import STATISTICS, CollectivePoint, Constants, DeviceProfile
from entrain_bench.costs.profiled.times import ProfiledTimes
from entrain_bench.specs.cluster import ClusterSpec, DeviceSpec, Speed
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import FULL, ModelSpec
from entrain_bench.specs.module_layers import UNFUSED
from entrain_bench.specs.parse import OneOf, parse

LINK_KEYS = ("bandwidth_bytes_per_s", "latency_s")
# Layer times are measured, so the roofline's other constants are never read.
UNUSED = {
    field.name: 1e-9 if field.name.endswith("_s") else 1.0
    for field in fields(DeviceSpec)
    if field.default is MISSING and field.name not in {"name", *Constants.__dataclass_fields__}
}


@dataclass(frozen=True, slots=True)
class ProfiledDevice:
    """The configuration of a profiled ``cluster.device``.

    Attributes:
        path: the profile's file.
        extrapolate: whether a pack may be outside the measured range.
        statistic: which statistic of a point's repetitions to use.
        name: the device that the profile must describe; None for any.
    """

    path: str
    extrapolate: bool = False
    statistic: Annotated[str, OneOf(STATISTICS)] = "median"
    name: str | None = None

    @classmethod
    def of(cls, cluster: Mapping[str, Any]) -> ProfiledDevice | None:
        """Return the profile that a cluster's configuration names; None if it names none."""
        device = cluster.get("device")
        if not isinstance(device, Mapping) or "path" not in device:
            return None
        return parse(cls, device, "cluster.device")

    @property
    def where(self) -> str:
        """The beginning of every error."""
        return f"cluster.device.path={self.path}"

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file; ``UserError`` if the file cannot be read."""
        return digest(Path(self.path).expanduser(), self.where)

    def read(self) -> DeviceProfile:
        """Read the profile, reduced to ``statistic``; ``UserError`` if it is none, or describes another device."""
        profile = read_profile(Path(self.path).expanduser(), self.where)
        if self.name is not None and profile.subject.device != self.name:
            stated = f"cluster.device.name={self.name}"
            raise UserError(f"{self.where}: describes device {profile.subject.device}, not {stated}")
        return profile.only(self.statistic)


def cluster_with_times(
    config: Mapping[str, Any], model: ModelSpec, framework: FrameworkOptions, speed: Speed
) -> tuple[ClusterSpec, ProfiledTimes | None]:
    """Return the cluster with its constants multiplied by ``speed``, and its profiled layer times if there are any.

    ``UserError`` names a field of the configuration or the profile that is invalid.
    """
    device = ProfiledDevice.of(config)
    if device is None:
        cluster = ClusterSpec.from_config(config).at(speed)
        framework.check_device(cluster.device)
        return cluster, None
    if framework.freeze:
        why = "not supported with cluster/device=profiled, because the profile was measured with trainable layers"
        raise UserError(f"freeze={[*framework.freeze]}: {why}. Set freeze=[]")
    if framework.attention_kernel is not None:
        raise UserError(
            f"attention_kernel={framework.attention_kernel}: not supported with cluster/device=profiled, because the "
            "profile has the kernels that it was measured with. Leave out attention_kernel"
        )
    for key, measured in (("recompute_granularity", FULL), ("cross_entropy", UNFUSED)):
        allowed = f"{measured} with cluster/device=profiled, because the profile was measured with it"
        require(getattr(framework, key) == measured, key, getattr(framework, key), allowed)
    for name in ("gemm", "attention", "memory", "launch"):
        require(getattr(speed, name) == 1.0, f"speed.{name}", getattr(speed, name), "1 with cluster/device=profiled")
    profile = device.read()
    cluster = ClusterSpec.from_config(filled(config, profile, device.where)).at(speed)
    return cluster, ProfiledTimes.of(profile, model, cluster, framework, device.where, device.extrapolate)


def filled(config: Mapping[str, Any], profile: DeviceProfile, where: str) -> dict[str, Any]:
    """Return a cluster's configuration with the profile's device, and its links where they are null.

    ``UserError`` if the profile did not measure them.
    """
    constants = profile.constants
    values = {name: getattr(constants, name) for name in constants.__dataclass_fields__ if name != "sources"}
    tiers = []
    for tier in config["tiers"] if isinstance(config["tiers"], list) else []:
        open_keys = [key for key in LINK_KEYS if key in tier and tier[key] is None]
        measured = fitted_link(profile.collectives, f"{where}: cluster.tiers.{tier.get('name')}") if open_keys else {}
        tiers.append({**tier, **{key: measured[key] for key in open_keys}})
    device = {"name": profile.subject.device, "peak_dtype": profile.subject.dtype, **values, **UNUSED}
    return {**config, "device": device, "tiers": tiers or config["tiers"]}


def fitted_link(points: tuple[CollectivePoint, ...], where: str) -> dict[str, float]:
    """Fit bandwidth (bytes/s) and latency (s) of ``costs/links.py``; ``UserError`` if nothing was measured."""
    if not points:
        raise UserError(f"{where}: communication was not measured. Run entrain-bench profile ranks=[...]")
    parts = np.array([link_parts(point) for point in points])
    latency_s, per_byte_s = fit_factors(parts, [point.seconds[MEDIAN] for point in points])
    # A cluster has positive ones.
    return {"bandwidth_bytes_per_s": 1.0 / max(float(per_byte_s), 1e-15), "latency_s": max(float(latency_s), 1e-12)}


def link_parts(point: CollectivePoint) -> tuple[float, float]:
    """Return the number of sequential latencies and the bytes through a rank's link (``costs/links.py``)."""
    steps = point.ranks - 1
    if point.operation == "send":
        return 1.0, float(point.num_bytes)
    rounds = 2 if point.operation == "all_reduce" else 1
    return float(rounds * steps), rounds * point.num_bytes * steps / point.ranks
