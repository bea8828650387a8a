"""Layer times between the measured points of a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, sum_in_order, sum_rows
from entrain_bench.base.errors import UserError
from entrain_bench.costs.loads import Loads, busiest_area, count_labelled, most_labelled, packed
from entrain_bench.costs.profiled.fitting import fit_factors
from entrain_bench.costs.profiled.layers import (
    MEDIAN,
    Curve,
    GroupKey,
    LayerCurves,
    fit_curves,
    held_segments,
    num_segments,
    score_elements,
)
from entrain_bench.costs.profiled.timed_points import DeviceProfile
from entrain_bench.costs.roofline import (
    ATTENTION_BACKWARD,
    GEMM_BACKWARD,
    PassTimes,
    Roofline,
    remade_layers,
)
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import PACK, FrameworkOptions
from entrain_bench.specs.layer import Layer
from entrain_bench.specs.model import ModelSpec, ModuleSpec

FORWARD, BACKWARD, REMADE = range(3)


@dataclass(frozen=True, slots=True)
class ProfiledTimes:
    """Times of a model's layers, interpolated between the points of a device profile.

    A context-parallel degree that was not profiled takes the times of degree 1 for its rank's tokens, scores and
    segments, which leaves out what copies of gathered keys and values take. Communication follows from the cluster's
    links; only ``tp_overlap`` hides it, because a profile has no times of single matrix products.

    Attributes:
        roofline: of the cluster; prices communication.
        curves: by module, layer kind, tensor-parallel and context-parallel degree.
        step_s: fixed seconds of an optimizer step, and seconds per parameter.
        where: the profile's name in errors.
        extrapolate: whether a pack may be outside the measured range.
    """

    roofline: Roofline
    curves: Mapping[GroupKey, LayerCurves]
    step_s: tuple[float, float]
    where: str
    extrapolate: bool = False

    @classmethod
    def of(
        cls,
        profile: DeviceProfile,
        model: ModelSpec,
        cluster: ClusterSpec,
        framework: FrameworkOptions,
        where: str,
        extrapolate: bool = False,
    ) -> ProfiledTimes:
        """Layer times from a profile; ``UserError`` if it is unfinished, of another model, or lacks layers."""
        if not profile.finished:
            raise UserError(f"{where}: is not finished. To resume, run entrain-bench profile with the same options")
        sequences = profile.subject.sequence_parallel
        same = all(framework.of(module).sequence_parallel == sequences for module in model.modules)
        if not same and any(point.tp > 1 for point in profile.stages):
            raise UserError(
                f"{where}: was measured with sequence_parallel={str(sequences).lower()}. Set the same here, or profile "
                "the device again"
            )
        if (heads := profile.subject.head_tokens) != framework.head_tokens:
            raise UserError(f"{where}: was measured with head_tokens={heads}. Set the same here, or profile again")
        for module in model.modules:
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
    def beyond(self) -> ProfiledTimes:
        """The same curves, extrapolated outside the measured range."""
        return replace(self, extrapolate=True)

    def loads(
        self,
        module: ModuleSpec,
        lengths: IntArray,
        offsets: IntArray | None = None,
        labelled: IntArray | None = None,
    ) -> Loads:
        """Return tokens, attention scores and segments per chunk; without offsets each sequence is its own chunk."""
        areas = count_labelled(module, lengths, labelled)
        segments = dict[str, FloatArray]()
        for layer in module.kinds:
            if layer.attention:
                areas[layer.kind] = score_elements(layer.attention, lengths)
                segments[layer.kind] = num_segments(layer.attention, lengths)
        sequence_loads = Loads(np.asarray(lengths, np.float64), areas, segments)
        if offsets is not None:
            area, count = (
                {kind: sum_rows(offsets, values) for kind, values in by_kind.items()} for by_kind in (areas, segments)
            )
            sequence_loads = Loads(sum_rows(offsets, lengths), area, count)
        return packed(sequence_loads, module, lengths, offsets, self.roofline.framework, labelled)

    def layers_s(self, module: ModuleSpec, loads: Loads, tp: int, cp: int, split: bool = False) -> list[PassTimes]:
        """Return the seconds of one layer of each kind of the module, for each chunk; arrays of ``[chunks]``."""
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

    def stages_s(
        self,
        module: ModuleSpec,
        loads: Loads,
        counts: FloatArray,
        tp: int,
        cp: int,
        recompute: bool | FloatArray,
        split: bool = False,
    ) -> PassTimes:
        """Return the seconds of each chunk on each stage ``[chunks, stages]``; see ``LayerTimes``."""
        cp = self.roofline.framework.sequence_parts(module, cp)
        carried = {layer.kind: self._carried(module, layer, loads, tp, cp) for layer in module.kinds}
        whole = self._stages(module, loads, counts, tp, cp, recompute, lambda kind, curve: curve.at(*carried[kind]))
        if not split:
            return whole
        weight_s = np.zeros_like(whole.backward_s)
        for index, layer in enumerate(module.kinds):
            backward = self._curves(module, layer, tp, cp).layer[BACKWARD]
            kind_layers = carried[layer.kind]
            weight_s += (_weight_share(layer, *kind_layers[:2]) * backward.at(*kind_layers))[:, None] * counts[:, index]
        return replace(whole, backward_s=whole.backward_s - weight_s, weight_s=weight_s)

    def work_s(
        self, module: ModuleSpec, loads: Loads, counts: FloatArray, tp: int, cp: int, recompute: bool
    ) -> FloatArray:
        """Return the least seconds of a chunk's sequences on each stage, for any packing ``[chunks, stages]``.

        Every term of a curve is at least its lowest rate times its quantity. Communication is least in one pack.
        """
        cp = self.roofline.framework.sequence_parts(module, cp)
        carried = {layer.kind: _of_kind(layer, loads) for layer in module.kinds}

        def least(kind: str, curve: Curve) -> FloatArray:
            tokens, scores, segments = carried[kind]
            return curve.least(tokens / cp, scores / cp, segments / cp, self.extrapolate)

        return self._stages(module, loads, counts, tp, cp, recompute, least).total_s

    def knows(self, module: ModuleSpec, tp: int) -> bool:
        """Return whether every layer kind of the module was profiled at this tensor-parallel degree."""
        return all((module.name, layer.kind, tp, 1) in self.curves for layer in module.kinds)

    def gpu_s(self, module: ModuleSpec, loads: Loads, counts: FloatArray) -> FloatArray:
        """Return the least GPU-seconds of each stage for a chunk's sequences, at any degrees ``[chunks, stages]``.

        A shard may be faster than its share, because it may fit a cache that is too small for the whole layer.
        """
        degrees = sorted({key[2:] for key in self.curves if key[0] == module.name and self.knows(module, key[2])})
        group_s = [tp * cp * self.work_s(module, loads, counts, tp, cp, False) for tp, cp in degrees]
        return np.asarray(np.min(group_s, axis=0))

    def optimizer_s(self, parameters: FloatArray) -> FloatArray:
        """Return the seconds of an optimizer step for the parameters whose states a rank holds, in their shape."""
        fixed, per_parameter = self.step_s
        return np.where(parameters > 0, fixed + per_parameter * parameters, 0.0)

    def _stages(
        self,
        module: ModuleSpec,
        loads: Loads,
        counts: FloatArray,
        tp: int,
        cp: int,
        recompute: bool | FloatArray,
        seconds: Callable[[str, Curve], FloatArray],
    ) -> PassTimes:
        """Return times of stages; ``seconds(kind, curve)`` gives those of chunks, ``cp`` ranks split sequences."""
        roofline = self.roofline.of(module)
        totals = np.zeros((4, len(loads.tokens), len(counts)))
        blocks = [index for index, layer in enumerate(module.kinds) if layer.attention]
        remade = remade_layers(module, counts, recompute)
        for index, layer in enumerate(module.kinds):
            curves = self._curves(module, layer, tp, cp)
            ahead_s = seconds(layer.kind, curves.layer[FORWARD])
            # The forward of layers that are recomputed runs, and communicates, once more.
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
        """Tokens, scores and segments of chunks on a rank ``[chunks]``; ``UserError`` beyond what was measured."""
        tokens, scores, segments = _of_kind(layer, loads)
        if layer.attention:
            scores = busiest_area(layer, loads, cp)
            segments = held_segments(layer.attention, segments, cp, self.roofline.framework.cp_split == PACK)
        elif layer.labelled:
            scores = most_labelled(layer, loads, cp)
        tokens = np.ceil(tokens / cp)
        scores = scores / cp
        if not self.extrapolate:
            curves = self._curves(module, layer, tp, cp)
            least, most = curves.tokens
            outside = (tokens > 0) & ((tokens < least) | (tokens > most) | (scores > curves.scores))
            if outside.any():
                first = int(np.argmax(outside))
                what = f"{self.where}: {module.name} {layer.kind} at tp {tp}: {tokens[first]:.0f} tokens"
                covered = f"{least}..{most}"
                if least <= tokens[first] <= most:
                    what = f"{what} with {scores[first]:.4g} attention scores"
                    covered = f"0..{curves.scores:.4g}"
                fix = "Profile larger packs with entrain-bench profile, or set cluster.device.extrapolate=true"
                raise UserError(f"{what}; the profile covers {covered}. {fix}")
        return tokens, scores, segments


def _weight_share(layer: Layer, tokens: FloatArray, scores: FloatArray) -> FloatArray:
    """Return the share of a layer's backward FLOPs that computes weight gradients ``[chunks]``.

    A profile has one time for a backward. Backward products take twice their forward's FLOPs, half of them for weights;
    attention takes 2.5 times (``roofline``). The rest of the backward is divided in the same proportion.
    """
    if not layer.learns:
        return np.zeros_like(tokens)
    part = layer.labelled
    products = sum_in_order([gemm.flops(scores if part else tokens) for gemm in (part or layer).gemms], tokens)
    attention = 4.0 * layer.attention.query_width * scores if layer.attention else np.zeros_like(tokens)
    # Logits of labelled tokens are computed once more.
    total = (GEMM_BACKWARD + (part is not None)) * products + ATTENTION_BACKWARD * attention
    return np.divide(products, total, out=np.zeros_like(total), where=total > 0)


def _of_kind(layer: Layer, loads: Loads) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return tokens, scores and segments of chunks for one layer kind ``[chunks]``."""
    nothing = np.zeros_like(loads.tokens)
    return loads.tokens, loads.areas.get(layer.kind, nothing), loads.segments.get(layer.kind, nothing)
