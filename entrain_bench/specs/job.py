"""The training job that every strategy receives: model, cluster, batch sizes and limits."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import isqrt
from typing import Annotated, Any, Self

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.parse import Count, OneOf, at_least, between, check_fields
from entrain_bench.specs.sharding import SHARDINGS, ZERO1, ZERO2

MAX_MICROBATCH_SIZE = 16  # largest microbatch that planners consider where its size is theirs to choose
# Samples of an iteration, or of a profile; more would be refused by the machine's memory, not by a message.
MAX_SAMPLES = 2**20
# Modules that a planner may let recompute: any; an encoder only with the LLM, as Megatron-LM's flags say; all or none.
ANY, WITH_LLM, TOGETHER = "any", "with_llm", "together"
PLANNING_SHARE = 0.95  # share of the memory budget that plans use up
Degree = Annotated[int, at_least(1, "null or at least 1")] | None


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """The part of a layout that the user fixes; None leaves a value to the planner."""

    tp: Degree = None
    cp: Degree = None
    pp: Degree = None  # all stages of a replica
    dp: Degree = None
    ep: Degree = None  # of the LLM's experts, over ranks of DP and CP
    recompute: tuple[str, ...] | None = None  # modules whose activations are recomputed; the others keep theirs
    recompute_rule: Annotated[str, OneOf((ANY, WITH_LLM, TOGETHER))] = ANY  # of modules, if ``recompute`` is free
    sharding: Annotated[str, OneOf(SHARDINGS)] | None = None  # state that ranks with the same weights partition

    def __post_init__(self) -> None:
        check_fields(self, "layout.")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The request as ``layout.*`` states it."""
        recompute = values.get("recompute")
        return cls(**{**values, "recompute": None if recompute is None else tuple(map(str, recompute))})

    @property
    def values(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self) | {"recompute": None if self.recompute is None else [*self.recompute]}


# Values of the default job (experiments/config.yaml).
DEFAULT_DEGREES = LayoutRequest(tp=2, cp=1, dp=4)
DEFAULT_MICROBATCH_SIZE = 4


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of a replica with one TP and CP for all its modules."""

    tp: int
    cp: int
    pp: int
    dp: int


@dataclass(frozen=True, slots=True)
class Job:
    """Model, cluster, batch and limits, the same for every strategy."""

    model: ModelSpec
    cluster: ClusterSpec
    global_batch: Annotated[int, between(1, MAX_SAMPLES, f"at least 1, at most {MAX_SAMPLES}")]
    microbatch_size: Count  # samples of a microbatch; the least there may be where planners choose it
    request: LayoutRequest
    memory_budget_bytes: float  # of a rank, that programs may use
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    free_microbatch_size: bool = False  # planners choose the microbatch size

    def __post_init__(self) -> None:
        check_fields(self)
        names = [module.name for module in self.model.modules]
        for name in self.request.recompute or ():
            if name not in names:
                raise unknown_choice("layout.recompute", name, names)
        if self.request.ep not in (None, 1) and self.model.llm.config.experts is None:
            raise UserError(f"layout.ep={self.request.ep}: must be 1 or null: model={self.model.name} has no experts")
        asked = self.request.sharding
        if asked in (ZERO1, ZERO2):
            states = self.framework.distributed_optimizer
            require(states, "distributed_optimizer", "false", f"true with layout.sharding={asked}")
        if asked not in (None, ZERO1):
            instances = self.framework.encoder_optimizers
            require(instances == 1, "encoder_optimizers", instances, f"1 with layout.sharding={asked}")

    @property
    def planning_budget_bytes(self) -> float:
        """Return the bytes per rank that plans may use; the rest is a margin for batches heavier than profiled ones."""
        return PLANNING_SHARE * self.memory_budget_bytes

    def each_microbatch_size(self) -> list[Self]:
        """Return the job once per power of two that divides a replica's samples; only itself if the size is fixed."""
        if not self.free_microbatch_size:
            return [self]
        share, rest = divmod(self.global_batch, self.request.dp or 1)
        sizes = (2**i for i in range(MAX_MICROBATCH_SIZE.bit_length()))
        return [self.with_microbatch_size(size) for size in sizes if not rest and share % size == 0] or [self]

    def with_microbatch_size(self, size: int) -> Self:
        """The job with a microbatch size that is given."""
        return replace(self, microbatch_size=size, free_microbatch_size=False)

    def num_microbatches(self, dp: int) -> int:
        """Microbatches of a replica per iteration; the global batch must divide."""
        size = dp * self.microbatch_size
        allowed = f"a multiple of layout.dp={dp} x microbatch_size={self.microbatch_size}"
        require(self.global_batch % size == 0, "global_batch", self.global_batch, allowed)
        return self.global_batch // size

    def check_request(self) -> None:
        """Raise ``UserError`` for requested degrees that no layout can have, naming the degree."""
        node = self.cluster.gpus_per_node
        asked = self.request
        if asked.tp:
            require(node % asked.tp == 0, "layout.tp", asked.tp, f"a divisor of the {node} ranks of a node")
        if asked.dp:
            self.num_microbatches(asked.dp)
        if asked.pp:
            most = self.max_stages
            require(asked.pp <= most, "layout.pp", asked.pp, f"at most {most}, the layers of model={self.model.name}")

    def degrees(self, *, of_llm: bool = False) -> Iterator[Degrees]:
        """Every homogeneous (TP, CP, PP, DP) on all ranks that meets the request; ``UserError`` if there is none.

        ``of_llm``: TP has to split the LLM only, because planners may choose that of the other modules.
        """
        ranks = self.cluster.num_ranks
        node = self.cluster.gpus_per_node
        asked = self.request
        split = [self.model.llm] if of_llm else self.model.modules
        tps = [tp for tp in divisors(node) if all(module.splits_into(tp) for module in split)]
        cps = [2**i for i in range(ranks.bit_length())]
        dps = [d for d in divisors(ranks) if not self.global_batch % (d * self.microbatch_size)]
        self.check_request()
        fixed = ([asked.tp] if asked.tp else tps, [asked.cp] if asked.cp else cps, [asked.dp] if asked.dp else dps)
        met = [
            Degrees(tp, cp, pp, dp)
            for tp, cp, dp in product(*fixed)
            for pp, rest in [divmod(ranks, tp * cp * dp)]
            if not rest and pp == (asked.pp or pp) and 1 <= pp <= self.max_stages
        ]
        yield from met
        if not met:
            wanted = " ".join(f"layout.{n}={getattr(asked, n)}" for n in ("tp", "cp", "pp", "dp") if getattr(asked, n))
            raise UserError(
                f"{wanted or 'layout'}: no TP x CP x PP x DP equals the {ranks} ranks of cluster={self.cluster.name} "
                f"with at most {self.max_stages} stages a replica and dp x microbatch_size={self.microbatch_size} "
                f"dividing global_batch={self.global_batch}"
            )

    @property
    def max_stages(self) -> int:
        """Stages of a replica at one layer each."""
        return sum(max(len(self.model.modules[i].layers) for i in unit) for unit in self.model.module_groups)


def divisors(number: int) -> list[int]:
    """The divisors of a number, rising."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return [*small, *(number // d for d in reversed(small) if d * d < number)]
