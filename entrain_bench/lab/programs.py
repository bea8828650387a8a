"""The program of a configuration's first batch, which fidelity and calibration predict."""

from __future__ import annotations

from entrain_bench.config.schema import RunConfig
from entrain_bench.program import Program
from entrain_bench.run.experiment import Setting, prepare


def first_program(config: RunConfig) -> tuple[Setting, Program]:
    """What a configuration describes, and its first batch's program; ``UserError`` where settings do not fit."""
    setting = prepare(config)
    layout = setting.plan()
    shapes = setting.source.batch(0, config.global_batch, config.seed)
    return setting, setting.strategy.program(shapes, layout, setting.profile)
