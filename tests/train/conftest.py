"""What tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from entrain_bench.train.modules import StageGroups
from entrain_bench.train.platform import prepare_platform


@pytest.fixture(scope="module")
def alone() -> Iterator[StageGroups]:
    """Groups of one rank, this process."""
    prepare_platform()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    yield StageGroups(group, group, group)
    dist.destroy_process_group()
