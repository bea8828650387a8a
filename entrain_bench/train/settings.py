"""The settings of ``harness=train``, checked before anything starts and without torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import cos, pi
from typing import Annotated

from entrain_bench.base.errors import IncompatibleError, UserError, require
from entrain_bench.config.hub.files import is_reference
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.parse import Count, OneOf, Rate, at_least
from entrain_bench.specs.sharding import HYBRID

NotNegative = Annotated[float, at_least(0)]
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")  # by torch's names
DECAYS = ("constant", "linear", "cosine")
NON_FINITE = ("stop", "skip")
TENSORBOARD, WANDB = TRACKERS = ("tensorboard", "wandb")
# Work queues from host to device, and as many as CUDA has.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = "32"
# Address of ranks that are all on one machine, independent of the interface of the user's other jobs.
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How ``num_ranks`` ranks train: ``experiments/harness/train.yaml``; predictions come from ``truth``."""

    truth: CostTruth
    memory_budget_bytes: float
    num_ranks: Count = 4
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    dtype: Annotated[str, OneOf(DTYPES)] = "auto"
    learning_rate: NotNegative = 1e-3
    min_learning_rate: float = 0.0
    warmup_iterations: Annotated[int, at_least(0)] = 0
    learning_rate_decay: Annotated[str, OneOf(DECAYS)] = "constant"
    decay_iterations: int = 0
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: NotNegative = 0.0
    epsilon: Rate = 1e-8
    clip_grad: NotNegative = 1.0
    weights: str | None = None
    save_weights: str | None = None
    timeout_s: Rate = 120.0
    planning_timeout_s: Rate = 1800.0
    on_non_finite: Annotated[str, OneOf(NON_FINITE)] = "stop"
    checkpoint_dir: str | None = None
    checkpoint_every: Count = 10
    report_to: Annotated[str, OneOf(TRACKERS)] | None = None

    def __post_init__(self) -> None:
        least = self.min_learning_rate
        peak = self.learning_rate
        warmup = self.warmup_iterations
        require(0 <= least <= peak, "harness.min_learning_rate", least, f"from 0 to learning_rate={peak}")
        fits = self.decay_iterations == 0 or self.decay_iterations > warmup
        allowed = f"0 (the run's), or above warmup_iterations={warmup}"
        require(fits, "harness.decay_iterations", self.decay_iterations, allowed)
        fits = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(fits, "harness.betas", [*self.betas], "two numbers from 0 to below 1")
        where = "null, or give model=hf:... or harness.weights, whose format it is"
        fits = self.save_weights is None or self.is_published
        require(fits, "harness.save_weights", self.save_weights, where)
        refuse_generators(self.truth.model, "harness=train")
        cluster = self.truth.cluster
        if cluster.num_ranks != self.num_ranks:
            raise UserError(
                f"harness.num_ranks={self.num_ranks}: must be {cluster.num_ranks}, the ranks of cluster={cluster.name}"
            )

    @property
    def is_published(self) -> bool:
        """Whether stages are those of a Hugging Face model, not the suite's own."""
        return self.weights is not None or is_reference(self.truth.model.name)

    def rate_at(self, iteration: int, num_iterations: int) -> float:
        """The learning rate of an iteration from 0: linear warm-up, then decay (cosine: arXiv:1608.03983, eq. 5)."""
        peak = self.learning_rate
        warmup = self.warmup_iterations
        if iteration < warmup:
            return peak * (iteration + 1) / warmup
        if self.learning_rate_decay == "constant":
            return peak
        top = max(warmup - 1, 0)
        last = (self.decay_iterations or num_iterations) - 1
        done = min(1.0, (iteration - top) / max(1, last - top))
        left = 1.0 - done if self.learning_rate_decay == "linear" else (1.0 + cos(pi * done)) / 2
        return self.min_learning_rate + (peak - self.min_learning_rate) * left


def refuse_generators(model: ModelSpec, who: str) -> None:
    """Raise ``IncompatibleError`` for a model whose layers the training runtime does not have."""
    if model.generators:
        raise IncompatibleError(
            f"model={model.name}: has a generator ({model.generators[0].name}), which {who} does not support. "
            "Use harness=simulate"
        )


def check_trained(layout: Layout, model: ModelSpec, framework: FrameworkOptions) -> None:
    """Raise ``IncompatibleError`` for a layout that only the simulator runs."""
    for module, given in zip(model.modules, layout.modules, strict=True):
        for tp, cp in given.degrees:
            framework.check_executable(module, cp, "train")
            if tp != given.tp and (given.scatters or (module.is_encoder and given.tp > 1)):
                raise IncompatibleError(
                    f"layout.{given.module}.widths: harness=train slices no sharded weights, nor an encoder's of "
                    f"TP {given.tp} for groups of TP {tp}. Use harness=simulate, or groups of one TP"
                )
        if given.sharding == HYBRID:
            raise IncompatibleError(
                f"layout.sharding={HYBRID}: harness=train does not run it ({given.module}). Use harness=simulate, or "
                "zero1, zero2, zero3, zero3_kept"
            )
        if given.offload:
            raise IncompatibleError(
                f"layout.{given.module}.offload: harness=train cannot offload weights. Use harness=simulate"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Hide messages of packages about missing optional packages and settings."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
