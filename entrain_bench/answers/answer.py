"""The answer of some runs: fastest strategy, its lead and certainty, ties, failures, reason and next step.

``Answer.of`` computes it from records. ``Answer.to_dict`` holds all of it as plain values, and templates word these:
terminal, report, notebook, MLflow and figures show the same answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from entrain_bench.answers.cases import Case, Outcome, StrategyResult, cases_of, name_of, varying
from entrain_bench.answers.commands import command_line, commands_of, decisive_overrides, quoted, results_word
from entrain_bench.answers.comparison import Verdict, overall
from entrain_bench.answers.labels import framework_of, runs_in
from entrain_bench.answers.places import places_of, published, today
from entrain_bench.answers.statistics import ENOUGH_SEEDS, Interval
from entrain_bench.base.errors import UserError
from entrain_bench.config.given import check_of_job
from entrain_bench.config.tree import choices
from entrain_bench.records.records import Record
from entrain_bench.records.tables import with_bounds

LOST = ("failed", "skipped")
# With fewer seeds more are the next step, and those that it asks for.
DECIDING_SEEDS = 3
NEXT_SEEDS = range(5)
# Keys that ``recommend`` chooses itself or does not take, and keys that it takes in any case.
NOT_OF_A_JOB = ("strategy", "seed", "plan", "harness")
STATED = ("model", "workload", "cluster", "data", "global_batch", "microbatch_size")
# Names of a job in those of the files of its plans, and their folder in the results folder.
CHOSEN = ("model", "workload", "cluster")
PLANS = "recommended"


class NextStep(StrEnum):
    """A next step after an answer."""

    MORE_SEEDS = "more seeds"
    RERUN = "rerun"
    RECOMMEND = "recommend"
    PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Answer:
    """Compared runs.

    Attributes:
        varying: headings of the labels that groups differ in; names of cases consist of them.
        overall: speedups over the cases in which the baseline has all results, by variant, the fastest first.
        known: strategies that could have run.
        lost: planned runs without a record, by their overrides.
    """

    records: Sequence[Record]
    cases: Sequence[Case]
    varying: Sequence[str]
    overall: Mapping[str, Interval]
    known: frozenset[str] = frozenset()
    lost: Sequence[str] = ()

    @classmethod
    def of(cls, records: Sequence[Record], lost: Sequence[str] = ()) -> Answer:
        """Return the answer of some records; ``lost`` are planned runs without one."""
        records = [*map(with_bounds, records)]
        cases = cases_of(records)
        comparisons = [case.comparison for case in cases if case.contested and case.comparison.comparable]
        differing = varying([result.labels for case in cases for result in case.results])
        means = overall(comparisons) if comparisons else {}
        return cls(records, cases, differing, means, known_strategies(records), lost)

    @property
    def baseline(self) -> str:
        """The strategy that speedups are over; empty if there is one only."""
        return self.cases[0].baseline if self.cases else ""

    @property
    def contested(self) -> list[Case]:
        """The cases with anything to compare."""
        return [case for case in self.cases if case.contested]

    @property
    def results(self) -> list[StrategyResult]:
        """All results of every case."""
        return [result for case in self.cases for result in case.results]

    @property
    def headings(self) -> Sequence[str]:
        """Headings of the labels that a result is called by, at least its strategy."""
        return self.varying or ["strategy"]

    def case_name(self, case: Case) -> str:
        """Return the name of a case; empty if all runs do the same job."""
        return name_of(case.job, self.varying)

    @property
    def fastest(self) -> str:
        """The variant that is the fastest of the most cases; empty where there is nothing to compare."""
        wins = Counter(case.winner.name for case in self.cases if case.winner)
        return wins.most_common(1)[0][0] if wins else ""

    @property
    def winner(self) -> tuple[Case, StrategyResult] | None:
        """The fastest variant's first case that it wins, and its result there; None without a winner."""
        won = ((case, case.winner) for case in self.cases if case.winner)
        return next(((case, result) for case, result in won if result.name == self.fastest), None)

    @property
    def gain(self) -> Interval | None:
        """The winner's speedup over the baseline, over all cases; None without one, and if the baseline wins."""
        if not self.winner:
            return None
        case, result = self.winner
        if len(self.contested) == 1 or result.strategy == case.baseline:
            return case.speedup(result)
        return self.overall.get(result.name)

    @property
    def not_run(self) -> list[str]:
        """Known strategies without a run."""
        return sorted(self.known - {result.strategy for result in self.results})

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain values; templates word them (``templates/sentences.jinja``)."""
        contested = self.contested
        baseline = self.baseline
        is_mean = len(self.cases) > 1 and bool(baseline)
        return {
            "baseline": baseline,
            "num_cases": len(self.cases),
            "num_contested": len(contested),
            "num_known": len(self.known),
            "winners": [*_winners(self, contested)],
            "overall": {name: asdict(mean) for name, mean in self.overall.items() if is_mean},
            **_doubts(contested),
            "fewer_seeds": _fewer_seeds(contested),
            "not_run": self.not_run,
            "several_ran": len({result.strategy for result in self.results}) > 1,
            "lost": [*self.lost],
            "num_planned": len(self.records) + len(self.lost),
            "problems": find_problems(self.results, self.headings),
        }

    def case_dicts(self, results_dir: str | None = None) -> list[dict[str, Any]]:
        """Return every case as plain values, with commands of its runs if their folder is given."""
        return [_case_dict(self, case, results_dir) for case in self.cases]

    def decision(self, results_dir: str) -> dict[str, Any]:
        """Return the recommended strategy, its speedup and reason, where it runs today, and the next step."""
        if not self.winner:
            has_result = any(case.comparison.with_verdict(Verdict.FASTEST) for case in self.cases)
            return {"winner": "", "has_result": has_result, "next": _more_seeds(self, results_dir)}
        case, result = self.winner
        bests = {self.case_name(other): other.comparison.best[:1] for other in self.contested}
        is_enough = len(case.comparison.seeds) >= DECIDING_SEEDS
        return {
            "winner": self.fastest,
            "strategy": result.strategy,
            "as_good": case.first_and_ties[1] if len(self.contested) == 1 else [],
            "exceptions": {name: next(iter(best), None) for name, best in bests.items() if best != [self.fastest]},
            "gain": asdict(self.gain) if self.gain else None,
            "num_seeds": len(case.comparison.seeds),
            "saving": {"case": self.case_name(case), **case.saving} if case.saving else None,
            "runs_in": runs_in(result.strategy),
            "rivals": _rivals(case),
            "next": _after_winner(result, results_dir) if is_enough else _more_seeds(self, results_dir),
        }


def job_name(names: Iterable[str]) -> str:
    """Return a job's name for files: letters, digits and dashes."""
    return "-".join(re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") for name in names)


def newest_plan(results_dir: str, names: Iterable[str]) -> Path | None:
    """Return the newest plan for this suite's runtime that ``recommend`` wrote for a job; None without one."""
    found = Path(results_dir, PLANS).glob(f"{job_name(names)}-*suite.yaml")
    return max(found, key=lambda path: (path.stat().st_mtime, path.name), default=None)


def known_strategies(records: Sequence[Record]) -> frozenset[str]:
    """Strategies that could run: the suite's, those of the records' folders if these are there, and those that ran."""
    folders = {record.config_dir for record in records if record.config_dir}
    files = (file.stem for folder in folders for file in (Path(folder) / "strategy").glob("*.yaml"))
    return frozenset([*choices("strategy"), *files, *(str(record.labels["strategy"]) for record in records)])


def _winners(answer: Answer, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    ended: dict[tuple[Outcome, tuple[str, ...], tuple[str, ...]], list[Case]] = {}
    for case in cases:
        first, good = case.first_and_ties
        ended.setdefault((case.outcome, tuple(first), tuple(good)), []).append(case)
    for (outcome, fastest, as_good), alike in sorted(
        ended.items(), key=lambda item: (item[0][0] != Outcome.DECIDED, -len(item[1]))
    ):
        gains = [gain for case in alike if case.winner and (gain := case.speedup(case.winner))]
        yield {
            "outcome": outcome.name,
            "fastest": [*fastest],
            "as_good": [*as_good],
            "cases": [answer.case_name(case) for case in alike],
            "num_strategies": sorted({len({result.strategy for result in case.results}) for case in alike}),
            "num_variants": sorted({len(case.results) for case in alike}),
            "gains": [asdict(gain) for gain in gains],
        }


def _doubts(cases: Sequence[Case]) -> dict[str, Any]:
    """Strategies that may be behind by chance (one seed, or not significantly slower), and too few seeds."""
    results = [result for case in cases for result in case.results]
    behind = [(one.name, one.standing.behind, one.standing.verdict) for one in results if one.standing.behind]
    single = _distinct(name for name, ratio, _ in behind if ratio.num_values == 1)
    speedups = [speedup for case in cases for one in case.results if (speedup := case.speedup(one))]
    return {
        "is_single_seed": bool(single) and {*single} == {name for name, *_ in behind},
        "single_seed": single,
        "not_significant": _distinct(
            name for name, ratio, verdict in behind if ratio.num_values > 1 and verdict == Verdict.BEHIND
        ),
        "has_few_seeds": any(1 < speedup.num_values < ENOUGH_SEEDS for speedup in speedups),
    }


def _distinct(texts: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(texts)]


def _fewer_seeds(cases: Sequence[Case]) -> list[dict[str, Any]]:
    lacking: dict[tuple[int, ...], list[str]] = {}
    for case in cases:
        for result in case.results:
            if len(result.runs) < len(case.comparison.seeds):
                lacking.setdefault(tuple(sorted(result.runs)), []).append(result.name)
    return [{"seeds": [*seeds], "strategies": _distinct(names)} for seeds, names in lacking.items()]


def find_problems(results: Sequence[StrategyResult], headings: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs without a result: status, names, seeds, number and reason; runs of equal reason are together."""
    alike: dict[tuple[str, str], list[tuple[StrategyResult, list[int]]]] = {}
    for result in results:
        for status in LOST:
            lost = {seed: record for seed, record in result.runs.items() if record.status == status}
            for reason in dict.fromkeys(record.reason for record in lost.values()):
                seeds = [seed for seed, record in lost.items() if record.reason == reason]
                alike.setdefault((status, reason), []).append((result, seeds))
    return [
        {
            "status": status,
            "names": [name_of(result.labels, headings) for result, _ in members],
            "seeds": [seed for _, seeds in members for seed in seeds],
            "num_runs": sum(len(result.runs) for result, _ in members),
            "reason": reason,
        }
        for (status, reason), members in alike.items()
    ]


def _case_dict(answer: Answer, case: Case, results_dir: str | None) -> dict[str, Any]:
    first, good = case.first_and_ties
    base = case.baseline_result
    return {
        "name": answer.case_name(case),
        "job": dict(case.job),
        "seeds": case.comparison.seeds,
        "baseline": case.baseline or None,
        "baseline_variant": base.name if base else None,
        "outcome": case.outcome,
        "saving": case.saving,
        "fastest": first,
        "as_good": good,
        "strategies": [_result_dict(result) for result in case.results],
        "num_runs": len(case.records),
        **({} if results_dir is None else {"commands": commands_of(case.records, results_dir)}),
    }


def _result_dict(result: StrategyResult) -> dict[str, Any]:
    standing = result.standing
    runs = []
    for seed, record in sorted(result.runs.items()):
        reason = {"reason": record.reason} if record.reason else {}
        time = {"iteration_time_s": standing.times[seed], "key": record.key}
        runs.append({"seed": seed, "status": record.status, **reason, **time})
    return {
        "name": result.name,
        "verdict": standing.verdict,
        "is_best": result.best,
        "iteration_time_s": asdict(standing.time) if standing.time else None,
        "speedup": asdict(standing.speedup) if standing.speedup else None,
        "time_over_fastest": asdict(standing.behind) if standing.behind else None,
        "runs": runs,
    }


def _rivals(case: Case) -> dict[str, dict[str, Any] | None]:
    """Return the fastest published strategy of a case, and the fastest that a framework runs today."""
    frameworks = {one.name: framework_of(one.first.config) for one in case.results}
    families = {one.name: one.family for one in case.results}
    labels = {name: name for name in families}
    places = places_of(case.comparison, labels, frameworks, families).values()
    rivals = {"published": published(places), "today": today(places)}
    return {kind: asdict(place) if place else None for kind, place in rivals.items()}


def _more_seeds(answer: Answer, results_dir: str) -> dict[str, Any]:
    firsts = [result.first for result in answer.results]
    # The last override of a key counts.
    more = [replace(one, overrides=(*one.overrides, f"seed={seed}")) for one in firsts for seed in NEXT_SEEDS]
    case, _ = answer.winner or (answer.cases[0], None)
    return {"kind": NextStep.MORE_SEEDS, "seeds": case.comparison.seeds, "commands": commands_of(more, results_dir)}


def _after_winner(result: StrategyResult, results_dir: str) -> dict[str, Any]:
    """The plan that ``recommend`` wrote, else a recommendation; the winner's runs again, if it is for no such job."""
    labels = result.first.labels
    if plan := newest_plan(results_dir, (str(labels[name]) for name in CHOSEN)):
        command = command_line([f"plan={quoted(str(plan))}"], result.first.config_dir)
        return {"kind": NextStep.PLAN, "commands": [command]}
    again = {"kind": NextStep.RERUN, "commands": commands_of(result.runs.values(), results_dir)}
    if str(result.first.labels["harness"]) != "simulate":
        return again
    values = decisive_overrides(result.first.overrides, result.first.config_dir)
    words = [f"{key}{text}" for key, text in values.items() if key.partition("/")[0].split(".")[0] not in NOT_OF_A_JOB]
    try:
        for word in words:
            if word.partition("=")[0] not in STATED:
                check_of_job("overrides", word)
    except UserError:
        return again
    command = command_line(["recommend", *words, *results_word(results_dir)], result.first.config_dir)
    return {"kind": NextStep.RECOMMEND, "commands": [command]}
