"""What a profile of a device holds: measured points, the device's constants, and what was measured with what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.specs.model import ModuleSpec

STATISTICS = ("p10", "median", "p90")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "send")
# Of a module's configuration, what changes no time of one of its layers.
IRRELEVANT = frozenset({"source", "num_layers", "full_attention_layers", "context_tokens", "tied_embeddings"})


@dataclass(frozen=True, slots=True)
class StagePoint:
    """A stage of ``layers`` layers of one kind, run forward and backward on one pack.

    Seconds are the tenth percentile, the median and the ninetieth of the repetitions.

    Attributes:
        module, kind: whose layers.
        layers: how many.
        tp: into how many shards the layers are split, of which the stage is one.
        lengths: of the packed sequences.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward after it.
        remade_s: of a backward that runs the blocks' forwards once more; none for layers that are not blocks.
        kept_bytes: what the forward keeps for the backward, parameters apart.
        remade_kept_bytes: what it keeps where the blocks' forwards are run once more; 0 for layers that are not blocks.
        repetitions: how often it ran, warm-up apart.
    """

    module: str
    kind: str
    layers: int
    tp: int
    lengths: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    remade_s: tuple[float, ...]
    kept_bytes: int
    remade_kept_bytes: int
    repetitions: int

    @property
    def key(self) -> tuple[str, str, int, int, tuple[int, ...]]:
        """What was measured."""
        return self.module, self.kind, self.layers, self.tp, self.lengths

    def check(self, where: str) -> None:
        """Raise ``UserError`` for what cannot have been measured."""
        for name in ("layers", "tp", "repetitions"):
            require(getattr(self, name) >= 1, f"{where}.{name}", getattr(self, name), "at least 1")
        lengths = [*self.lengths]
        require(bool(lengths) and min(lengths) >= 1, f"{where}.lengths", lengths, "sequences of at least 1 token")
        for name in ("kept_bytes", "remade_kept_bytes"):
            require(getattr(self, name) >= 0, f"{where}.{name}", getattr(self, name), "at least 0")
        for name in ("forward_s", "backward_s", *(["remade_s"] if self.remade_s else [])):
            check_quantiles(getattr(self, name), f"{where}.{name}")


@dataclass(frozen=True, slots=True)
class StepPoint:
    """An optimizer step over ``parameters`` whose states the rank holds; seconds as those of ``StagePoint``."""

    parameters: int
    seconds: tuple[float, ...]
    repetitions: int

    def check(self, where: str) -> None:
        """Raise ``UserError`` for what cannot have been measured."""
        for name in ("parameters", "repetitions"):
            require(getattr(self, name) >= 1, f"{where}.{name}", getattr(self, name), "at least 1")
        check_quantiles(self.seconds, f"{where}.seconds")


@dataclass(frozen=True, slots=True)
class CollectivePoint:
    """Communication of ``num_bytes`` in all among ``ranks``; seconds as those of ``StagePoint``.

    Attributes:
        operation: one of ``COLLECTIVES``; a ``send`` is from one rank to another.
        ranks: that took part.
        num_bytes: of the whole tensor.
    """

    operation: str
    ranks: int
    num_bytes: int
    seconds: tuple[float, ...]
    repetitions: int

    def check(self, where: str) -> None:
        """Raise ``UserError`` for what cannot have been measured."""
        if self.operation not in COLLECTIVES:
            raise unknown_choice(f"{where}.operation", self.operation, COLLECTIVES)
        require(self.ranks >= 2, f"{where}.ranks", self.ranks, "at least 2")
        require(self.num_bytes >= 1, f"{where}.num_bytes", self.num_bytes, "at least 1")
        require(self.repetitions >= 1, f"{where}.repetitions", self.repetitions, "at least 1")
        check_quantiles(self.seconds, f"{where}.seconds")


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured with what; points of different subjects do not go together.

    Attributes:
        device: its name.
        kind: ``cpu`` or ``cuda``.
        dtype: of parameters and activations, by torch's name.
        sequence_parallel: whether shards of several tensor-parallel ranks had their share of the tokens only.
        threads: of a process.
        torch, megatron_core: versions.
        model: its name.
        modules: configuration of every module, by name.
    """

    device: str
    kind: str
    dtype: str
    sequence_parallel: bool
    threads: int
    torch: str
    megatron_core: str
    model: str
    modules: Mapping[str, Any]

    def difference(self, other: Subject) -> str:
        """Where another subject differs first: ``key=value of the other``; empty if nowhere."""
        mine, theirs = asdict(self), asdict(other)
        for name in mine:
            if name != "modules" and mine[name] != theirs[name]:
                return f"{name}={theirs[name]}"
        for name in sorted({*mine["modules"], *theirs["modules"]}):
            if found := _difference(mine["modules"].get(name), theirs["modules"].get(name)):
                return f"modules.{name}{found}"
        return ""

    def check_module(self, module: ModuleSpec, where: str) -> None:
        """Raise ``UserError`` unless layers of the module are those that were measured."""
        if module.name not in self.modules:
            raise UserError(f"{where}: is of model={self.model}, which has no module {module.name}")
        measured = self.modules[module.name]
        for key, value in module_values(module).items():
            if key not in IRRELEVANT and measured.get(key) != value:
                raise UserError(
                    f"{where}: is of model={self.model}, whose {module.name} has {key}={measured.get(key)}; "
                    f"this model's has {value}"
                )


@dataclass(frozen=True, slots=True)
class Constants:
    """What else is asked of a device, each with its source; units as in ``DeviceSpec``."""

    peak_bf16_flops: float
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    host_bandwidth_bytes_per_s: float
    sources: Mapping[str, str]

    def check(self, where: str) -> None:
        """Raise ``UserError`` for values that are not positive, and for a value without a source."""
        for name in self.__dataclass_fields__.keys() - {"sources"}:
            require(getattr(self, name) > 0, f"{where}.{name}", getattr(self, name), "positive")
            if not isinstance(self.sources.get(name), str):
                raise UserError(f"{where}.sources.{name}: missing; say where the constant is from")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """All that was measured of one device and model.

    Attributes:
        subject: what was measured with what.
        constants: of the device.
        date: of the first measurement.
        finished: whether nothing is missing of what was to be measured.
        stages, steps, collectives: the points.
    """

    subject: Subject
    constants: Constants
    date: str
    finished: bool = False
    stages: tuple[StagePoint, ...] = ()
    steps: tuple[StepPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()

    def only(self, statistic: str) -> DeviceProfile:
        """The profile with one of the three seconds in place of all of them."""
        index = STATISTICS.index(statistic)
        return replace(
            self,
            stages=_only(self.stages, index),
            steps=_only(self.steps, index),
            collectives=_only(self.collectives, index),
        )


def _only[T: StagePoint | StepPoint | CollectivePoint](points: tuple[T, ...], index: int) -> tuple[T, ...]:
    """Points with one of their three seconds in place of all."""
    names = [name for name in ("forward_s", "backward_s", "remade_s", "seconds") if points and hasattr(points[0], name)]
    return tuple(
        replace(point, **{name: getattr(point, name)[index : index + 1] * len(STATISTICS) for name in names})
        for point in points
    )


def module_values(module: ModuleSpec) -> dict[str, Any]:
    """A module's configuration as JSON holds it."""
    values = asdict(module.config)
    return {key: _plain(value) for key, value in values.items()}


def check_quantiles(seconds: tuple[float, ...], where: str) -> None:
    """Raise ``UserError`` unless these are three positive numbers in order."""
    allowed = "three positive numbers in order: 10th percentile, median, 90th percentile"
    require(len(seconds) == 3 and min(seconds) > 0 and [*seconds] == sorted(seconds), where, [*seconds], allowed)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _difference(mine: Any, theirs: Any) -> str:
    """Where two modules' configurations differ first."""
    if mine is None or theirs is None:
        return "" if mine is theirs else ": missing"
    for key in sorted({*mine, *theirs} - IRRELEVANT):
        if mine.get(key) != theirs.get(key):
            return f".{key}={theirs.get(key)}"
    return ""
