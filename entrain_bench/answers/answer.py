"""The answer of some runs: who is the fastest, by how much, how sure, what ties, what did not run, why, what next.

``Answer.of`` computes it from records. ``Answer.to_dict`` holds all of it as plain values, and templates word these:
terminal, report, notebook, MLflow and figures show the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from entrain_bench.answers.cases import Case, GroupKey, Outcome, SeedGroup, StrategyResult, cases_of, name_of
from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.comparison import LeadSummary, Overall, Verdict, lead_of, overall, place_of, with_result
from entrain_bench.answers.labels import OURS
from entrain_bench.answers.posterior import ChanceSummary, rank_chances, split_draws
from entrain_bench.answers.statistics import Interval
from entrain_bench.config.tree import choices
from entrain_bench.records.records import Record

LOST = ("failed", "skipped")


class Pictures(Protocol):
    """Draws pictures of an answer, as PNG."""

    def standings(self, answer: Answer) -> bytes:
        """Iteration times of every strategy in every case."""
        ...

    def ranks(self, record: Record) -> bytes:
        """Draw what the ranks of a run hold and do, from its timeline."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """Compared runs.

    Attributes:
        records: the runs of all cases.
        varying: headings of the labels that groups differ in; names of cases and groups consist of them.
        names: by key of a group its name in its case.
        overall: speedups over the cases in which the baseline has all results, by variant, the fastest first.
        known: strategies that could have run.
        lost: planned runs without a record, by their overrides.
        draws: runs under posterior draws of the hardware constants, which are in no case.
    """

    records: Sequence[Record]
    cases: Sequence[Case]
    varying: Sequence[str]
    names: Mapping[GroupKey, str]
    overall: Mapping[str, Overall]
    known: frozenset[str] = frozenset()
    lost: Sequence[str] = ()
    draws: Sequence[Record] = ()

    @classmethod
    def of(cls, records: Sequence[Record], lost: Sequence[str] = ()) -> Answer:
        """Return the answer of some records; ``lost`` are planned runs without one."""
        usual, draws = split_draws(records)
        return _answer(usual, cases_of(usual, draws), (), known_strategies(records), lost, draws)

    def about(self, cases: Sequence[Case], headings: Sequence[str] = ()) -> Answer:
        """Return the answer of some of the cases; ``headings``: labels that name them, if not those that vary."""
        records = [record for case in cases for record in case.records]
        return _answer(records, cases, headings, self.known, self.lost, self.draws)

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
        """One for each group of every case."""
        return [result for case in self.cases for result in case.results]

    def variant(self, group: SeedGroup) -> str:
        """Return the name of a group in its case."""
        return self.names[group.key]

    def with_verdict(self, case: Case, *verdicts: Verdict) -> list[str]:
        """Return the names of a case's groups with one of some verdicts, the fastest first."""
        return [self.names[key] for key in case.comparison.with_verdict(*verdicts)]

    def first_and_ties(self, case: Case) -> tuple[list[str], list[str]]:
        """Return the names of the fastest and of all that are as good; if not decided, who may win, and nothing."""
        first = self.with_verdict(case, Verdict.FASTEST)
        good = self.with_verdict(case, Verdict.AS_GOOD)
        undecided = self.with_verdict(case, Verdict.OPEN)
        return ([*first, *good, *undecided], []) if undecided else (first, good)

    def case_name(self, case: Case) -> str:
        """Return the name of a case; empty if all runs do the same job."""
        return name_of(case.job, self.varying)

    @property
    def variants(self) -> list[str]:
        """Names of groups by display order of their strategies; without one, by name at the end."""
        orders = {self.variant(result.group): result.group.display_order for result in self.results}
        return sorted(orders, key=lambda variant: place_of(variant, orders[variant]))

    def side_by_side(self, is_shown: Callable[[Record], bool]) -> dict[str, Record]:
        """A run of every variant that ``is_shown`` in the first case with such runs, at the same seed if possible."""
        for case in self.cases:
            runs = {}
            for result in case.results:
                done = {seed: result.group.runs[seed] for seed in with_result(result.standing.times)}
                if shown := {seed: record for seed, record in done.items() if is_shown(record)}:
                    runs[self.variant(result.group)] = shown
            if runs:
                shared = set.intersection(*map(set, runs.values()))
                return {variant: by_seed[min(shared or by_seed)] for variant, by_seed in runs.items()}
        return {}

    @property
    def fastest(self) -> str:
        """The variant that is the fastest of the most cases; empty where there is nothing to compare."""
        wins = Counter(self.variant(case.winner) for case in self.cases if case.winner)
        return wins.most_common(1)[0][0] if wins else ""

    @property
    def winner(self) -> tuple[Case, SeedGroup] | None:
        """The fastest variant's first case that it wins, and its runs there; None without a winner."""
        won = ((case, case.winner) for case in self.cases if case.winner)
        return next(((case, group) for case, group in won if self.variant(group) == self.fastest), None)

    @property
    def gain(self) -> Interval | None:
        """The winner's speedup over the baseline, over all cases; None without one, and if the baseline wins."""
        if not self.winner:
            return None
        case, group = self.winner
        if len(self.cases) == 1 or group.strategy == case.baseline:
            return case.speedup(group)
        mean = self.overall.get(self.variant(group))
        return mean.speedup if mean else None

    @property
    def not_run(self) -> list[str]:
        """Known strategies without a run."""
        return sorted(self.known - {result.group.strategy for result in self.results})

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
            "leads": _our_leads(contested),
            "chances": _chances(self, contested),
            "overall": {name: asdict(mean) for name, mean in self.overall.items() if is_mean},
            "without_mean": [name for name in self.variants if name not in self.overall] if is_mean else [],
            **_doubts(self, contested),
            "fewer_seeds": _fewer_seeds(self, contested),
            "barred": [*_barred(self, contested)],
            "not_run": self.not_run,
            "several_ran": len({result.group.strategy for result in self.results}) > 1,
            "lost": [*self.lost],
            "num_planned": len(self.records) + len(self.draws) + len(self.lost),
            "problems": find_problems(self.results, self.varying or ["strategy"]),
            "num_runs": len(self.records),
            "without_result": count_lost(self.results),
        }

    def case_dicts(self, results_dir: str | None = None) -> list[dict[str, Any]]:
        """Return every case as plain values, with commands of its runs if their folder is given."""
        return [_case_dict(self, case, results_dir) for case in self.cases]


def _answer(
    records: Sequence[Record],
    cases: Sequence[Case],
    headings: Sequence[str],
    known: frozenset[str],
    lost: Sequence[str],
    draws: Sequence[Record],
) -> Answer:
    groups = [group for case in cases for group in case.groups.values()]
    by_strategy: dict[str, list[SeedGroup]] = {}
    for group in groups:
        by_strategy.setdefault(group.strategy, []).append(group)
    apart = {
        name: ["strategy", *(heading for heading in _varying(variants) if heading != "strategy")]
        for name, variants in by_strategy.items()
    }
    names = {group.key: name_of(group.options, apart[group.strategy]) for group in groups}
    comparisons = [case.comparison for case in cases if case.comparison.comparable]
    means = {names[key]: mean for key, mean in overall(comparisons).items()} if comparisons else {}
    return Answer(records, cases, [*headings] or _varying(groups), names, means, known, lost, draws)


def _varying(groups: Sequence[SeedGroup]) -> list[str]:
    first = groups[0].labels if groups else {}
    return [heading for heading in first if any(group.labels[heading] != first[heading] for group in groups)]


def known_strategies(records: Sequence[Record]) -> frozenset[str]:
    """Strategies that could run: the suite's, those of the records' folders if these are there, and those that ran."""
    folders = {record.config_dir for record in records if record.config_dir}
    files = (file.stem for folder in folders for file in (Path(folder) / "strategy").glob("*.yaml"))
    return frozenset([*choices("strategy"), *files, *(str(record.labels["strategy"]) for record in records)])


def _winners(answer: Answer, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Cases that ended alike, together: decided ones first, then those of the most cases."""
    ended: dict[tuple[Outcome, tuple[str, ...], tuple[str, ...]], list[Case]] = {}
    for case in cases:
        first, good = answer.first_and_ties(case)
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
            "num_strategies": sorted({len({group.strategy for group in case.groups.values()}) for case in alike}),
            "num_variants": sorted({len(case.groups) for case in alike}),
            "gains": [asdict(gain) for gain in gains],
        }


def _our_leads(cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Leads of our strategies over the fastest of all others, if each has one variant in every case."""
    groups = (group for case in cases for group in case.groups.values())
    leads: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(group.strategy for group in groups if group.family == OURS):
        variants = [[key for key, group in case.groups.items() if group.strategy == name] for case in cases]
        if all(len(keys) == 1 for keys in variants):
            times = [{key: one.times for key, one in case.comparison.standings.items()} for case in cases]
            summary = LeadSummary.of([lead_of(one, key) for one, (key,) in zip(times, variants, strict=True)])
            leads |= {name: asdict(summary)} if summary else {}
    return leads


def _chances(answer: Answer, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Chances of the strategy that is the fastest in most draws, and of ours; empty without draws."""
    drawn = [case for case in cases if case.chances]
    jobs = [case.chances for case in drawn]
    ours = {key for case in drawn for key, group in case.groups.items() if group.family == OURS}
    shown = dict.fromkeys([*rank_chances(jobs)[:1], *(key for job in jobs for key in job if key in ours)])
    return {answer.names[key]: asdict(chance) for key in shown if (chance := ChanceSummary.of(jobs, key))}


def _doubts(answer: Answer, cases: Sequence[Case]) -> dict[str, Any]:
    """Strategies that may be behind by chance (one seed, or not significantly slower), and doubtful intervals."""
    standings = [(case, key, standing) for case in cases for key, standing in case.comparison.standings.items()]
    behind = [
        (answer.names[key], standing.behind.num_values > 1, standing.verdict)
        for _, key, standing in standings
        if standing.behind
    ]
    single = [name for name, is_tested, _ in behind if not is_tested]
    unsure = [name for name, is_tested, verdict in behind if is_tested and verdict == Verdict.BEHIND]
    doubts: dict[str, dict[str, None]] = {}
    for case, key, standing in standings:
        if standing.speedup and standing.speedup.doubt and case.groups[key].strategy != case.baseline:
            doubts.setdefault(standing.speedup.doubt, {})[answer.names[key]] = None
    return {
        "is_single_seed": bool(single) and {*single} == {name for name, *_ in behind},
        "single_seed": [*dict.fromkeys(single)],
        "not_significant": [*dict.fromkeys(unsure)],
        "doubts": {doubt: [*names] for doubt, names in doubts.items()},
    }


def _fewer_seeds(answer: Answer, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Strategies without a record at seeds that others ran: names by the seeds that they did run."""
    lacking: dict[tuple[int, ...], dict[str, None]] = {}
    for case in cases:
        for group in case.groups.values():
            if len(group.runs) < len(case.comparison.seeds):
                lacking.setdefault(tuple(sorted(group.runs)), {})[answer.variant(group)] = None
    return [{"seeds": [*seeds], "strategies": [*names]} for seeds, names in lacking.items()]


def _barred(answer: Answer, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Failed strategies that would be ahead of the fastest."""
    for case in cases:
        for key in case.comparison.with_verdict(Verdict.FAILED):
            standing = case.comparison.standings[key]
            if standing.behind and standing.behind.mean < 1:
                done = with_result(standing.times)
                yield {
                    "strategy": answer.names[key],
                    "case": answer.case_name(case),
                    "seeds": [seed for seed in standing.times if seed not in done],
                    "speedup": 1 / standing.behind.mean,
                    "num_seeds": standing.behind.num_values,
                }


def find_problems(results: Sequence[StrategyResult], headings: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs without a result: status, name, seeds, number and reason; runs of equal reason are together."""
    alike: dict[tuple[str, str, int], list[StrategyResult]] = {}
    for result in results:
        for status in LOST:
            if lost := [record for record in result.group.runs.values() if record.status == status]:
                alike.setdefault((status, lost[0].reason, len(lost)), []).append(result)
    problems = []
    for (status, reason, _), members in alike.items():
        first = members[0].group.labels
        shared = [heading for heading in headings if len({one.group.labels[heading] for one in members}) == 1]
        named = [one for one in results if all(one.group.labels[heading] == first[heading] for heading in shared)]
        for part, names in [(members, shared)] if named == members else [([one], headings) for one in members]:
            runs = [run for one in part for run in one.group.runs.items()]
            seeds = [seed for seed, record in runs if record.status == status]
            name = name_of(part[0].group.labels, names) or "all"
            problems.append({"status": status, "name": name, "seeds": seeds, "num_runs": len(runs), "reason": reason})
    return problems


def count_lost(results: Sequence[StrategyResult]) -> dict[str, list[int]]:
    """Return the seeds of runs without a result by status, a seed for each run."""
    runs = [(record.status, seed) for result in results for seed, record in result.group.runs.items()]
    seeds = {status: [seed for one, seed in runs if one == status] for status in LOST}
    return {status: lost for status, lost in seeds.items() if lost}


def _case_dict(answer: Answer, case: Case, results_dir: str | None) -> dict[str, Any]:
    first, good = answer.first_and_ties(case)
    base = case.baseline_group
    return {
        "name": answer.case_name(case),
        "job": dict(case.job),
        "seeds": case.comparison.seeds,
        "baseline": case.baseline or None,
        "baseline_variant": answer.variant(base) if base else None,
        "outcome": case.outcome,
        "saving": case.saving,
        "fastest": first,
        "as_good": good,
        "strategies": [_result_dict(answer, case, result) for result in case.results],
        "num_runs": len(case.records),
        **({} if results_dir is None else {"commands": commands_of(case.records, results_dir)}),
    }


def _result_dict(answer: Answer, case: Case, result: StrategyResult) -> dict[str, Any]:
    standing = result.standing
    chance = case.chances.get(result.group.key)
    runs = []
    for seed, record in sorted(result.group.runs.items()):
        reason = {"reason": record.reason} if record.reason else {}
        time = {"iteration_time_s": standing.times[seed], "key": record.key}
        runs.append({"seed": seed, "status": record.status, **reason, **time})
    lead = asdict(chance.lead) if chance and chance.lead else None
    posterior = {"p_fastest": chance.probability, "num_draws": chance.num_draws, "lead": lead} if chance else None
    return {
        "name": answer.variant(result.group),
        "verdict": standing.verdict,
        "is_best": result.best,
        "iteration_time_s": _interval_dict(standing.time),
        "speedup": _interval_dict(standing.speedup),
        "time_over_fastest": _interval_dict(standing.behind),
        **({"posterior": posterior} if posterior else {}),
        "runs": runs,
    }


def _interval_dict(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    ends = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {**ends, "num_seeds": interval.num_values, "doubt": interval.doubt}
