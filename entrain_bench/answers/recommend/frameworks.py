"""Recommendations kept within Megatron-LM: what it runs as it is is checked on plans and programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from entrain_bench.answers.recommend import megatron
from entrain_bench.answers.recommend.recommendation import Recommendation
from entrain_bench.answers.recommend.strategy_race import StrategyRace, StrategyVariant
from entrain_bench.program import Program
from entrain_bench.program.plan_file import TrainingPlan
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import ModelSpec

FRAMEWORKS = ("megatron",)
INDENT = "  "


def variants_within(names: Mapping[str, Sequence[str]], model: ModelSpec | None) -> list[StrategyVariant]:
    """The strategies, by name with the overrides under which Megatron-LM may run them.

    Each is considered with everything that it can recompute of a model; None leaves that as it is.
    """
    again = megatron.recomputation(model) if model else {"": None}
    return [
        StrategyVariant(
            f"{name}{suffix}",
            (f"strategy={name}", *own, *([] if modules is None else [f"layout.recompute=[{','.join(modules)}]"])),
        )
        for name, own in names.items()
        for suffix, modules in again.items()
    ]


def refusal(runner: StrategyRace, name: str, seed: int) -> str:
    """Why Megatron-LM does not run what a strategy plans at a seed; empty if it does."""
    job = prepare(runner.config(name, seed)).job
    reason = megatron.layout_refusal(job, runner.layout(name, seed)) or megatron.program_refusal(
        *_program(runner, name, seed)
    )
    return reason and f"{megatron.NAME} does not run it: {reason}"


def flag_lines(
    runner: StrategyRace, answer: Recommendation, plan: TrainingPlan, path: Path, width: int
) -> Iterator[str]:
    """Megatron-LM's flags for a plan, and how its microbatches are had."""
    job, program = _program(runner, answer.best, answer.seeds[0])
    yield f"Flags of {megatron.NAME}"
    # A flag and its value stay in one line.
    flags = " ".join(flag.replace(" ", "\0") for flag in megatron.flags(job, plan.layout, plan.job.microbatch_size))
    for line in textwrap.wrap(flags, width - 2 * len(INDENT), break_on_hyphens=False):
        yield INDENT + line.replace("\0", " ")
    feed = f"Microbatches: --dataloader-type external, BalancedBatchSampler.from_plan(shapes, '{path}')."
    if megatron.takes_arrivals(job, program):
        feed = "Samples as they arrive."
    yield from textwrap.wrap(feed, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
    yield ""


def _program(runner: StrategyRace, name: str, seed: int) -> tuple[Job, Program]:
    """The job of a run, and the program of its first iteration."""
    config = runner.config(name, seed)
    setting = prepare(config)
    shapes = setting.source.batch(0, config.global_batch, seed)
    return setting.job, setting.strategy.program(shapes, runner.layout(name, seed), setting.profile)
