"""The plan of an answer, as its file has it."""

from __future__ import annotations

from collections.abc import Mapping

from entrain_bench.answers.recommend.recommendation import Recommendation
from entrain_bench.answers.recommend.strategy_race import JobOverrides
from entrain_bench.config.overrides import parse
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan

CHOSEN = ("model", "workload", "cluster")
# What the file states by itself; that a planner's options led to the layout, no one who takes it has to know.
STATED = (*CHOSEN, "global_batch", "microbatch_size")
OF_THE_PLANNER = ("strategy/planner", "strategy.planner", "layout.")


def plan_of_answer(answer: Recommendation, job: JobOverrides, usual: Mapping[str, str]) -> TrainingPlan:
    """The plan.

    Args:
        answer: whose fastest strategy it is of.
        job: what was asked for.
        usual: choices of groups where none was asked for.
    """
    keys = {parse(text).key_or_group: text for text in job.overrides}
    chosen = {name: keys[name].partition("=")[2] if name in keys else usual[name] for name in CHOSEN}
    config, layout, time = answer.config, answer.layout, answer.standing.time
    assert time
    llm = next(name for name, module in config.model["modules"].items() if module["role"] == "llm")
    num_microbatches = layout.module(llm).dp * layout.num_microbatches
    planned = PlannedJob(
        **chosen,
        global_batch=config.global_batch,
        microbatch_size=config.microbatch_size or -(-config.global_batch // num_microbatches),
        seed=config.seed,
        overrides=tuple(text for key, text in keys.items() if key not in STATED),
    )
    options = tuple(text for text in answer.variant.overrides[1:] if not text.startswith(OF_THE_PLANNER))
    expected = Expected(time.mean, time.low, time.high, time.num_values)
    return TrainingPlan(answer.variant.strategy, options, planned, layout, expected)
