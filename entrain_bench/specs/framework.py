"""How the training framework runs a job: settings that are the same for every strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrain_bench.errors import require, unknown_choice

P2P = ("blocking", "overlapped")
# Actions whose receives are posted while the present one runs: megatron-core's 1F1B posts those of the next.
RECEIVES_AHEAD = {"blocking": 1, "overlapped": 4}


@dataclass(frozen=True, slots=True)
class Framework:
    """Settings with the defaults that users of Megatron-type stacks have; the simulator prices and training runs them.

    Attributes:
        distributed_optimizer: whether gradients and optimizer states are sharded over data and context parallelism.
        overlap_grad_reduce: whether gradients are synchronised in buckets while the last backward of a stage, and
            whatever else its ranks still do, goes on.
        overlap_param_gather: whether sharded weights are gathered in buckets under the first forward of a stage,
            instead of right after the optimizer step.
        align_param_gather: whether all stages launch those gathers when the iteration begins, instead of each when its
            first forward does.
        p2p: ``blocking`` holds sender and receiver for the time of a transfer, as megatron-core's 1F1B does (it waits
            for its batch of sends and receives); ``overlapped`` leaves both free while links serve transfers in turn.
        sequence_parallel: whether ranks of a tensor-parallel group split by tokens what they do not split by weights.
        tp_overlap: share of tensor-parallel communication that hides behind computation, in [0, 1].
        freeze: modules that do not learn, but for the projectors of encoders (``ModuleSpec.frozen``).
    """

    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    align_param_gather: bool = True
    p2p: str = "blocking"
    sequence_parallel: bool = True
    tp_overlap: float = 0.0
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.p2p not in P2P:
            raise unknown_choice("p2p", self.p2p, P2P)
        require(0 <= self.tp_overlap <= 1, "tp_overlap", self.tp_overlap, "in [0, 1]")

    @property
    def receives_ahead(self) -> int:
        """Actions whose receives are posted while the present one runs."""
        return RECEIVES_AHEAD[self.p2p]

    def splits_tokens(self, tp: int) -> bool:
        """Whether the ranks of a tensor-parallel group of ``tp`` hold different tokens between products."""
        return self.sequence_parallel and tp > 1

    def check_modules(self, names: Sequence[str]) -> None:
        """Raise ``UserError`` if a module that is to be frozen is none of the model's, or all are."""
        for name in self.freeze:
            if name not in names:
                raise unknown_choice("freeze", name, names)
        require({*self.freeze} != {*names}, "freeze", [*self.freeze], "some modules only: something must learn")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Framework:
        """The settings among the top-level keys of a run."""
        given = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**given | {"freeze": tuple(str(name) for name in given["freeze"])})
