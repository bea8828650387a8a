"""Frameworks that a recommendation can be kept within: what they run as they are is checked on plans and programs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrain_bench.answers.recommend import megatron
from entrain_bench.answers.recommend.recommendation import Recommendation, reason_of
from entrain_bench.answers.recommend.strategy_race import Raced, StrategyRace, StrategyVariant
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.program.plan_file import TrainingPlan
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import ModelSpec

INDENT = "  "


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that exists, as it is.

    Attributes:
        name: what it is called.
        key: of a strategy's YAML: the overrides under which the framework may run it; without, it never does.
        overrides: of the job, for what the framework does whatever the strategy.
        recomputation: what of a model it can recompute, by name: each strategy is considered with each, unless
            ``layout.recompute`` is given.
        layout_refusal: why it cannot take a layout; empty if it can.
        program_refusal: why it would not run a program so; empty if it would.
        flags: of a layout and a microbatch size.
        takes_arrivals: whether a program's microbatches are samples as they arrive.
    """

    name: str
    key: str
    overrides: tuple[str, ...]
    recomputation: Callable[[ModelSpec], Mapping[str, Sequence[str]]]
    layout_refusal: Callable[[Job, Layout], str]
    program_refusal: Callable[[Job, Program], str]
    flags: Callable[[Job, Layout, int], list[str]]
    takes_arrivals: Callable[[Job, Program], bool]


FRAMEWORKS: Mapping[str, Framework] = {
    "megatron": Framework(
        "Megatron-LM",
        "within_megatron",
        megatron.OVERRIDES,
        megatron.recomputation,
        megatron.layout_refusal,
        megatron.program_refusal,
        megatron.flags,
        megatron.takes_arrivals,
    )
}


def variants_within(
    framework: Framework, names: Mapping[str, Sequence[str]], model: ModelSpec | None
) -> list[StrategyVariant]:
    """The strategies as a framework may run them.

    Args:
        framework: the framework.
        names: by strategy the overrides under which it may run them.
        model: whose recomputation is chosen; None leaves it as it is.
    """
    again = framework.recomputation(model) if model else {"": None}
    return [
        StrategyVariant(
            f"{name}{suffix}",
            (f"strategy={name}", *own, *([] if modules is None else [f"layout.recompute=[{','.join(modules)}]"])),
        )
        for name, own in names.items()
        for suffix, modules in again.items()
    ]


@dataclass(slots=True)
class Refusals:
    """What a framework does not run of what strategies planned.

    Attributes:
        framework: the framework; None takes everything.
        reasons: the first one for each strategy.
    """

    framework: Framework | None
    reasons: dict[str, str] = field(default_factory=dict)

    def check(self, runner: StrategyRace) -> Callable[[str, int], bool]:
        """Whether what a strategy of a runner plans at a seed is refused; remembers why."""

        def refused(name: str, seed: int) -> bool:
            reason = self._reason(runner, name, seed)
            if reason and self.framework:
                self.reasons.setdefault(name, f"{self.framework.name} does not run it: {reason}")
            return bool(reason)

        return refused

    def reasons_of(self, runner: StrategyRace, raced: Raced) -> dict[str, str]:
        """Why nobody of a race has a result, by name."""
        return {name: self.reasons.get(name) or reason_of(runner, raced, name) for name in raced.times}

    def lines(
        self, runner: StrategyRace, answer: Recommendation, plan: TrainingPlan, path: Path, width: int
    ) -> Iterator[str]:
        """The framework's flags for a plan, and how its microbatches are had."""
        if self.framework is None:
            return
        setting, program = _program(runner, answer.best, answer.seeds[0])
        yield f"Flags of {self.framework.name}"
        flags = self.framework.flags(setting, plan.layout, plan.job.microbatch_size)
        words = textwrap.wrap(
            " ".join(flag.replace(" ", "\0") for flag in flags), width - 2 * len(INDENT), break_on_hyphens=False
        )
        yield from (INDENT + line.replace("\0", " ") for line in words)
        feed = (
            "Samples as they arrive."
            if self.framework.takes_arrivals(setting, program)
            else f"Microbatches: --dataloader-type external, BalancedBatchSampler.from_plan(shapes, '{path}')."
        )
        yield from textwrap.wrap(feed, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)
        yield ""

    def _reason(self, runner: StrategyRace, name: str, seed: int) -> str:
        if self.framework is None:
            return ""
        layout = runner.layout(name, seed)
        job = prepare(runner.config(name, seed)).job
        return self.framework.layout_refusal(job, layout) or self.framework.program_refusal(
            *_program(runner, name, seed)
        )


def _program(runner: StrategyRace, name: str, seed: int) -> tuple[Job, Program]:
    """The job of a run, and the program of its first iteration."""
    config = runner.config(name, seed)
    setting = prepare(config)
    shapes = setting.source.batch(0, config.global_batch, seed)
    return setting.job, setting.strategy.program(shapes, runner.layout(name, seed), setting.profile)
