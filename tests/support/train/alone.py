"""Groups of a single rank, this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from entrain_bench.train.modules import StageGroups
from entrain_bench.train.platform import prepare_platform


@contextmanager
def groups_of_one(backend: str) -> Iterator[StageGroups]:
    """The groups of a stage while there is a process group of one rank."""
    prepare_platform()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    yield StageGroups(group, group, group)
    dist.destroy_process_group()
