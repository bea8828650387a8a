"""Training in a test: small settings, and the loop without a launcher."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import torch.distributed as dist

from entrain_bench.train import loop
from entrain_bench.train.handover import config_from_json

DISJOINT = ("model=tiny", "strategy=megatron", "layout.tp=1", "layout.pp=2", "layout.dp=2")
ONE_RANK = (
    "model=tiny",
    "strategy=hetero_colocated",
    "harness.num_ranks=1",
    "cluster.gpus_per_node=1",
    "cluster.tiers=[{name: network, bandwidth_bytes_per_s: 6.0e9, latency_s: 14.0e-6}]",
)


def train_here(config: str, control: dist.ProcessGroup | None = None) -> list[dict[str, float]]:
    """The metrics of every iteration, on rank 0; to be called on all ranks, without a launcher."""
    with patch.object(loop, "process_group", lambda *_: nullcontext(control or dist.group.WORLD)):
        outcome = loop.train(config_from_json(config), lambda _: None)
    return [dict(row) for row in outcome.iterations] if outcome else []
