"""Device profiles: measured points, constants of the device, the measurement's conditions, and their JSON file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import ModuleConfig
from entrain_bench.specs.parse import Allowed, Count, OneOf, Rate, at_least, check_mapping, parse

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "send")
# Keys of a module's configuration that change no layer's time.
IRRELEVANT = frozenset({"source", "num_layers", "full_attention_layers", "context_tokens", "tied_embeddings"})
DEFAULTS = {field.name: field.default for field in fields(ModuleConfig)}
FORMAT = "entrain-bench profile"
VERSION = 3
AGAIN = "To make one, run entrain-bench profile"
POINTS = ("stages", "steps", "collectives")


def are_quantiles(seconds: tuple[float, ...]) -> bool:
    """Whether these are three positive numbers in ascending order."""
    return len(seconds) == 3 and min(seconds) > 0 and [*seconds] == sorted(seconds)


IN_ORDER = "three positive numbers in order: 10th percentile, median, 90th percentile"
Quantiles = Annotated[tuple[float, ...], Allowed(are_quantiles, IN_ORDER)]
QuantilesOrNone = Annotated[tuple[float, ...], Allowed(lambda seconds: not seconds or are_quantiles(seconds), IN_ORDER)]


@dataclass(frozen=True, slots=True)
class StagePoint:
    """10th percentile, median and 90th percentile of seconds of a stage of layers of one kind on one pack."""

    module: str
    kind: str
    layers: Count
    tp: Count  # the stage is one shard
    lengths: Annotated[tuple[Count, ...], Allowed(bool, "sequences of at least 1 token")]  # over all CP ranks
    forward_s: Quantiles
    backward_s: Quantiles  # without recomputation
    remade_s: QuantilesOrNone  # backward with blocks recomputed; empty for layers that are not blocks
    repetitions: Count  # without warm-up
    cp: Count = 1  # the stage has the first rank's tokens

    @property
    def key(self) -> tuple[str, str, int, int, int, tuple[int, ...]]:
        """The identity of the point: module, kind, layers, tp, cp and lengths."""
        return self.module, self.kind, self.layers, self.tp, self.cp, self.lengths


@dataclass(frozen=True, slots=True)
class StepPoint:
    """Measured times of an optimizer step over ``parameters`` parameters; seconds as in ``StagePoint``."""

    parameters: Count
    seconds: Quantiles
    repetitions: Count


@dataclass(frozen=True, slots=True)
class CollectivePoint:
    """Measured times of one communication operation; seconds as in ``StagePoint``."""

    operation: Annotated[str, OneOf(COLLECTIVES)]  # a ``send`` goes from one rank to another
    ranks: Annotated[int, at_least(2)]
    num_bytes: Count  # of the whole tensor
    seconds: Quantiles
    repetitions: Count


@dataclass(frozen=True, slots=True)
class Subject:
    """Identity of a profile: device, data type, package versions and model. Points of two identities must not mix."""

    device: str
    kind: str  # ``cpu`` or ``cuda``
    dtype: str  # torch's name for the type of parameters and activations
    sequence_parallel: bool  # tensor-parallel shards held only their share of the tokens
    threads: int  # per process
    torch: str  # version
    megatron_core: str  # version
    model: str
    modules: Mapping[str, Any]  # configuration of every module, by name

    def difference(self, other: "Subject") -> str:
        """Return the first difference as ``key=value of the other``; empty if there is none."""
        mine = self._leaves()
        theirs = other._leaves()
        differ = (key for key in [*mine, *theirs] if mine.get(key) != theirs.get(key))
        return next((f"{key}={theirs.get(key)}" for key in differ), "")

    def _leaves(self) -> dict[str, Any]:
        leaves = {name: value for name, value in asdict(self).items() if name != "modules"}
        for name, module in sorted(self.modules.items()):
            leaves |= {f"modules.{name}.{key}": module[key] for key in sorted({*module} - IRRELEVANT)}
        return leaves

    def check_module(self, module: ModuleSpec, where: str) -> None:
        """Raise ``UserError`` unless the module's layers equal the measured ones."""
        if module.name not in self.modules:
            raise UserError(f"{where}: was measured with model={self.model}, which has no module {module.name}")
        measured = self.modules[module.name]
        for key, value in module_values(module).items():
            # Profiles made before a field existed measured a module with its default.
            if key not in IRRELEVANT and measured.get(key, DEFAULTS[key]) != value:
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
    """All measurements of one device and model."""

    subject: Subject
    constants: Constants
    date: str  # of the first measurement
    finished: bool = False  # all requested points were measured
    stages: tuple[StagePoint, ...] = ()
    steps: tuple[StepPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()


def module_values(module: ModuleSpec) -> dict[str, Any]:
    """Return a module's configuration as JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(module.config)))
    return values


def to_bytes(profile: DeviceProfile) -> bytes:
    """Return the content of a profile's file, one line per point."""
    values = asdict(profile)
    lists = {name: ",\n  ".join(json.dumps(point) for point in values.pop(name)) for name in POINTS}
    head = json.dumps({"format": FORMAT, "version": VERSION, **values}, indent=1)[:-2]
    points = "".join(f',\n "{name}": [\n  {lines}\n ]' for name, lines in lists.items())
    return f"{head}{points}\n}}\n".encode()


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile; ``UserError`` if the file cannot be written."""
    try:
        write_atomically(path, to_bytes(profile))
    except OSError as error:
        raise UserError(f"output={path}: cannot be written ({error.strerror})") from error


def read_profile(path: Path, where: str) -> DeviceProfile:
    """Read a profile, finished or not; ``UserError``, which begins with ``where``, if it cannot be read."""
    content = read_bytes(path, where)
    try:
        values = check_mapping(json.loads(content), where)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where}: is not a device profile, or is truncated ({error}). {AGAIN}") from error
    if values.get("format") != FORMAT:
        raise UserError(f"{where}: is not a device profile. {AGAIN}")
    if values.get("version") != VERSION:
        raise UserError(f"{where}: version={values.get('version')}: must be {VERSION}. {AGAIN}")
    profile = parse(DeviceProfile, {key: values[key] for key in values if key not in ("format", "version")}, where)
    for name in profile.constants.__dataclass_fields__.keys() - {"sources"}:
        if not isinstance(profile.constants.sources.get(name), str):
            raise UserError(f"{where}: constants.sources.{name}: missing. State the source of the constant")
    for name, module in profile.subject.modules.items():
        check_mapping(module, f"{where}: subject.modules.{name}")
    return profile


def digest(path: Path, where: str) -> str:
    """Return the SHA-256 of a profile's file; ``UserError`` if the file cannot be read."""
    return hashlib.sha256(read_bytes(path, where)).hexdigest()


def read_bytes(path: Path, where: str) -> bytes:
    """Return the bytes of a file; ``UserError`` if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}). {AGAIN}") from error
