"""One process that acts as rank 0 of several: stages are built and run as in training, without other ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from entrain_bench.train.platform import prepare_platform


@contextmanager
def rank_of_many(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of ``num_ranks``; collectives return at once, with shapes as from all ranks.

    So a stage is built and run as its shard is in training; communication costs a copy of its result at most.
    """
    # PyTorch keeps its communication without partners, for tests of its own, under this name.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    prepare_platform()
    # Hooks hold earlier stages in circles that only the collector breaks.
    gc.collect()
    torch.cuda.empty_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
