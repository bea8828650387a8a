"""An answer as JSON: the same numbers and sentences as in the report, for programs."""

from __future__ import annotations

from typing import Any

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.case import Case, StrategyResult
from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.sentences import outcome_of
from entrain_bench.answers.statistics import Interval


def answer_json(answer: Answer, results_dir: str) -> list[dict[str, Any]]:
    """Every case as plain values: the job, who is the fastest, how each strategy does, and the commands of its runs."""
    return [_case(answer, case, results_dir) for case in answer.cases]


def _case(answer: Answer, case: Case, results_dir: str) -> dict[str, Any]:
    outcome, first, good = outcome_of(answer, case) if case.contested else ("nothing to compare", (), ())
    return {
        "job": dict(case.job),
        "seeds": case.comparison.seeds,
        "baseline": case.baseline or None,
        "outcome": outcome,
        "fastest": [*first],
        "as_good": [*good],
        "strategies": [_result(answer, result) for result in case.results],
        "commands": commands_of(case.records, results_dir),
    }


def _result(answer: Answer, result: StrategyResult) -> dict[str, Any]:
    standing, runs = result.standing, []
    for seed, record in sorted(result.group.runs.items()):
        reason = {"reason": record.reason} if record.reason else {}
        time = {"iteration_time_s": standing.times[seed], "key": record.key}
        runs.append({"seed": seed, "status": record.status, **reason, **time})
    return {
        "name": answer.variant(result.group),
        "verdict": standing.verdict,
        "iteration_time_s": _interval(standing.time),
        "speedup": _interval(standing.speedup),
        "time_over_fastest": _interval(standing.behind),
        "runs": runs,
    }


def _interval(found: Interval | None) -> dict[str, Any] | None:
    if found is None:
        return None
    ends = {"mean": found.mean, "low": found.low, "high": found.high}
    return {**ends, "num_seeds": found.num_values, "doubt": found.doubt}
