"""``harness=train``: the same programs with real tensors, on ranks of this machine or under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from entrain_bench.config.schema import RunConfig
from entrain_bench.costs.truth import CostTruth
from entrain_bench.errors import IncompatibleError, UserError, require, unknown_choice
from entrain_bench.records.outcome import Outcome

DEVICES = ("auto", "cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NON_FINITE = ("stop", "skip")


@dataclass(frozen=True, slots=True)
class TrainHarness:
    """Trains on ``num_ranks`` ranks.

    Attributes:
        truth: cost truth of the job, for predictions beside the measurements.
        memory_budget_bytes: memory of a rank that programs may use.
        num_ranks: ranks; must be those of the cluster.
        device: ``cpu`` (gloo), ``cuda`` (NCCL), or ``auto`` for a GPU where there is one.
        dtype: of parameters and activations; gradients are fp32.
        learning_rate, weight_decay, epsilon, clip_grad: of Adam; ``clip_grad`` 0 does not clip.
        timeout_s: longest time a rank waits for another while it trains.
        planning_timeout_s: longest time ranks wait for rank 0 to plan, or to compose an iteration.
        on_non_finite: what a loss that is not finite does: ``stop`` the run, or ``skip`` the optimizer step.
        checkpoint_dir: where checkpoints are written and resumed from; None for none.
        checkpoint_every: iterations between checkpoints.
        profile_dir: where ``torch.profiler`` leaves a trace of each rank; None for none.
    """

    truth: CostTruth
    memory_budget_bytes: float
    num_ranks: int = 4
    device: str = "auto"
    dtype: str = "float32"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    epsilon: float = 1e-8
    clip_grad: float = 1.0
    timeout_s: float = 120.0
    planning_timeout_s: float = 1800.0
    on_non_finite: str = "stop"
    checkpoint_dir: str | None = None
    checkpoint_every: int = 10
    profile_dir: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (("device", DEVICES), ("dtype", DTYPES), ("on_non_finite", NON_FINITE)):
            if getattr(self, name) not in choices:
                raise unknown_choice(f"harness.{name}", getattr(self, name), choices)
        require(self.num_ranks >= 1, "harness.num_ranks", self.num_ranks, "at least 1")
        for name in ("timeout_s", "planning_timeout_s"):
            require(getattr(self, name) > 0, f"harness.{name}", getattr(self, name), "positive")
        require(self.checkpoint_every >= 1, "harness.checkpoint_every", self.checkpoint_every, "at least 1")
        require(self.learning_rate >= 0, "harness.learning_rate", self.learning_rate, "at least 0")
        require(self.clip_grad >= 0, "harness.clip_grad", self.clip_grad, "at least 0 (0: no clipping)")
        if generators := self.truth.model.generators:
            raise IncompatibleError(
                f"model={self.truth.model.name}: has a generator ({generators[0].name}), which harness=train cannot "
                f"train; harness=simulate can"
            )
        cluster = self.truth.cluster
        if cluster.num_ranks != self.num_ranks:
            raise UserError(
                f"harness.num_ranks={self.num_ranks}: must be the {cluster.num_ranks} ranks of cluster={cluster.name}"
            )

    @property
    def torch_device(self) -> torch.device:
        """Where this process computes.

        Raises:
            UserError: if a GPU is asked for and there is none for this process.
        """
        if self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise UserError("harness.device=cuda: this machine has no CUDA device; cpu runs the same over gloo")
        local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        if local_ranks > found:
            raise UserError(f"harness.num_ranks={self.num_ranks}: {local_ranks} ranks on a machine with {found} GPUs")
        return torch.device("cuda", local)

    def train(self, config: RunConfig, progress: Callable[[int], None]) -> Outcome:
        """Train as configured: on ranks started here, or as one of torchrun's ranks where there are some.

        Of torchrun's ranks only rank 0 returns; the others end, having nothing to record.
        """
        _ = self.torch_device
        # Imported where needed: megatron-core takes seconds, and the process that starts the ranks does without.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            if (world := int(os.environ["WORLD_SIZE"])) != self.num_ranks:
                raise UserError(f"harness.num_ranks={self.num_ranks}: must be the {world} ranks that torchrun started")
            from entrain_bench.train.worker import run_torchrun_rank

            return run_torchrun_rank(config, self.timeout_s, progress)
        from entrain_bench.train.launch import start_ranks

        return start_ranks(config, self, progress)
