"""The options of ``entrain-bench profile``, checked before anything starts and without torch."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.base.errors import IncompatibleError, UserError, require, unknown_choice
from entrain_bench.program.layout import check_tensor_parallel
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.settings import DEVICES, DTYPES

# Degrees that are profiled unless others are asked for, where they divide the model.
USUAL_TP = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What is timed, and how long; see experiments/profile.yaml."""

    tokens: tuple[int, ...]
    tp: tuple[int, ...] | None
    ranks: tuple[int, ...] | None
    message_bytes: tuple[int, ...]
    device: str
    sequence_parallel: bool
    dtype: str | None
    threads: int
    min_repetitions: int
    max_repetitions: int
    precision: float
    point_s: float
    peak_bf16_flops: float | None
    memory_bytes: int | None
    host_bandwidth_bytes_per_s: float | None
    output: str | None

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise unknown_choice("device", self.device, DEVICES)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise unknown_choice("dtype", self.dtype, DTYPES)
        for name, least in (("tokens", 1), ("tp", 1), ("ranks", 2), ("message_bytes", 1)):
            values = getattr(self, name)
            if values is not None:
                valid = all(value >= least for value in values) and len({*values}) == len(values)
                require(valid, name, [*values], f"different integers of at least {least}")
        require(bool(self.tokens), "tokens", [], "at least one number of tokens")
        require(self.tp is None or bool(self.tp), "tp", [], "at least one degree")
        require(self.threads >= 1, "threads", self.threads, "at least 1")
        require(self.min_repetitions >= 1, "min_repetitions", self.min_repetitions, "at least 1")
        enough = self.max_repetitions >= self.min_repetitions
        require(enough, "max_repetitions", self.max_repetitions, f"at least min_repetitions={self.min_repetitions}")
        require(0 < self.precision < 1, "precision", self.precision, "in (0, 1)")
        for name in ("point_s", "peak_bf16_flops", "memory_bytes", "host_bandwidth_bytes_per_s"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "positive")

    def degrees(self, model: ModelSpec) -> tuple[int, ...]:
        """Tensor-parallel degrees to profile.

        Raises:
            UserError: for one that does not divide the model.
        """
        if self.tp is None:
            return tuple(tp for tp in USUAL_TP if divides(model, tp))
        for tp in self.tp:
            for module in model.modules:
                try:
                    check_tensor_parallel(module, tp)
                except UserError as error:
                    raise UserError(str(error).replace("layout.tp", "tp", 1)) from error
        return self.tp


def check_model(model: ModelSpec) -> None:
    """Raise ``UserError`` for a model whose layers the training runtime does not have."""
    if model.generators:
        raise IncompatibleError(
            f"model={model.name}: has a generator ({model.generators[0].name}), whose layers training does not have"
        )


def divides(model: ModelSpec, tp: int) -> bool:
    """Whether a tensor-parallel degree splits every module evenly."""
    return all(size % tp == 0 for module in model.modules for size in module.sharded_sizes.values())
