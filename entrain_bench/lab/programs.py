"""The program of a configuration's first batch, which fidelity and calibration predict."""

from __future__ import annotations

from entrain_bench.config.schema import RunConfig
from entrain_bench.program import Program
from entrain_bench.run.experiment import Setting, prepare


def first_program(config: RunConfig) -> tuple[Setting, Program]:
    """Return what a configuration describes, and the program of its first batch.

    Raises:
        UserError: for settings that do not fit together, or without a layout.
    """
    setting = prepare(config)
    layout = setting.strategy.plan(setting.profile)
    shapes = setting.source.batch(0, config.global_batch, config.seed)
    return setting, setting.strategy.program(shapes, layout, setting.profile)
