"""Content of a device profile: measured points, constants of the device, and the measurement's conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from entrain_bench.base.errors import UserError
from entrain_bench.specs.framework import ALL
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import Allowed, Count, OneOf, Rate, at_least

STATISTICS = ("p10", "median", "p90")
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "send")
# Keys of a module's configuration that change no layer's time.
IRRELEVANT = frozenset({"source", "num_layers", "full_attention_layers", "context_tokens", "tied_embeddings"})


def are_quantiles(seconds: tuple[float, ...]) -> bool:
    """Whether these are three positive numbers in ascending order."""
    return len(seconds) == 3 and min(seconds) > 0 and [*seconds] == sorted(seconds)


IN_ORDER = "three positive numbers in order: 10th percentile, median, 90th percentile"
Quantiles = Annotated[tuple[float, ...], Allowed(are_quantiles, IN_ORDER)]
QuantilesOrNone = Annotated[tuple[float, ...], Allowed(lambda seconds: not seconds or are_quantiles(seconds), IN_ORDER)]


@dataclass(frozen=True, slots=True)
class StagePoint:
    """Measured times of a stage of ``layers`` layers of one kind, forward and backward on one pack.

    Seconds are the 10th percentile, median and 90th percentile of the repetitions.

    Attributes:
        module, kind: module and layer kind.
        layers: number of layers.
        tp: tensor-parallel degree; the stage is one shard.
        lengths: tokens of each packed sequence, over all context-parallel ranks.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward without recomputation.
        remade_s: seconds of the backward with blocks recomputed; empty for layers that are not blocks.
        repetitions: number of measured runs, without warm-up.
        labelled: tokens with a label, in a head that computes logits of labelled tokens only; otherwise 0.
        cp: context-parallel degree; the stage has the first rank's tokens.
    """

    module: str
    kind: str
    layers: Count
    tp: Count
    lengths: Annotated[tuple[Count, ...], Allowed(bool, "sequences of at least 1 token")]
    forward_s: Quantiles
    backward_s: Quantiles
    remade_s: QuantilesOrNone
    repetitions: Count
    labelled: Annotated[int, at_least(0)] = 0
    cp: Count = 1

    @property
    def key(self) -> tuple[str, str, int, int, int, tuple[int, ...], int]:
        """The identity of the point: module, kind, layers, tp, cp, lengths and labelled tokens."""
        return self.module, self.kind, self.layers, self.tp, self.cp, self.lengths, self.labelled


@dataclass(frozen=True, slots=True)
class StepPoint:
    """Measured times of an optimizer step over ``parameters`` parameters; seconds as in ``StagePoint``."""

    parameters: Count
    seconds: Quantiles
    repetitions: Count


@dataclass(frozen=True, slots=True)
class CollectivePoint:
    """Measured times of one communication operation; seconds as in ``StagePoint``.

    Attributes:
        operation: one of ``COLLECTIVES``; a ``send`` goes from one rank to another.
        ranks: number of participating ranks.
        num_bytes: bytes of the whole tensor.
    """

    operation: Annotated[str, OneOf(COLLECTIVES)]
    ranks: Annotated[int, at_least(2)]
    num_bytes: Count
    seconds: Quantiles
    repetitions: Count


@dataclass(frozen=True, slots=True)
class Subject:
    """Identity of a profile: device, data type, package versions and model. Points of two identities must not mix.

    Attributes:
        device: name of the device.
        kind: ``cpu`` or ``cuda``.
        dtype: torch's name for the type of parameters and activations.
        sequence_parallel: whether tensor-parallel shards held only their share of the tokens.
        threads: threads per process.
        torch, megatron_core: versions.
        model: name of the model.
        modules: configuration of every module, by name.
        head_tokens: positions whose logits the LLM's head computed (``FrameworkOptions.head_tokens``).
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
    head_tokens: str = ALL

    def difference(self, other: Subject) -> str:
        """Return the first difference as ``key=value of the other``; empty if there is none."""
        mine = asdict(self)
        theirs = asdict(other)
        for name in mine:
            if name != "modules" and mine[name] != theirs[name]:
                return f"{name}={theirs[name]}"
        for name in sorted({*mine["modules"], *theirs["modules"]}):
            if change := _difference(mine["modules"].get(name), theirs["modules"].get(name)):
                return f"modules.{name}{change}"
        return ""

    def check_module(self, module: ModuleSpec, where: str) -> None:
        """Raise ``UserError`` unless the module's layers equal the measured ones."""
        if module.name not in self.modules:
            raise UserError(f"{where}: was measured with model={self.model}, which has no module {module.name}")
        measured = self.modules[module.name]
        for key, value in module_values(module).items():
            if key not in IRRELEVANT and measured.get(key) != value:
                theirs = f"whose {module.name} has {key}={measured.get(key)}"
                raise UserError(f"{where}: was measured with model={self.model}, {theirs}. This model has {value}")


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of a device that a profile does not measure, each with its source; units as in ``DeviceSpec``."""

    peak_bf16_flops: Rate
    memory_bytes: Annotated[int, at_least(1, "positive")]
    memory_bandwidth_bytes_per_s: Rate
    host_bandwidth_bytes_per_s: Rate
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """All measurements of one device and model.

    Attributes:
        subject: the profile's identity.
        constants: constants of the device.
        date: date of the first measurement.
        finished: whether all requested points were measured.
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
        """Return the profile with every point's three times replaced by one statistic."""
        index = STATISTICS.index(statistic)
        kinds = dict[str, Any]()
        for name in ("stages", "steps", "collectives"):
            kinds[name] = tuple(_only(point, index) for point in getattr(self, name))
        return replace(self, **kinds)


def _only[T: StagePoint | StepPoint | CollectivePoint](point: T, index: int) -> T:
    names = [name for name in ("forward_s", "backward_s", "remade_s", "seconds") if hasattr(point, name)]
    return replace(point, **{name: getattr(point, name)[index : index + 1] * len(STATISTICS) for name in names})


def module_values(module: ModuleSpec) -> dict[str, Any]:
    """Return a module's configuration as JSON values."""
    values = asdict(module.config)
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _difference(mine: Any, theirs: Any) -> str:
    """Return the first difference between two modules' configurations; empty if there is none."""
    if mine is None or theirs is None:
        return "" if mine is theirs else ": missing"
    for key in sorted({*mine, *theirs} - IRRELEVANT):
        if mine.get(key) != theirs.get(key):
            return f".{key}={theirs.get(key)}"
    return ""
