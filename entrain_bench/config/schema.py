"""The user's configuration: the schema Hydra checks, and the plain values the suite works with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, make_dataclass
from functools import cache
from math import nextafter
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from entrain_bench.base.errors import UserError, require
from entrain_bench.specs.adapters import Adapter
from entrain_bench.specs.cluster import Speed
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.specs.parse import Allowed, OneOf, Share, between

GROUP_KEYS = {
    "strategy": ("name", "planner", "assigner", "scheduler"),
    "workload": ("name", "_target_"),
    "model": ("name", "modules", "tokens"),
    "cluster": ("name", "device", "tiers"),
    "harness": ("label", "_target_"),
}
SCHEMA = "schema"
# Chooser of layouts: one tuner for all strategies, or each planner by its own trials.
TUNING = ("equal", "own")
# Choices for a run with an iteration that does not fit memory.
FAIL, COUNT = ON_OOM = ("fail", "count")
NUM_DRAWS = 50
TEXT_KEYS = ("name", "label", "_target_")
# Keys that state where results go, which runs are repeated and which columns are printed: no part of a run.
ASIDE = ("results_dir", "mlflow", "mlflow_uri", "retry", "columns")
Seed = Annotated[int, between(0, 2**32 - 1, "in 0..2^32-1")]
Error = Annotated[float, between(0, nextafter(1, 0), "in [0, 1)")]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One fully resolved run, with the chosen groups as plain mappings."""

    strategy: Mapping[str, Any]
    workload: Mapping[str, Any]
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    harness: Mapping[str, Any]
    seed: Seed
    global_batch: int
    microbatch_size: int | None
    iterations: Annotated[int, between(1, 10**6, "at least 1, at most 1000000")]
    layout: LayoutRequest
    belief_error: Error
    belief_bias: Error
    tuning: str
    tuning_budget: Annotated[int, between(1, 10**6, "at least 1, at most 1000000")]
    tuning_options: bool
    planning_seed: Seed
    action_noise: Annotated[float, between(0, 0.5, "in [0, 0.5]")]
    slow_rank: int | None
    slow_rank_factor: Annotated[float, between(1, 100, "in [1, 100]")]
    speed: Speed
    constants: Annotated[int, between(0, NUM_DRAWS, f"in 0..{NUM_DRAWS}")]
    memory_fraction: Share
    on_oom: Annotated[str, OneOf(ON_OOM)]
    framework: FrameworkOptions
    results_dir: str
    mlflow: bool
    mlflow_uri: str | None
    retry: str | None
    columns: tuple[str, ...]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Check groups and ranges of values by top-level key; ``UserError`` names field, value and allowed range."""
        for path in _missing(values):
            raise UserError(f"{path}: must be given")
        for group, keys in GROUP_KEYS.items():
            _check_group(group, values[group], keys)
        for key, limits in _ranges().items():
            limits.check(values[key], key)
        require(values["tuning"] in TUNING, "tuning", values["tuning"], f"one of {', '.join(TUNING)}")
        check_storage(values["mlflow_uri"], values["retry"])
        given = {str(key): value for key, value in values.items()}
        given |= {"layout": LayoutRequest.from_values(values["layout"]), "speed": Speed(**values["speed"])}
        given["columns"] = tuple(values["columns"])
        given.pop("figure", None)
        framework = FrameworkOptions.from_values(given)
        for name in FrameworkOptions.__dataclass_fields__:
            given.pop(name)
        return cls(**given, framework=framework)

    @property
    def simulated_batches(self) -> int | None:
        """The tuner's budget; None if each planner chooses by its own trials."""
        return self.tuning_budget if self.tuning == "equal" else None

    @property
    def tunes_options(self) -> bool:
        """Whether the tuner chooses options of the strategy as well as layouts."""
        return self.tuning_options and self.simulated_batches is not None

    @property
    def retries_failed(self) -> bool:
        """Whether failed cells that a sweep would leave alone are run again."""
        return self.retry == "failed"

    def content(self) -> dict[str, Any]:
        """Return all values that decide the result, as plain values, without storage keys."""
        skipped = {*ASIDE, "framework"}
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in skipped}
        content["layout"] = self.layout.values
        content["speed"] = asdict(self.speed)
        content |= {**asdict(self.framework), "freeze": [*self.framework.freeze]}
        content["adapter"]["targets"] = [*self.framework.adapter.targets]
        return content


def _schema(name: str, hints: Mapping[str, Any], *optional: tuple[str, Any, Any]) -> Any:
    """A class of which Hydra learns keys and types; all values but those of optional keys must be given."""
    return make_dataclass(name, [*((key, *_typed(hint)) for key, hint in hints.items()), *optional])


def _typed(hint: Any) -> tuple[Any, Any]:
    """A type as OmegaConf takes it, and the default: a class of ours as the keys of its fields."""
    if isinstance(hint, type) and is_dataclass(hint):
        keys = _schema(hint.__name__, get_type_hints(hint))
        return keys, field(default_factory=keys)
    return hint, MISSING


def _hints() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, hint in get_type_hints(RunConfig).items():
        found |= get_type_hints(FrameworkOptions) if key == "framework" else {key: Any if key in GROUP_KEYS else hint}
    return found


# Top-level keys and types; experiments/config.yaml has the values. Hydra rejects others. A figure's key sweeps.
ConfigSchema = _schema("ConfigSchema", _hints(), ("figure", Any, None))
NESTED: Mapping[str, type[LayoutRequest | Speed | Adapter]] = {
    "layout": LayoutRequest,
    "speed": Speed,
    "adapter": Adapter,
}
# Keys that take one value, which no choice of a group depends on.
PLAIN_KEYS = ({*ConfigSchema.__dataclass_fields__} - {*GROUP_KEYS, *NESTED, "figure"}) | {
    f"{group}.{name}" for group, config in NESTED.items() for name in config.__dataclass_fields__
}


@cache
def register_schema() -> None:
    """Make the schema known to Hydra under the name that experiments/config.yaml extends."""
    ConfigStore.instance().store(name=SCHEMA, node=ConfigSchema)


def check_storage(mlflow_uri: str | None, retry: str | None) -> None:
    """Raise ``UserError`` for values of these keys that are out of range."""
    served = mlflow_uri is None or mlflow_uri.startswith(("http://", "https://"))
    require(served, "mlflow_uri", mlflow_uri, "null or http(s)://host:port")
    require(retry in (None, "failed"), "retry", retry, "null or failed")


@cache
def _ranges() -> dict[str, Allowed | OneOf]:
    hints = get_type_hints(RunConfig, include_extras=True)
    return {key: get_args(hint)[1] for key, hint in hints.items() if get_origin(hint) is Annotated}


def _missing(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in sorted(node.items()):
            yield from _missing(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list):
        yield from _missing({f"{index}": value for index, value in enumerate(node)}, prefix)
    elif node == MISSING:
        yield prefix


def _check_group(group: str, values: Any, keys: Sequence[str]) -> None:
    if not isinstance(values, dict):
        raise UserError(f"{group}={values}: must be one of the choices of that group")
    for key in keys:
        value = values.get(key)
        if key in TEXT_KEYS and not isinstance(value, str):
            raise UserError(f"{group}.{key}={value}: must be text")
        if value is None:
            raise UserError(f"{group}.{key}: missing")
