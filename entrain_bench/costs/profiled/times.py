"""Layer times between the points of a device profile, and ``cluster/device=profiled``: a cluster made of one."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, sum_in_order
from entrain_bench.base.errors import UserError, require
from entrain_bench.costs.layer_times import PassTimes, Stages
from entrain_bench.costs.loads import Loads, busiest_area, compute_loads
from entrain_bench.costs.profiled.file import CollectivePoint, Constants, DeviceProfile, digest, read_profile
from entrain_bench.costs.profiled.layers import (
    MEDIAN,
    Curve,
    GroupKey,
    LayerCurves,
    fit_curves,
    fit_factors,
    held_segments,
    num_segments,
    score_elements,
)
from entrain_bench.costs.roofline import ATTENTION_BACKWARD, GEMM_BACKWARD, Roofline
from entrain_bench.specs.cluster import ClusterSpec, DeviceSpec, Speed
from entrain_bench.specs.framework import BF16, PACK, FrameworkOptions, check_dense
from entrain_bench.specs.layer import Layer
from entrain_bench.specs.model import FULL, ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import UNFUSED
from entrain_bench.specs.parse import parse

FORWARD, BACKWARD, REMADE = range(3)
LINK_KEYS = ("bandwidth_bytes_per_s", "latency_s")
# Layer times are measured, so the roofline's other constants are never read.
UNUSED = {
    field.name: 1e-9 if field.name.endswith("_s") else 1.0
    for field in fields(DeviceSpec)
    if field.default is MISSING and field.name not in {"name", *Constants.__dataclass_fields__}
}


@dataclass(frozen=True, slots=True)
class ProfiledTimes:
    """Layer times between the points of a device profile; a missing CP degree takes degree 1 for a rank's share."""

    roofline: Roofline  # of the cluster; prices communication
    curves: Mapping[GroupKey, LayerCurves]
    step_s: tuple[float, float]  # fixed seconds of an optimizer step, and seconds per parameter
    where: str  # the profile's name in errors
    extrapolate: bool = False  # a pack may be outside the measured range

    @classmethod
    def of(
        cls,
        profile: DeviceProfile,
        model: ModelSpec,
        cluster: ClusterSpec,
        framework: FrameworkOptions,
        where: str,
        extrapolate: bool = False,
    ) -> "ProfiledTimes":
        """Layer times from a profile; ``UserError`` if it is unfinished, of another model, or lacks layers."""
        if not profile.finished:
            raise UserError(f"{where}: is not finished. To resume, run entrain-bench profile with the same options")
        sequences = profile.subject.sequence_parallel
        same = all(framework.of(module).sequence_parallel == sequences for module in model.modules)
        if not same and any(point.tp > 1 for point in profile.stages):
            setting = f"sequence_parallel={str(sequences).lower()}"
            raise UserError(f"{where}: was measured with {setting}. Set the same here, or profile the device again")
        for module in model.modules:
            check_dense(module, f"a device profile ({where})")
            profile.subject.check_module(module, where)
        curves = fit_curves(profile, model.modules)
        measured = {key[:2] for key in curves}
        for module in model.modules:
            for layer in module.kinds:
                if (module.name, layer.kind) not in measured:
                    missing = f"stages: has no layer {layer.kind} of module {module.name}"
                    raise UserError(f"{where}: {missing}. Profile the device again")
        if not profile.steps:
            raise UserError(f"{where}: steps: has no optimizer step. Profile the device again")
        parts = np.array([[1.0, point.parameters] for point in profile.steps])
        fixed, per_parameter = fit_factors(parts, [point.seconds[MEDIAN] for point in profile.steps])
        return cls(Roofline(cluster, framework), curves, (float(fixed), float(per_parameter)), where, extrapolate)

    @property
    def beyond(self) -> "ProfiledTimes":
        """The same curves, extrapolated outside the measured range."""
        return replace(self, extrapolate=True)

    def loads(self, module: ModuleSpec, lengths: IntArray, offsets: IntArray | None = None) -> Loads:
        """Return tokens, attention scores and segments per chunk; without offsets each sequence is its own chunk."""
        cp_split = self.roofline.framework.cp_split
        return compute_loads(module, lengths, offsets, cp_split, score_elements, num_segments)

    def layers_s(
        self,
        module: ModuleSpec,
        loads: Loads,
        tp: int,
        cp: int,
        split: bool = False,
        groups: IntArray | None = None,
    ) -> list[PassTimes]:
        """Return the seconds of one layer of each kind of the module, for each chunk; arrays of ``[chunks]``."""
        assert groups is None, "no layer with experts is measured"
        kinds = []
        roofline = self.roofline.of(module)
        cp = self.roofline.framework.sequence_parts(module, cp)
        for layer in module.kinds:
            curves = self._curves(module, layer, tp, cp)
            carried = self._carried(module, layer, loads, tp, cp)
            ahead, back = (curves.layer[name].at(*carried) for name in (FORWARD, BACKWARD))
            weight = back * _weight_share(layer, *carried[:2]) if split else None
            back = back if weight is None else back - weight
            comm, comm_back = roofline.comm_s(layer, loads.tokens, tp, cp, (ahead, back))
            kinds.append(PassTimes(ahead, comm, back, comm_back, weight))
        return kinds

    def stages_s(self, module: ModuleSpec, loads: Loads, stages: Stages, split: bool = False) -> PassTimes:
        """Return the seconds of each chunk on each stage ``[chunks, stages]``."""
        tp = stages.tp
        cp = self.roofline.framework.sequence_parts(module, stages.cp)
        carried = {layer.kind: self._carried(module, layer, loads, tp, cp) for layer in module.kinds}
        whole = self._stages(module, loads, stages, cp, lambda kind, curve: curve.at(*carried[kind]))
        if not split:
            return whole
        weight_s = np.zeros_like(whole.backward_s)
        for index, layer in enumerate(module.kinds):
            backward_s = self._curves(module, layer, tp, cp).layer[BACKWARD].at(*carried[layer.kind])
            share = _weight_share(layer, *carried[layer.kind][:2])
            weight_s += (share * backward_s)[:, None] * stages.counts[:, index]
        return replace(whole, backward_s=whole.backward_s - weight_s, weight_s=weight_s)

    def work_s(self, module: ModuleSpec, loads: Loads, stages: Stages) -> FloatArray:
        """Return the least seconds of a chunk's sequences on each stage, for any packing ``[chunks, stages]``."""
        cp = self.roofline.framework.sequence_parts(module, stages.cp)
        carried = dict[str, tuple[FloatArray, FloatArray, FloatArray]]()
        for layer in module.kinds:
            tokens, scores, segments = _of_kind(layer, loads)
            carried[layer.kind] = tokens / cp, scores / cp, segments / cp
        least = self.extrapolate
        return self._stages(module, loads, stages, cp, lambda kind, curve: curve.least(*carried[kind], least)).total_s

    def knows(self, module: ModuleSpec, tp: int) -> bool:
        """Return whether every layer kind of the module was profiled at this tensor-parallel degree."""
        return all((module.name, layer.kind, tp, 1) in self.curves for layer in module.kinds)

    def gpu_s(self, module: ModuleSpec, loads: Loads, counts: FloatArray) -> FloatArray:
        """Return the least GPU-seconds of each stage for a chunk's sequences, at any degrees ``[chunks, stages]``."""
        degrees = sorted({key[2:] for key in self.curves if key[0] == module.name and self.knows(module, key[2])})
        group_s = [tp * cp * self.work_s(module, loads, Stages(counts, tp, cp)) for tp, cp in degrees]
        return np.asarray(np.min(group_s, axis=0))

    def optimizer_s(self, parameters: FloatArray) -> FloatArray:
        """Return the seconds of an optimizer step for the parameters whose states a rank holds, in their shape."""
        fixed, per_parameter = self.step_s
        return np.where(parameters > 0, fixed + per_parameter * parameters, 0.0)

    def _stages(
        self, module: ModuleSpec, loads: Loads, stages: Stages, cp: int, seconds: Callable[[str, Curve], FloatArray]
    ) -> PassTimes:
        roofline = self.roofline.of(module)
        counts = stages.counts
        tp = stages.tp
        totals = np.zeros((4, len(loads.tokens), len(counts)))
        blocks = [index for index, layer in enumerate(module.kinds) if layer.attention]
        remade = stages.remade(module)
        for index, layer in enumerate(module.kinds):
            curves = self._curves(module, layer, tp, cp)
            ahead_s = seconds(layer.kind, curves.layer[FORWARD])
            # Recomputed layers repeat their forward with its communication.
            for again, number in enumerate((counts - remade, remade)):
                if not number[..., index].any():
                    continue
                back_s = seconds(layer.kind, curves.layer[REMADE if again else BACKWARD])
                comm, comm_back = roofline.comm_s(layer, loads.tokens, tp, cp, (ahead_s, back_s))
                for total, added in zip(totals, (ahead_s, comm, back_s, comm_back + again * comm), strict=True):
                    total += added[:, None] * number[..., index]
            if index == blocks[0]:
                held, again_held = ((number[..., blocks] > 0).any(axis=-1) for number in (counts, remade))
                totals[0] += seconds(layer.kind, curves.stage[FORWARD])[:, None] * held
                totals[2] += seconds(layer.kind, curves.stage[BACKWARD])[:, None] * (held & ~again_held)
                totals[2] += seconds(layer.kind, curves.stage[REMADE])[:, None] * again_held
        return PassTimes(*totals)

    def _curves(self, module: ModuleSpec, layer: Layer, tp: int, cp: int) -> LayerCurves:
        curves = self.curves.get((module.name, layer.kind, tp, cp)) or self.curves.get((module.name, layer.kind, tp, 1))
        if curves is None:
            degrees = sorted({key[2] for key in self.curves if key[:2] == (module.name, layer.kind)})
            raise UserError(
                f"{self.where}: {module.name} {layer.kind} was profiled at tp {', '.join(map(str, degrees))}, not at "
                f"{tp}. To add degrees, run entrain-bench profile tp=[...]"
            )
        return curves

    def _carried(
        self, module: ModuleSpec, layer: Layer, loads: Loads, tp: int, cp: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return tokens, scores and segments of a rank ``[chunks]``; ``UserError`` beyond the measured range."""
        tokens, scores, segments = _of_kind(layer, loads)
        if layer.attention:
            scores = busiest_area(layer, loads, cp)
            segments = held_segments(layer.attention, segments, cp, self.roofline.framework.cp_split == PACK)
        tokens = np.ceil(tokens / cp)
        scores = scores / cp
        if not self.extrapolate:
            curves = self._curves(module, layer, tp, cp)
            least, most = curves.tokens
            outside = (tokens > 0) & ((tokens < least) | (tokens > most) | (scores > curves.scores))
            if outside.any():
                first = int(np.argmax(outside))
                pack = f"{tokens[first]:.0f} tokens with {scores[first]:.4g} attention scores"
                covered = f"the profile covers {least}..{most} tokens with 0..{curves.scores:.4g}"
                fix = "Profile larger packs with entrain-bench profile, or set cluster.device.extrapolate=true"
                raise UserError(f"{self.where}: {module.name} {layer.kind} at tp {tp}: {pack}; {covered}. {fix}")
        return tokens, scores, segments


# Seconds of layers on one cluster; a longer or further sequence never makes a chunk faster.
type LayerTimes = Roofline | ProfiledTimes


def _weight_share(layer: Layer, tokens: FloatArray, scores: FloatArray) -> FloatArray:
    """Return the share of a layer's backward FLOPs that computes weight gradients ``[chunks]`` (as in ``roofline``)."""
    if not layer.learns:
        return np.zeros_like(tokens)
    products = sum_in_order([gemm.flops(tokens) for gemm in layer.gemms], tokens)
    attention = 4.0 * layer.attention.query_width * scores if layer.attention else np.zeros_like(tokens)
    total = GEMM_BACKWARD * products + ATTENTION_BACKWARD * attention
    return np.divide(products, total, out=np.zeros_like(total), where=total > 0)


def _of_kind(layer: Layer, loads: Loads) -> tuple[FloatArray, FloatArray, FloatArray]:
    nothing = np.zeros_like(loads.tokens)
    return loads.tokens, loads.areas.get(layer.kind, nothing), loads.segments.get(layer.kind, nothing)


@dataclass(frozen=True, slots=True)
class ProfiledDevice:
    """The configuration of a profiled ``cluster.device``."""

    path: str
    extrapolate: bool = False  # a pack may be outside the measured range

    @classmethod
    def of(cls, cluster: Mapping[str, Any]) -> "ProfiledDevice | None":
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
        """Read the profile; ``UserError`` if it is none."""
        return read_profile(Path(self.path).expanduser(), self.where)


def cluster_with_times(
    config: Mapping[str, Any], model: ModelSpec, framework: FrameworkOptions, speed: Speed
) -> tuple[ClusterSpec, ProfiledTimes | None]:
    """Return the cluster at ``speed``, and its profiled layer times if any; ``UserError`` names an invalid field."""
    device = ProfiledDevice.of(config)
    if device is None:
        cluster = ClusterSpec.from_config(config).at(speed)
        framework.check_device(cluster.device)
        return cluster, None
    measured = {"freeze": (), "attention_kernel": None, "recompute_granularity": FULL, "cross_entropy": UNFUSED}
    measured["precision"] = BF16
    for key, value in measured.items():
        stated = getattr(framework, key)
        shown = "null" if value is None else value or "[]"
        allowed = f"{shown} with cluster/device=profiled, because the profile was measured with it"
        require(stated == value, key, [*stated] if key == "freeze" else stated, allowed)
    require(framework.adapter.rank == 0, "adapter.rank", framework.adapter.rank, "0 with cluster/device=profiled")
    for name in ("gemm", "attention", "memory", "launch"):
        require(getattr(speed, name) == 1.0, f"speed.{name}", getattr(speed, name), "1 with cluster/device=profiled")
    profile = device.read()
    cluster = ClusterSpec.from_config(filled(config, profile, device.where)).at(speed)
    return cluster, ProfiledTimes.of(profile, model, cluster, framework, device.where, device.extrapolate)


def filled(config: Mapping[str, Any], profile: DeviceProfile, where: str) -> dict[str, Any]:
    """Return a cluster's configuration with the profile's device and links; ``UserError`` for unmeasured ones."""
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
