"""What a rank cannot hold is refused while it builds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from entrain_bench.run.experiment import prepare
from entrain_bench.train.running.build import build_runtime
from support.train.handover import config_from_json
from support.train.ranks import RankError, run_ranks
from support.train.runs import CPU, DISJOINT, build_here, configuration


def test_offloaded_modules_are_refused() -> None:
    with pytest.raises(RankError, match=r"layout.vision.offload: harness=train cannot offload weights"):
        run_ranks(_offloaded, 1, configuration(*DISJOINT), stay=False)


def _offloaded(_: int, config: str) -> None:
    setting = prepare(config_from_json(config))
    layout = setting.strategy.plan(setting.profile)
    vision, llm = layout.modules
    build_runtime(
        setting.job,
        replace(layout, modules=(replace(vision, offload=True), llm)),
        setting.executor,
        CPU,
        0,
        dist.group.WORLD,
    )


@pytest.mark.wide
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("encoder_cp=false", "not supported with harness=train and layout.cp=2 .vision"),
        ("encoder_optimizers=2", "must be 1 with harness=train. Use harness=simulate"),
    ],
)
def test_what_is_only_simulated_is_refused(setting: str, message: str) -> None:
    config = configuration("model=tiny", "strategy=megatron", "layout.tp=1", "layout.cp=2", setting)
    with pytest.raises(RankError, match=f"{setting}: {message}"):
        run_ranks(_built, 1, config, stay=False)


def _built(_: int, config: str) -> None:
    build_here(config)
