"""The decision that an answer leads to: strategy, gain and reason, where it runs today, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.cases import Case, SeedGroup
from entrain_bench.answers.commands import command_line, commands_of, decisive_overrides, results_word
from entrain_bench.answers.comparison import Verdict
from entrain_bench.answers.strategy_facts import runs_in
from entrain_bench.base.errors import UserError
from entrain_bench.config.given_plan import check_of_job

# Parts of the saved time that the reason names, and the least share of it that is worth naming.
MAX_PARTS = 2
LEAST_SHARE = 0.1
COARSE = ("idle", "busy")
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
        "saving": _saving(answer, case, group),
        "runs_in": runs_in(group.strategy),
        "next": _after_winner(group, results_dir) if is_enough else _more_seeds(answer, results_dir),
    }


def _saving(answer: Answer, case: Case, group: SeedGroup) -> dict[str, Any] | None:
    """Seconds per iteration that the winner saves over the baseline in its first case; None if unknown."""
    base = case.baseline_group
    if base is None or base is group:
        return None
    before = base.seconds_by_part
    after = group.seconds_by_part
    if not before.get("iteration") or not after.get("iteration"):
        return None
    parts = _largest_savings(base.seconds_by_class, group.seconds_by_class)
    if not parts:
        coarse = ({name: part for name in COARSE if (part := each[name]) is not None} for each in (before, after))
        parts = _largest_savings(*coarse)
    times = {"before": before["iteration"], "after": after["iteration"]}
    return {"case": answer.case_name(case), **times, "parts": parts}


def _largest_savings(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The largest savings, as seconds of an average GPU; of equal ones the first class comes first."""
    saved = {name: before[name] - after[name] for name in before if name in after}
    least = LEAST_SHARE * math.fsum(part for part in saved.values() if part > 0)
    return {
        name: saved[name] for name in sorted(saved, key=lambda name: -saved[name])[:MAX_PARTS] if saved[name] > least
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
