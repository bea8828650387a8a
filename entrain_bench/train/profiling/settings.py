"""The options of ``entrain-bench profile``, checked before anything starts and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.config.grammar import own
from entrain_bench.program.layout import check_tensor_parallel, check_words
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.settings import DEVICES, DTYPES

# Degrees that are profiled unless others are asked for, where they divide the model.
USUAL_TP = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Keys of ``entrain-bench profile``: measured layers and lengths, and repetitions."""

    tokens: tuple[int, ...] = own(
        tuple(4**exponent for exponent in range(9)),
        "packed tokens at which every layer type is timed (one sequence, a few, many); runs interpolate",
    )
    tp: tuple[int, ...] | None = own(
        None,
        "tensor-parallel degrees, timed as one rank's shard; null: those of 1, 2, 4, 8 that divide the model",
    )
    cp: tuple[int, ...] = own(
        (1, 2, 4),
        "context-parallel degrees, timed as one rank's part of a pack; others are derived from 1",
    )
    ranks: tuple[int, ...] | None = own(
        None,
        "numbers of ranks whose communication is timed; []: none; null: 2 and 4, as far as there are GPUs",
    )
    message_bytes: tuple[int, ...] = own((4096, 65536, 2**20, 2**24), "bytes of the tensors that ranks communicate")
    device: str = own("auto", "cpu, cuda, or auto: a GPU if there is one")
    sequence_parallel: bool = own(True, "time shards of more than one rank with sequence parallelism, as in later runs")
    dtype: str | None = own(None, "float32 or bfloat16; null: bfloat16 on a GPU, float32 on a CPU")
    threads: int = own(1, "CPU threads of the process; ranks have as many in training")
    repetitions: int = own(20, "repetitions of a point")
    point_s: float = own(10.0, "most seconds of a point; a pack that takes half of that once is left out")
    output: str | None = own(
        None,
        "JSON file, resumed if unfinished; null: results/profiles/<model>-<device>-<dtype>.json",
    )

    def __post_init__(self) -> None:
        for name, choices in (("device", DEVICES), ("dtype", (None, *DTYPES))):
            if (value := getattr(self, name)) not in choices:
                raise unknown_choice(name, value, [choice for choice in choices if choice])
        for name, least in (("tokens", 1), ("tp", 1), ("cp", 1), ("ranks", 2), ("message_bytes", 1)):
            values = getattr(self, name)
            if values is not None:
                valid = all(value >= least for value in values) and len({*values}) == len(values)
                require(valid, name, [*values], f"different integers of at least {least}")
        require(bool(self.tokens), "tokens", [], "at least one number of tokens")
        require(self.tp is None or bool(self.tp), "tp", [], "at least one degree")
        require(1 in self.cp, "cp", [*self.cp], "degrees of which one is 1")
        for name in ("threads", "repetitions"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.point_s > 0, "point_s", self.point_s, "positive")

    def degrees(self, model: ModelSpec) -> list[tuple[int, int]]:
        """Pairs of TP and CP degrees to profile; ``UserError`` for a TP degree that does not divide the model."""
        degrees = self.tp
        if degrees is None:
            unpadded = (tp for tp in USUAL_TP if model.llm.padded(tp) is model.llm)
            degrees = tuple(tp for tp in unpadded if all(module.splits_into(tp) for module in model.modules))
        for tp in self.tp or ():
            for module in model.modules:
                check_tensor_parallel(module, tp, "tp")
                check_words(module, tp, "tp")
        return [*product(degrees, self.cp)]
