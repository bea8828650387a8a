"""Measured layers and estimated units as strategies see them; estimation errors and their correction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, Self
from zlib import crc32

import numpy as np

from entrain_bench.base.arithmetic import GOLDEN, fit_polynomial, log2, matmul, mix, sine_of_turns, solve, uniform
from entrain_bench.base.arrays import FloatArray, IntArray, freeze, offsets_from_counts
from entrain_bench.base.errors import require
from entrain_bench.costs.layer_times import PassTimes
from entrain_bench.costs.links import name_of_exchange
from entrain_bench.costs.sharding import LayerTraffic, layer_traffic
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.job import MAX_SAMPLES
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.parse import Count, Share, at_least
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import ShapeSource

MODULE_CLASSES = 128  # half octaves of length that a module may have; more than any sequence length needs
# Weight of a class's last ratio, relative to an average class's data. It decides for indistinguishable classes.
RIDGE = 0.01


@dataclass(frozen=True, slots=True)
class Observation:
    """One module's executed microbatches."""

    classes: IntArray  # shape classes present ``[classes]``
    predicted_s: FloatArray  # uncorrected seconds of each class on a stage ``[microbatches, classes]``
    actual_s: FloatArray  # executed time on a stage ``[microbatches]``
    num_replicas: int | IntArray  # that they are spread over, or groups of the width of each ``[microbatches]``


@dataclass(frozen=True, slots=True)
class Corrector:
    """DFLOP's adaptive correction of estimates (arXiv:2603.25120); ``learn`` returns the next state.

    Attributes:
        tolerance: relative deviation below which a shape class gets no penalty.
        window: iterations I over which benefit and cost are compared.
        cost_s: seconds that tracking costs an iteration (measured on 512 samples, x86-64, 2026-11: 3.2 ms).
        smoothing: weight of a new observation in a class's running ratio of actual to predicted time.
        active: whether observations are still tracked.
        ratios: running actual / predicted time of each shape class, 1 on average over all work.
        benefits_s: reduction of |time error| by the penalties in past iterations, at most ``window`` of them.
    """

    tolerance: Annotated[float, at_least(0)] = 0.05
    window: Count = 8
    cost_s: Annotated[float, at_least(0)] = 3e-3
    smoothing: Share = 0.5
    active: bool = True
    ratios: Mapping[int, float] = field(default_factory=dict)
    benefits_s: tuple[float, ...] = ()

    def learn(self, seen: Sequence[Observation], ridge: float = RIDGE) -> Self:
        """Learn from one iteration; switch off, without penalties, if the benefit over the window is below the cost."""
        actual = np.concatenate([one.actual_s for one in seen])
        plain = np.concatenate([one.predicted_s.sum(axis=1) for one in seen])
        corrected = np.concatenate([matmul(one.predicted_s, self.penalties(one.classes)) for one in seen])
        if not self.active or min(plain.sum(), actual.sum()) <= 0:
            return self
        share = np.concatenate([np.full(len(one.actual_s), 1 / one.num_replicas) for one in seen])
        scale = plain.sum() / actual.sum()
        benefit_s = (share * (_error(actual, plain) - _error(actual, corrected))).sum()
        benefits = (*self.benefits_s, float(benefit_s))[-self.window :]
        if len(benefits) == self.window and sum(benefits) / self.window < self.cost_s:
            return replace(self, active=False, benefits_s=benefits)
        ratios = dict(self.ratios)
        for one in seen:
            ratios |= self._fit(one, scale, ridge)
        return replace(self, ratios=ratios, benefits_s=benefits)

    def penalties(self, classes: IntArray) -> FloatArray:
        """Factor on the predicted time of each class: its running ratio; 1 within the tolerance or if switched off."""
        ratio = self._ratio(classes)
        return np.where(self.active & (np.abs(ratio - 1.0) > self.tolerance), ratio, 1.0)

    def _ratio(self, classes: IntArray) -> FloatArray:
        distinct, position = np.unique(classes, return_inverse=True)
        return np.array([self.ratios.get(int(one), 1.0) for one in distinct])[position]

    def _fit(self, one: Observation, scale: float, ridge: float) -> dict[int, float]:
        """Next ratios of a module: least squares of its microbatches' times, drawn towards the last ratios."""
        if not one.predicted_s.any():
            return {}
        ratio = self._ratio(one.classes)
        normal = matmul(one.predicted_s.T, one.predicted_s)
        pull = ridge * np.trace(normal) / len(normal) * np.eye(len(normal))
        rest = matmul(one.predicted_s.T, one.actual_s * scale - matmul(one.predicted_s, ratio))
        fitted = ratio + self.smoothing * solve(normal + pull, rest)
        # Noise must not make a duration negative.
        return dict(zip(one.classes.tolist(), np.maximum(fitted, 0.1).tolist(), strict=True))


def shape_classes(lengths: IntArray, module: int) -> IntArray:
    """Class of each sequence: its module's index and the half octave of its length."""
    # Twice the logarithm is that of the square, whose exponent counts from 1/2.
    _, exponent = np.frexp(np.maximum(lengths, 1).astype(np.float64) ** 2)
    return np.asarray(MODULE_CLASSES * module + exponent.astype(np.int64) - 1)


def _error(actual_s: FloatArray, predicted_s: FloatArray) -> FloatArray:
    """|time error| of each microbatch once both sum to the same, in seconds of the actual times."""
    return np.abs(actual_s - predicted_s * (actual_s.sum() / predicted_s.sum()))


# Sequence lengths at which layers are profiled (arXiv:2605.27918, section 4.1).
PROFILED_TOKENS = np.array([64, 256, 1024, 4096, 16384])
# Lengths of the sequences in the measured packs: 16 tokens to 188,000, a quarter more each time.
LENGTHS = np.unique([round(16 * 1.25**step) for step in range(43)])
PACK_TOKENS = 8192  # tokens of a measured pack, at least; twice as many in the other pack of the same sequences


@dataclass(frozen=True, slots=True)
class PackTimes:
    """Seconds of a layer of each kind, communication included: of forwards, backwards and, if split, weight passes."""

    added_s: FloatArray  # by one sequence of each of ``LENGTHS`` ``[passes, lengths, kinds]``
    chunk_s: FloatArray  # by any chunk, independent of its sequences ``[passes, kinds]``
    least_s: FloatArray  # that a chunk takes ``[passes, kinds]``

    def of(self, lengths: IntArray) -> FloatArray:
        """Return the seconds that sequences of the given lengths add to a pack ``[passes, sequences, kinds]``."""
        known = LENGTHS.astype(np.float64)
        at = np.asarray(lengths, np.float64)
        right = np.clip(np.searchsorted(known, at), 1, len(known) - 1)
        left_s = self.added_s[:, right - 1]
        right_s = self.added_s[:, right]
        share = ((at - known[right - 1]) / (known[right] - known[right - 1]))[:, None]
        weight_left = np.where(at < known[0], 1.0, at / known[right - 1])[:, None]
        weight_right = np.where(at < known[0], 1.0, at / known[right])[:, None]
        return np.asarray(np.maximum((1.0 - share) * weight_left * left_s + share * weight_right * right_s, 0.0))


def probes() -> tuple[IntArray, IntArray]:
    """Lengths and offsets of the packs to measure: of one token, then two of every length."""
    count = -(-PACK_TOKENS // LENGTHS)
    counts = np.append(1, np.stack([count, 2 * count], axis=1))
    return np.repeat(np.append(1, np.repeat(LENGTHS, 2)), counts), offsets_from_counts(counts)


def pack_times(measured: Sequence[PassTimes]) -> PackTimes:
    """Split the times of packs (``probes``): seconds of sequences, the mean rest of all lengths, and the least."""
    count = -(-PACK_TOKENS // LENGTHS)[:, None]
    forward = [kind.forward_s + kind.forward_comm_s for kind in measured]
    backward = [kind.backward_s + kind.backward_comm_s for kind in measured]
    weight = [kind.weight_s for kind in measured if kind.weight_s is not None]
    passes = np.stack([np.stack(column, axis=1) for column in (forward, backward, weight) if column])
    once = passes[:, 1::2]
    twice = passes[:, 2::2]
    added = (twice - once) / count
    return PackTimes(added, np.maximum((once - count * added).mean(axis=1), 0.0), passes[:, 0])


MEAN_SAMPLES = 256  # samples that the mean microbatch is computed from; its passes hide a part of the step


class MeanUnits(NamedTuple):
    """Units of a module in a mean sample, and their mean length in tokens."""

    per_sample: float
    length: float


@dataclass(slots=True, eq=False)
class ProfiledSamples:
    """Samples of the workload for planners, separate from the training stream."""

    _source: ShapeSource
    _seed: int
    _rng: np.random.Generator = field(init=False)
    _means: dict[str, MeanUnits] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([self._seed, 0x70726F66])

    def draw(self, num_samples: int) -> SampleShapes:
        """Draw independent samples; every call draws new ones; ``UserError`` for more than ``MAX_SAMPLES``."""
        require(num_samples <= MAX_SAMPLES, "strategy: profiled samples", num_samples, f"at most {MAX_SAMPLES}")
        return self._source.draw(num_samples, self._rng)

    def tuning_batches(self, count: int, global_batch: int) -> tuple[SampleShapes, ...]:
        """Return the first global batches of a separate stream, equal for all strategies and after any draws."""
        rng = np.random.default_rng([self._seed, 0x74756E65])
        return tuple(self._source.draw(global_batch, rng) for _ in range(count))

    @property
    def state(self) -> Mapping[str, Any]:
        """State of the random draws, for ``restore``."""
        return self._rng.bit_generator.state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the random draws from an earlier ``state``."""
        self._rng.bit_generator.state = state

    def mean_units(self, module: ModuleSpec) -> MeanUnits:
        """Return the units of a module in a mean sample; draws do not change it."""
        if module.name not in self._means:
            samples = self._source.draw(MEAN_SAMPLES, np.random.default_rng([self._seed, 0x6D65616E]))
            lengths = module.lengths(samples, module.units(samples))
            mean = float(lengths.mean()) if len(lengths) else 0.0
            self._means[module.name] = MeanUnits(len(lengths) / len(samples), mean)
        return self._means[module.name]


@dataclass(slots=True, eq=False)
class LayerProfile:
    """Measured layers; each measurement and each fit is made once.

    ``groups`` are the ranks of expert-parallel groups, if any; measured ranks of a group have equally many tokens.
    """

    _truth: CostTruth
    _samples: ProfiledSamples
    _fits: dict[tuple[object, ...], FloatArray] = field(init=False, default_factory=dict)
    _passes: dict[tuple[object, ...], tuple[FloatArray, FloatArray]] = field(init=False, default_factory=dict)
    _packs: dict[tuple[object, ...], PackTimes] = field(init=False, default_factory=dict)
    # Seconds that steps add to average microbatches, by layout (``ProgramTimes.step_s``).
    steps_s: dict[tuple[object, ...], float] = field(init=False, default_factory=dict)

    def name_of(self, groups: IntArray | None) -> tuple[object, ...]:
        """Return the part of a key that identifies how ranks of expert-parallel groups are linked; empty without."""
        return name_of_exchange(groups, self._truth.cluster)

    def measure(
        self, module: ModuleSpec, lengths: IntArray, tp: int, cp: int, groups: IntArray | None = None
    ) -> list[PassTimes]:
        """Return measured times of one layer of each kind on one packed microbatch with sequences of these lengths."""
        return self.measure_packs(module, lengths, np.array([0, len(lengths)]), tp, cp, groups=groups)

    def layer_s(self, module: ModuleSpec, lengths: IntArray, tp: int, cp: int) -> FloatArray:
        """Return measured forward and backward seconds of every layer on one packed microbatch ``[layers]``."""
        kind_s = np.array([float(times.total_s[0]) for times in self.measure(module, lengths, tp, cp)])
        return kind_s[module.layer_kind]

    def measure_packs(
        self,
        module: ModuleSpec,
        lengths: IntArray,
        offsets: IntArray,
        tp: int,
        cp: int,
        split: bool = False,
        groups: IntArray | None = None,
    ) -> list[PassTimes]:
        """Return ``measure`` for several packs of CSR rows, each ``[microbatches]``; ``split``: with weight passes."""
        times = self._truth.layer_times
        return times.layers_s(module, times.loads(module, np.asarray(lengths), offsets), tp, cp, split, groups)

    def forward_fit(self, module: ModuleSpec, tp: int, cp: int, groups: IntArray | None = None) -> FloatArray:
        """Coefficients of ``a x^2 + b x + c``, seconds of a forward of each layer kind ``[kinds, 3]``."""
        key = (module.name, tp, cp, *self.name_of(groups))
        if key not in self._fits:
            measured = [self.measure(module, np.array([tokens]), tp, cp, groups) for tokens in PROFILED_TOKENS]
            forward = np.array([[(kind.forward_s + kind.forward_comm_s)[0] for kind in kinds] for kinds in measured])
            self._fits[key] = np.stack([fit_polynomial(PROFILED_TOKENS, times, 2) for times in forward.T])
        return self._fits[key]

    def pack_times(
        self, module: ModuleSpec, tp: int, cp: int, split: bool = False, groups: IntArray | None = None
    ) -> PackTimes:
        """Return seconds that sequences add to a packed chunk, and a chunk's own; ``split``: with weight passes."""
        key = (module.name, tp, cp, split, *self.name_of(groups))
        if key not in self._packs:
            lengths, offsets = probes()
            self._packs[key] = pack_times(self.measure_packs(module, lengths, offsets, tp, cp, split, groups))
        return self._packs[key]

    def traffic(self, module: ModuleSpec, placed: ModuleLayout) -> LayerTraffic:
        """Return measured times of the collectives of each layer with sharded weights."""
        return layer_traffic(module, placed, self._truth.cluster, self._truth.memory.gradient_bytes)

    def mean_microbatch_s(
        self, module: ModuleSpec, placed: ModuleLayout, global_batch: int, num_microbatches: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return measured forward and backward seconds of every layer on a mean microbatch ``[layers]``."""
        units, length = self._samples.mean_units(module)
        count = max(1, round(units * global_batch / num_microbatches))
        key = (module.name, count, placed.tp, placed.cp, *self.name_of(placed.expert_groups))
        if key not in self._passes:
            lengths = np.full(count, max(1, round(length)))
            times = self.measure(module, lengths, placed.tp, placed.cp, placed.expert_groups)
            forward = np.array([float((kind.forward_s + kind.forward_comm_s)[0]) for kind in times])
            backward = np.array([float((kind.backward_s + kind.backward_comm_s)[0]) for kind in times])
            self._passes[key] = forward[module.layer_kind], backward[module.layer_kind]
        return self._passes[key]


BIAS_OCTAVES = 4.0  # A factor of 16 in length: estimates of small and of large units err in opposite directions


def length_bias(module: str, lengths: IntArray, seed: int, bias: float) -> FloatArray:
    """Return 1 + bias x sine of log2(length), with a period of ``BIAS_OCTAVES``; seed and module fix the phase."""
    if not bias:
        return np.ones(len(lengths))
    phase = np.random.default_rng([seed, crc32(module.encode())]).random()
    return np.asarray(1.0 + bias * sine_of_turns(log2(np.maximum(lengths, 1)) / BIAS_OCTAVES + phase))


def sample_error(module: str, sample_ids: IntArray, seed: int, error: float) -> FloatArray:
    """Return 1 + error x u with u uniform in [-1, 1]; seed, module and sample fix u (SplitMix64 hash)."""
    if not error:
        return np.ones(len(sample_ids))
    name = np.uint64((crc32(module.encode()) << 31) ^ seed)
    bits = mix((np.asarray(sample_ids).astype(np.uint64) + np.uint64(1)) * GOLDEN ^ name)
    return 1.0 + error * (2.0 * uniform(bits) - 1.0)


def smoothed_over_lengths(values: FloatArray, lengths: IntArray) -> FloatArray:
    """Return means of values of about the same length ``[values]``: in steps of half an octave, interpolated."""
    at = 2.0 * log2(np.maximum(lengths, 1))
    left = np.floor(at).astype(np.int64)
    share = at - left
    step = np.concatenate([left, left + 1])
    part = np.concatenate([1.0 - share, share])
    weight = np.bincount(step, part)
    mean = np.bincount(step, part * np.tile(values, 2)) / np.where(weight > 0, weight, 1.0)
    return np.asarray(mean[left] + share * (mean[left + 1] - mean[left]))


@dataclass(slots=True, eq=False)
class BatchCache:
    """Read-only estimates of the last batch, by key."""

    shapes: SampleShapes | None = None
    values: dict[tuple[object, ...], FloatArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnitEstimates:
    """Estimated workload of single units: items of encoders and generators, samples of the LLM."""

    _model: ModelSpec
    _layers: LayerProfile
    _seed: int
    _belief_error: float = 0.0
    _belief_bias: float = 0.0
    _smooth: bool = False  # whether units of about the same length have equal errors
    _correction: Corrector = field(default_factory=Corrector)
    _cache: BatchCache = field(default_factory=BatchCache)

    def units(
        self, module: ModuleSpec, shapes: SampleShapes, tp: int, cp: int, groups: IntArray | None = None
    ) -> FloatArray:
        """Return the estimated forward seconds of the whole module for each unit separately ``[units]``."""

        def made() -> FloatArray:
            a, b, c = matmul(np.bincount(module.layer_kind), self._layers.forward_fit(module, tp, cp, groups))
            lengths = module.lengths(shapes, module.units(shapes)).astype(np.float64)
            exact = np.maximum((a * lengths + b) * lengths + c, 0.0)
            return np.asarray(exact * self.error_factor(module, shapes))

        return self.remember(shapes, ("forward", module.name, tp, cp, *self._layers.name_of(groups)), made)

    def error_factor(self, module: ModuleSpec, shapes: SampleShapes) -> FloatArray:
        """Return the erroneous over the exact estimate of each unit ``[units]``, for a strategy's own estimates."""

        def made() -> FloatArray:
            units = module.units(shapes)
            lengths = module.lengths(shapes, units)
            ids = shapes.sample_ids[module.owners(shapes, units)]
            factor = sample_error(module.name, ids, self._seed, self._belief_error)
            factor = factor * length_bias(module.name, lengths, self._seed, self._belief_bias)
            if self._smooth and len(factor):
                factor = smoothed_over_lengths(factor, lengths)
            if self._correction.ratios:
                index = [other.name for other in self._model.modules].index(module.name)
                factor = factor * self._correction.penalties(shape_classes(lengths, index))
            return factor

        return self.remember(shapes, ("error", module.name), made)

    def remember(self, shapes: SampleShapes, key: tuple[object, ...], make: Callable[[], FloatArray]) -> FloatArray:
        """Return the read-only estimate that ``make`` returns for a batch; estimates of the last batch are kept."""
        cache = self._cache
        if cache.shapes is not shapes:
            cache.shapes = shapes
            cache.values = {}
        key = (self._smooth, *key)
        if key not in cache.values:
            freeze(estimate := make())
            cache.values[key] = estimate
        return cache.values[key]

    def samples(
        self, shapes: SampleShapes, tp: int, cp: int, groups: IntArray | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Return the estimated forward seconds of each sample: all encoders together, and the LLM ``[samples]``."""
        encoder = np.zeros(len(shapes))
        for module in self._model.encoders:
            units = module.units(shapes)
            encoder += shapes.sum_items(units, self.units(module, shapes, tp, cp))
        return encoder, self.units(self._model.llm, shapes, tp, cp, groups)
