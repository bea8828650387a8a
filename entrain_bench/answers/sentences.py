"""The sentences of an answer, the same wherever it is shown: who is the fastest, of whom, how sure, what is lost.

And the same as JSON, and what a user should know of the runs' samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.case import Case, SeedGroup, StrategyResult
from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.comparison import AS_GOOD, BEHIND, FAILED, FASTEST, OPEN, with_result
from entrain_bench.answers.labels import OURS
from entrain_bench.answers.leads import lead_of, lead_sentence
from entrain_bench.answers.posterior import Chance, posterior_sentences
from entrain_bench.answers.statistics import Doubt, Interval
from entrain_bench.answers.text import MAX_NAMES, count, listing, name_of, speedup, spell_seeds, times
from entrain_bench.records.records import Record
from entrain_bench.specs.workload import Counts

PAST = {"failed": ("failed", "failed"), "skipped": ("was skipped", "were skipped")}
# Between what decides a sentence: what became of a case.
type RunResult = tuple[str, tuple[str, ...], tuple[str, ...]]
ONE_SEED = "Only one seed was run, so differences may be noise."
WON = "decided"
NOT_DECIDED = "not decided"
NO_RESULT = "no strategy has all its results"


def sentences(answer: Answer) -> list[str]:
    """Return the statements of an answer; none if there is nothing to compare."""
    contested = [case for case in answer.cases if case.contested]
    found = [*_winners(answer, contested), *_ours(contested), *posterior(answer, contested), *_over_cases(answer)]
    if contested:
        found += [*_trust(answer, contested), *_unequal_seeds(answer, contested), *_failed(answer, contested)]
    if answer.not_run and len(answer.ran) > 1:
        found.append(f"Not run: {', '.join(answer.not_run)}.")
    if answer.lost:
        planned = count(len(answer.records) + len(answer.draws) + len(answer.lost), "planned run")
        found.append(f"{len(answer.lost)} of {planned} left no record: {listing(answer.lost)}.")
    return found


def outcome_of(answer: Answer, case: Case) -> RunResult:
    """Return the outcome of a case: verdict, fastest strategies, and those as good."""
    names = {own: answer.variant(group) for own, group in case.groups.items()}
    verdicts = case.comparison.with_verdict
    first, good, undecided = ([names[own] for own in verdicts(word)] for word in (FASTEST, AS_GOOD, OPEN))
    if not first:
        return NO_RESULT, (), ()
    return (NOT_DECIDED, (*first, *good, *undecided), ()) if undecided else (WON, tuple(first), tuple(good))


def over_baseline(case: Case, group: SeedGroup) -> str:
    """A group's speedup over the baseline; empty without one, and for the baseline itself."""
    gain = case.comparison.standings[tuple(group.own.values())].speedup
    if gain is None or not case.baseline or group.strategy == case.baseline:
        return ""
    return f"{speedup(gain)} over {case.baseline}"


def problems(results: Sequence[StrategyResult], headings: Sequence[str]) -> Iterator[str]:
    """Lines on runs without a result: how many, at which seeds, why; one line for all runs of equal reason."""
    groups: dict[tuple[str, str, int], list[StrategyResult]] = {}
    for result in results:
        for status in PAST:
            if lost := [each for each in result.group.runs.values() if each.status == status]:
                groups.setdefault((status, lost[0].reason, len(lost)), []).append(result)
    for (status, reason, _), alike in groups.items():
        shared = [each for each in headings if len({result.group.labels[each] for result in alike}) == 1]
        first = alike[0].group.labels
        named = [result for result in results if all(result.group.labels[each] == first[each] for each in shared)]
        for part, names in [(alike, shared)] if named == alike else [([result], headings) for result in alike]:
            runs = [(seed, record.status) for result in part for seed, record in result.group.runs.items()]
            seeds = [seed for seed, found in runs if found == status]
            name = name_of(part[0].group.labels, names) or "all"
            yield f"{status}: {name}, {len(seeds)} of {len(runs)} runs ({spell_seeds(seeds)}): {reason}"


def losses(results: Sequence[StrategyResult]) -> str:
    """How many of all runs have no result, and at which seeds, in one sentence; empty if all have."""
    runs = [(seed, record.status) for result in results for seed, record in result.group.runs.items()]
    parts = []
    for status, (one, several) in PAST.items():
        if seeds := [seed for seed, found in runs if found == status]:
            parts.append(f"{len(seeds)} {one if len(seeds) == 1 else several} ({spell_seeds(seeds)})")
    return f"Of {count(len(runs), 'run')} {' and '.join(parts)}." if parts else ""


def _winners(answer: Answer, cases: Sequence[Case]) -> Iterator[str]:
    outcomes: dict[RunResult, list[Case]] = {}
    for case in cases:
        outcomes.setdefault(outcome_of(answer, case), []).append(case)
    for (word, first, good), mine in sorted(outcomes.items(), key=lambda item: (item[0][0] != WON, -len(item[1]))):
        where = _places(answer, mine, len(cases))
        if word == NO_RESULT:
            yield f"No strategy has all its results{where}."
        elif word == NOT_DECIDED:
            yield f"Not decided{where}: {listing(first, 'or')}. They did not run at the same seeds."
        else:
            also = f" As good: {listing(good)}." if good else ""
            yield f"{first[0]} is the fastest{_of(answer, mine)}{where}{_gain(mine)}.{also}"


def _of(answer: Answer, cases: Sequence[Case]) -> str:
    """Of how many strategies that ran, and how many are known; of variants where one strategy has several."""
    ran = sorted({len({group.strategy for group in case.groups.values()}) for case in cases})
    groups = sorted({len(case.groups) for case in cases})
    if ran == [1]:
        return f" of {_range(groups)} variants"
    known = len(answer.known)
    text = f" of {_range(ran)}" + (f" of {known}" if known > ran[-1] else "") + " strategies"
    return f"{text} ({_range(groups)} variants)" if groups != ran else text


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


def _places(answer: Answer, cases: Sequence[Case], num_cases: int) -> str:
    """Where some cases are: by name, or how many of them."""
    if len(cases) == num_cases:
        return f" in {'both' if num_cases == 2 else f'all {num_cases}'} cases" if num_cases > 1 else ""
    if len(cases) > MAX_NAMES:
        return f" in {len(cases)} of {num_cases} cases"
    return f" on {', '.join(map(answer.case_name, cases))}"


def _gain(cases: Sequence[Case]) -> str:
    """The speedup of the fastest over the baseline, from the least to the greatest of several cases."""
    texts = [text for case in cases if (text := over_baseline(case, case.groups[case.best[0]]))]
    if len(texts) < 2:
        return f" ({texts[0]})" if texts else ""
    means = [gain.mean for case in cases if (gain := case.comparison.standings[case.best[0]].speedup)]
    return f" ({times(min(means))} to {times(max(means))} over {cases[0].baseline})"


def _over_cases(answer: Answer) -> Iterator[str]:
    """Speedups over all cases, and who has none there."""
    if len(answer.cases) < 2 or not answer.baseline:
        return
    found = answer.overall
    if listed := [f"{name} {speedup(each.speedup)}" for name, each in found.items() if name != answer.baseline]:
        yield f"Speedup over {answer.baseline}, geometric mean over cases and seeds: {', '.join(listed)}."
    if without := [name for name in answer.variants if name not in found]:
        yield f"Without a mean, for lack of results: {listing(without)}."


def _ours(cases: Sequence[Case]) -> Iterator[str]:
    """Our strategies over the fastest of all others, where each has one variant in every case."""
    groups = (group for case in cases for group in case.groups.values())
    for name in dict.fromkeys(group.strategy for group in groups if group.family == OURS):
        found = [[own for own, group in case.groups.items() if group.strategy == name] for case in cases]
        if all(len(own) == 1 for own in found):
            times = [{own: each.times for own, each in case.comparison.standings.items()} for case in cases]
            leads = [lead_of(each, own) for each, (own,) in zip(times, found, strict=True)]
            yield from filter(None, [lead_sentence(leads, name, "case")])


def posterior(answer: Answer, cases: Sequence[Case]) -> list[str]:
    """P(fastest) of the strategy that is the fastest in most draws, and of ours; nothing without draws."""
    drawn = [(case, found) for case in cases if (found := answer.chances(case))]
    names = {own: answer.variant(case.groups[own]) for case, found in drawn for own in found}
    ours = [own for own in names if any(own in case.groups and case.groups[own].family == OURS for case, _ in drawn)]
    return posterior_sentences([found for _, found in drawn], names, ours, "case")


def _trust(answer: Answer, cases: Sequence[Case]) -> Iterator[str]:
    """Who is behind by chance perhaps: compared at one seed only, or not significantly slower."""
    pairs = [
        (answer.variant(case.groups[own]), standing.behind.num_values == 1, standing.verdict == BEHIND)
        for case in cases
        for own, standing in case.comparison.standings.items()
        if standing.behind
    ]
    single = [*dict.fromkeys(name for name, is_single, _ in pairs if is_single)]
    unsure = [*dict.fromkeys(name for name, is_single, is_behind in pairs if is_behind and not is_single)]
    if single and len(single) == len({name for name, *_ in pairs}):
        yield ONE_SEED
    elif single:
        yield f"Compared at one seed only, where chance is not ruled out: {listing(single)}."
    if unsure:
        yield f"Slower, though not significantly: {listing(unsure)}."
    doubts: dict[Doubt, dict[str, None]] = {}
    for case in cases:
        for own, standing in case.comparison.standings.items():
            if standing.speedup and standing.speedup.doubt and case.groups[own].strategy != case.baseline:
                doubts.setdefault(standing.speedup.doubt, {})[answer.variant(case.groups[own])] = None
    for doubt, names in doubts.items():
        yield f"{doubt} ({listing([*names])})."


def _unequal_seeds(answer: Answer, cases: Sequence[Case]) -> Iterator[str]:
    """Who has no record at seeds that others ran."""
    lacking: dict[str, dict[str, None]] = {}
    for case in cases:
        seeds = case.comparison.seeds
        for group in case.groups.values():
            if len(group.runs) < len(seeds):
                lacking.setdefault(spell_seeds([*group.runs]), {})[answer.variant(group)] = None
    if lacking:
        parts = [f"{listing([*names])} at {seeds}" for seeds, names in lacking.items()]
        yield f"Fewer seeds than others: {'; '.join(parts)}. Every two are compared at the seeds that both ran."


def _failed(answer: Answer, cases: Sequence[Case]) -> Iterator[str]:
    """Who would be ahead of the fastest, had it not failed."""
    for case in cases:
        for own in case.comparison.with_verdict(FAILED):
            standing = case.comparison.standings[own]
            group = case.groups[own]
            if standing.behind and standing.behind.mean < 1:
                without = [seed for seed in standing.times if seed not in with_result(standing.times)]
                where = f" on {answer.case_name(case)}" if len(answer.cases) > 1 else ""
                yield (
                    f"{answer.variant(group)} cannot win{where}, for it has no result at {spell_seeds(without)}; its "
                    f"speedup over the fastest is {times(1 / standing.behind.mean)} at "
                    f"{count(standing.behind.num_values, 'other seed')}."
                )


def answer_json(answer: Answer, results_dir: str) -> list[dict[str, Any]]:
    """Every case as plain values: the job, who is the fastest, how each strategy does, and the commands of its runs."""
    return [_case(answer, case, results_dir) for case in answer.cases]


def _case(answer: Answer, case: Case, results_dir: str) -> dict[str, Any]:
    outcome, first, good = outcome_of(answer, case) if case.contested else ("nothing to compare", (), ())
    drawn = answer.chances(case)
    return {
        "job": dict(case.job),
        "seeds": case.comparison.seeds,
        "baseline": case.baseline or None,
        "outcome": outcome,
        "fastest": [*first],
        "as_good": [*good],
        "strategies": [_result(answer, result, drawn.get(tuple(result.group.own.values()))) for result in case.results],
        "commands": commands_of(case.records, results_dir),
    }


def _result(answer: Answer, result: StrategyResult, chance: Chance | None) -> dict[str, Any]:
    standing = result.standing
    runs = []
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
        **({"posterior": _chance(chance)} if chance else {}),
        "runs": runs,
    }


def _chance(found: Chance) -> dict[str, Any]:
    """P(fastest) over draws of the hardware constants, and the lead over the fastest other with its 90% interval."""
    lead = {"median": found.lead.median, "low": found.lead.low, "high": found.lead.high} if found.lead else None
    return {"p_fastest": found.probability, "num_draws": found.num_draws, "lead": lead}


def _interval(found: Interval | None) -> dict[str, Any] | None:
    if found is None:
        return None
    ends = {"mean": found.mean, "low": found.low, "high": found.high}
    return {**ends, "num_seeds": found.num_values, "doubt": found.doubt}


def notices(records: Sequence[Record]) -> list[str]:
    """Return notices on samples, then remarks of runs."""
    return [*sample_notices(records), *run_notices(records)]


def sample_notices(records: Sequence[Record]) -> list[str]:
    """Return a line on every workload that was truncated or reduced, each line once."""
    return list(dict.fromkeys(line for record in records for line in _lines(record)))


def run_notices(records: Sequence[Record]) -> list[str]:
    """Return the remarks of runs, each line once."""
    return list(dict.fromkeys(f"harness {r.labels['harness']}: {line}" for r in records for line in r.remarks))


def _lines(record: Record) -> Iterator[str]:
    for component, samples, share in _listed(record.samples):
        batch = record.config["global_batch"]
        name = f"workload {record.labels['workload']}" + (f", component {component}" if component else "")
        listed, truncated, dropped = (int(samples[each]) for each in ("listed", "truncated", "dropped"))
        if truncated or dropped:
            parts = [f"{count} {done}" for count, done in ((truncated, "truncated"), (dropped, "dropped")) if count]
            yield (
                f"{name}: of {listed + dropped} rows {' and '.join(parts)}, longer than the context of "
                f"model {record.labels['model']}"
            )
        if listed < share * batch:
            part = f"{100 * share:.3g}% of " if component else ""
            yield (
                f"{name}: {listed} row{'s' if listed > 1 else ''} for {part}a global batch of {batch}: every row is "
                f"used {share * batch / listed:.1f} times an iteration on average"
            )


def _listed(samples: Counts, component: str = "", share: float = 1.0) -> Iterator[tuple[str, dict[str, float], float]]:
    """Components by their path, empty for a workload that is none, with their counts and their share of all samples."""
    numbers = {name: value for name, value in samples.items() if not isinstance(value, Mapping)}
    share *= numbers.get("share", 1.0)
    if "listed" in numbers:
        yield component, numbers, share
    for name, value in samples.items():
        if isinstance(value, Mapping):
            yield from _listed(value, f"{component}.{name}".lstrip("."), share)
