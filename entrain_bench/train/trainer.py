"""``harness=train``: the same programs with real tensors, on ranks of this machine or under torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from entrain_bench.base.errors import UserError
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.metrics import RunResult
from entrain_bench.run.experiment import Watcher
from entrain_bench.train.settings import CONNECTIONS, MOST_CONNECTIONS, ON_LOOPBACK, TrainSettings


@dataclass(frozen=True, slots=True)
class DistributedTrainer(TrainSettings):
    """Trains on ranks that torch.distributed joins."""

    trains: ClassVar[Literal[True]] = True

    def train(self, config: RunConfig, progress: Watcher) -> RunResult:
        """Train on ranks started here, or as one of torchrun's: only rank 0 returns. Raises as ``run_on_ranks``."""
        # Imported where needed: torch takes seconds, and checking settings does without.
        from entrain_bench.train.launching import run_torchrun_rank, start_ranks

        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return start_ranks(config, self, progress)
        # CUDA reads it when it starts.
        os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            os.environ.update(ON_LOOPBACK)
        if (world := int(os.environ["WORLD_SIZE"])) != self.num_ranks:
            raise UserError(f"harness.num_ranks={self.num_ranks}: must be {world}, the ranks that torchrun started")
        return run_torchrun_rank(config, self, progress)
