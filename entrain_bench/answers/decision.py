"""The decision that an answer leads to: strategy, gain and reason, where it runs today, and what to do next."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.cases import SeedGroup
from entrain_bench.answers.commands import command_line, commands_of, decisive_overrides, results_word
from entrain_bench.answers.comparison import Verdict
from entrain_bench.answers.strategy_facts import runs_in
from entrain_bench.base.errors import UserError
from entrain_bench.config.given import check_of_job

# With fewer seeds an interval says little; the seeds that the next step asks for.
ENOUGH_SEEDS = 3
NEXT_SEEDS = range(5)
# Keys that ``recommend`` chooses itself or does not take, and keys that it takes in any case.
NOT_OF_A_JOB = ("strategy", "seed", "plan", "harness")
STATED = ("model", "workload", "cluster", "data", "global_batch", "microbatch_size")


class NextStep(StrEnum):
    """A next step after an answer."""

    MORE_SEEDS = "more seeds"
    RERUN = "rerun"
    RECOMMEND = "recommend"


def decide(answer: Answer, results_dir: str) -> dict[str, Any]:
    """Return the strategy to use, its gain and reason, what did not run, where it runs today, and the next step.

    Args:
        answer: of at least one case.
        results_dir: folder of the runs, for commands.
    """
    if not answer.winner:
        return {
            "winner": "",
            "has_result": any(answer.with_verdict(case, Verdict.FASTEST) for case in answer.cases),
            "next": _more_seeds(answer, results_dir),
        }
    case, group = answer.winner
    exceptions = {}
    for other in answer.cases:
        first, _ = answer.first_and_ties(other)
        if not other.comparison.best or first[0] != answer.fastest:
            exceptions[answer.case_name(other)] = first[0] if other.comparison.best else None
    is_enough = len(case.comparison.seeds) >= ENOUGH_SEEDS
    return {
        "winner": answer.fastest,
        "strategy": group.strategy,
        "as_good": answer.first_and_ties(case)[1] if len(answer.cases) == 1 else [],
        "exceptions": exceptions,
        "gain": asdict(answer.gain) if answer.gain else None,
        "num_seeds": len(case.comparison.seeds),
        "saving": {"case": answer.case_name(case), **case.saving} if case.saving else None,
        "runs_in": runs_in(group.strategy),
        "next": _after_winner(group, results_dir) if is_enough else _more_seeds(answer, results_dir),
    }


def _more_seeds(answer: Answer, results_dir: str) -> dict[str, Any]:
    firsts = [result.group.first for result in answer.results]
    # The last override of a key counts.
    more = [replace(one, overrides=(*one.overrides, f"seed={seed}")) for one in firsts for seed in NEXT_SEEDS]
    case, _ = answer.winner or (answer.cases[0], None)
    return {"kind": NextStep.MORE_SEEDS, "seeds": case.comparison.seeds, "commands": commands_of(more, results_dir)}


def _after_winner(group: SeedGroup, results_dir: str) -> dict[str, Any]:
    """A recommendation for the winner's job; its runs again, if recommendations are not for such jobs."""
    again = {"kind": NextStep.RERUN, "commands": commands_of(group.runs.values(), results_dir)}
    if str(group.first.labels["harness"]) != "simulate":
        return again
    values = decisive_overrides(group.first.overrides, group.first.config_dir)
    words = [f"{key}{text}" for key, text in values.items() if key.partition("/")[0].split(".")[0] not in NOT_OF_A_JOB]
    try:
        for word in words:
            if word.partition("=")[0] not in STATED:
                check_of_job("overrides", word)
    except UserError:
        return again
    command = command_line(["recommend", *words, *results_word(results_dir)], group.first.config_dir)
    return {"kind": NextStep.RECOMMEND, "commands": [command]}
