"""Functions called on ranks that form a process group: results by rank, cores, failures."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from entrain_bench.base.errors import UserError
from entrain_bench.train.launching.launch import on_ranks
from support.train.ranks import start_server


def summed(number: int, fails: bool, group: dist.ProcessGroup) -> dict[str, Any]:
    if fails and group.rank() == 1:
        raise UserError("a=1: must be 2")
    total = torch.tensor([number + group.rank()])
    dist.all_reduce(total, group=group)
    return {"total": int(total), "rank": group.rank(), "cores": sorted(os.sched_getaffinity(0))}


def test_every_rank_returns_its_result_and_is_pinned() -> None:
    start_server()
    own = sorted(os.sched_getaffinity(0))
    cores = [own[-1], own[0]]
    found = on_ranks(summed, 2, 10, False, cores=cores)
    assert found == [{"total": 21, "rank": rank, "cores": [core]} for rank, core in enumerate(cores)]
