"""Stages filled with the weights of Hugging Face's models compute what those compute: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from entrain_bench.train.modules import StageGroups
from entrain_bench.train.platform import prepare_platform
from support.train.published import CASES, module_errors, qwen25vl

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def alone() -> Iterator[StageGroups]:
    prepare_platform()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    yield StageGroups(group, group, group)
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_a_module_equals_the_published_one(alone: StageGroups, tmp_path: Path, case: str) -> None:
    found = module_errors(case, tmp_path, alone)
    assert len(found) > 20
    assert max(found.values()) < TOLERANCE, found


def test_qwen25vl_equals_the_published_one_from_pixels_to_loss(alone: StageGroups, tmp_path: Path) -> None:
    found = qwen25vl(tmp_path, alone)
    assert len(found) > 80
    assert max(found.values()) < TOLERANCE, found
