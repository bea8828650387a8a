"""The constants that whole training runs are fitted to, and how a cluster takes other values of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from entrain_bench.base.arrays import FloatArray
from entrain_bench.lab.ledger.fit import Knob
from entrain_bench.lab.ledger.predict import Change
from entrain_bench.specs.cluster import ClusterSpec, Speed

DEVICE, NODE, NETWORK = PLACES = ("device", "node", "network")
# No efficiency or share exceeds it.
MOST = 1.0


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that is fitted.

    Attributes:
        place: ``device``, or all tiers inside (``node``) or between nodes (``network``).
        field: of ``DeviceSpec`` or ``LinkTier``.
        usual: median of what is expected before anything is fitted, in the field's unit.
        spread, shared: as of ``Knob``.
        why: what the expectation rests on.
    """

    place: str
    field: str
    usual: float
    spread: float
    shared: float
    why: str

    @property
    def knob(self) -> Knob:
        """Itself as an unknown of a fit."""
        return Knob(f"{self.place}.{self.field}", self.spread, self.shared)

    @property
    def is_share(self) -> bool:
        """Whether it is a fraction of something, at most 1."""
        return self.field.endswith(("efficiency", "fraction", "cost"))

    def value(self, factor: float) -> float:
        """The constant at a factor on what is usual."""
        return min(self.usual * factor, MOST) if self.is_share else self.usual * factor


FITTED: tuple[Constant, ...] = (
    Constant(DEVICE, "sustained_fraction", 0.75, 0.4, 0.0, "boards throttle under load; between a half and all"),
    Constant(DEVICE, "gemm_half_width", 300.0, 0.8, 0.8, "products with one side of a few hundred lose up to a half"),
    Constant(DEVICE, "elementwise_efficiency", 0.9, 0.15, 0.5, "dropout and softmax compute as they move data"),
    Constant(DEVICE, "overlap_cost", 0.3, 0.7, 0.8, "NCCL takes up to 16 of 108 or 132 multiprocessors, and bandwidth"),
    Constant(DEVICE, "host_launch_s", 6e-6, 0.5, 0.8, "eager PyTorch issues a kernel in 4 to 12 us"),
    Constant(NODE, "collective_efficiency", 0.8, 0.2, 0.5, "nccl-tests reach 0.8 to 0.95 with large messages"),
    Constant(NODE, "collective_start_s", 20e-6, 0.6, 0.8, "nccl-tests: 10 to 40 us for small messages"),
    Constant(NETWORK, "collective_efficiency", 0.7, 0.8, 0.5, "nccl-tests: 0.6 to 0.95, by fabric"),
)
# What is not known of the constants, fitted or cited, once they are in the YAMLs: factors of ``Speed``.
SPEED: tuple[Knob, ...] = (
    Knob("gemm", 0.15),
    Knob("attention", 0.15),
    Knob("memory", 0.10),
    Knob("node", 0.20, 0.5),
    Knob("network", 0.20, 0.5),
    Knob("launch", 0.50, 0.8),
    Knob("overlap", 0.50, 0.8),
)
RESERVE = Knob("reserve", 0.25, 0.8)


def with_constants(constants: Sequence[Constant], factors: FloatArray) -> Change:
    """A cluster with constants at factors on what is usual."""
    values: dict[str, dict[str, Any]] = {place: {} for place in PLACES}
    for constant, factor in zip(constants, factors.tolist(), strict=True):
        values[constant.place][constant.field] = constant.value(factor)
    return lambda cluster: with_values(cluster, values)


def with_names(values: Mapping[str, float]) -> Change:
    """A cluster with values of constants, by the names of their knobs."""
    placed: dict[str, dict[str, Any]] = {place: {} for place in PLACES}
    for name, value in values.items():
        place, _, field = name.partition(".")
        placed[place][field] = value
    return lambda cluster: with_values(cluster, placed)


def with_values(cluster: ClusterSpec, values: Mapping[str, Mapping[str, Any]]) -> ClusterSpec:
    """A cluster with other values of fields, by ``PLACES``."""
    tiers = tuple(
        replace(tier, **values[NODE if tier.num_ranks <= cluster.gpus_per_node else NETWORK]) for tier in cluster.tiers
    )
    return replace(cluster, device=replace(cluster.device, **values[DEVICE]), tiers=tiers)


def at_speed(factors: FloatArray) -> Change:
    """A cluster at factors on ``SPEED``."""
    return lambda cluster: cluster.at(speed_of(factors))


def at_reserve(factors: FloatArray) -> Change:
    """A cluster at a factor on ``RESERVE``."""
    return lambda cluster: cluster.at(Speed(reserve=float(factors[0])))


def speed_of(factors: FloatArray, reserve: float = 1.0) -> Speed:
    """Factors on ``SPEED`` as a ``Speed``; its fields are all fitted, or this fails."""
    values = dict(zip((knob.name for knob in SPEED), factors.tolist(), strict=True))
    return Speed(**{field.name: (values | {RESERVE.name: reserve})[field.name] for field in fields(Speed)})
