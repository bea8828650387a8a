"""The first lines of a report, for a manager: strategy, gain, reason, next step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.case import Case, SeedGroup
from entrain_bench.answers.commands import command_line, commands_of, decisive_overrides, results_word
from entrain_bench.answers.report.page import Fact, Facts
from entrain_bench.answers.report.spent import baseline_group, spent, spent_by_class
from entrain_bench.answers.sentences import NO_RESULT, ONE_SEED, WON, losses, outcome_of, posterior
from entrain_bench.answers.strategy_facts import runs_in
from entrain_bench.answers.text import TIME_WORDS, count, listing, seconds, speedup, spell_seeds
from entrain_bench.base.errors import UserError
from entrain_bench.config.given_plan import check_of_job

# Parts of the saved time that the reason names, and the least share of it that is worth naming.
MAX_PARTS = 2
LEAST_SHARE = 0.1
# With fewer seeds an interval says little; the seeds that the next step asks for.
ENOUGH_SEEDS = 3
NEXT_SEEDS = range(5)
# What ``recommend`` chooses itself, or does not take.
NOT_OF_A_JOB = ("strategy", "seed", "plan", "harness")
STATED = ("model", "workload", "cluster", "data", "global_batch", "microbatch_size")
AGAIN = "Run the winner again:"
ONLY_HERE = "In this suite alone: no other framework runs {name} unmodified."


def decision(answer: Answer, results_dir: str) -> Facts:
    """Return the strategy to use, its gain and reason, what did not run, where it runs today, and the next step.

    Args:
        answer: of the main setting, with at least one case.
        results_dir: folder of the runs, for commands.
    """
    text, command = _next_step(answer, results_dir)
    found = [
        Fact("Use", _use(answer)),
        Fact("Gain", f"{gain}." if (gain := gain_text(answer)) else ""),
        Fact("If constants are off", " ".join(posterior(answer, answer.cases))),
        Fact("Why", why(answer)),
        Fact("Not run", _not_run(answer)),
        Fact("Where it runs today", _where(answer)),
        Fact("Next step", text, command),
    ]
    return Facts([fact for fact in found if fact.text])


def winner_of(answer: Answer) -> tuple[Case, SeedGroup] | None:
    """The strategy that is the fastest of the most decided cases: the first of these, and its runs there."""
    decided = [case for case in answer.cases if case.best and outcome_of(answer, case)[0] == WON]
    wins = Counter(answer.variant(case.groups[case.best[0]]) for case in decided)
    found = [(case, case.groups[case.best[0]]) for case in decided]
    return next(((case, own) for case, own in found if answer.variant(own) == wins.most_common(1)[0][0]), None)


def gain_text(answer: Answer) -> str:
    """The winner's speedup over the baseline with its interval; empty without a winner, and if that is the baseline."""
    found = winner_of(answer)
    if found is None or not answer.baseline or found[1].strategy == answer.baseline:
        return ""
    case, group = found
    seeds = count(len(case.comparison.seeds), "seed")
    if len(answer.cases) == 1:
        gain = case.comparison.standings[tuple(group.own.values())].speedup
        where = seeds
    else:
        overall = answer.overall.get(answer.variant(group))
        gain = overall.speedup if overall else None
        where = f"geometric mean over {len(answer.cases)} cases, {seeds}"
    if gain is None:
        return ""
    sure = ONE_SEED if gain.num_values == 1 else gain.doubt or "95% confidence interval"
    return f"{speedup(gain)} over {answer.baseline}; {where}; {sure[0].lower()}{sure[1:].rstrip('.')}"


def why(answer: Answer) -> str:
    """Return what the winner saves of the baseline's iteration in its first case; empty if unknown."""
    found = winner_of(answer)
    base = baseline_group(found[0]) if found else None
    if found is None or base is None or base is found[1]:
        return ""
    case, group = found
    before = spent(base)
    after = spent(group)
    if not before.get("iteration") or not after.get("iteration"):
        return ""
    where = f" on {answer.case_name(case)}" if answer.case_name(case) else ""
    parts = _saved(spent_by_class(base), spent_by_class(group), TIME_WORDS)
    if not parts:
        coarse = {"idle": "idle", "busy": "busy"}
        first, last = ({n: part for n in coarse if (part := each[n]) is not None} for each in (before, after))
        parts = _saved(first, last, coarse)
    saves = f" It saves {listing(parts)}." if parts else ""
    times = f"{seconds(after['iteration'])} s instead of {seconds(before['iteration'])} s"
    return f"An iteration takes {times}{where}.{saves}"


def _saved(before: dict[str, float], after: dict[str, float], words: dict[str, str]) -> list[str]:
    """The largest savings, as seconds of an average GPU."""
    saved = {name: before[name] - after[name] for name in before if name in after}
    least = LEAST_SHARE * math.fsum(part for part in saved.values() if part > 0)
    # Stable: of equal savings the first class comes first.
    largest = sorted(saved, key=lambda name: -saved[name])[:MAX_PARTS]
    return [f"{seconds(saved[name])} s ({words[name]})" for name in largest if saved[name] > least]


def _use(answer: Answer) -> str:
    found = winner_of(answer)
    if found is None:
        lost = all(outcome_of(answer, case)[0] == NO_RESULT for case in answer.cases)
        return "No strategy has all its results." if lost else "Not decided."
    name = answer.variant(found[1])
    other = {}
    for case in answer.cases:
        outcome, first, good = outcome_of(answer, case)
        if outcome != WON or first[0] != name:
            other[answer.case_name(case)] = first[0] if outcome == WON else "not decided"
        elif good and len(answer.cases) == 1:
            return f"{name}; {listing(good)} {'is' if len(good) == 1 else 'are'} as good."
    if not other:
        return f"{name}, the fastest in all {len(answer.cases)} cases." if len(answer.cases) > 1 else f"{name}."
    exceptions = listing([f"{case}: {best}" for case, best in other.items()])
    return f"{name}, the fastest in {len(answer.cases) - len(other)} of {len(answer.cases)} cases ({exceptions})."


def _not_run(answer: Answer) -> str:
    """Strategies that did not run, planned runs without a record, and runs without a result; empty if all is there."""
    known = ""
    if answer.not_run:
        known = f"{len(answer.not_run)} of {len(answer.known)} strategies ({listing(answer.not_run)})."
    lost = f"{count(len(answer.lost), 'planned run')} without a record." if answer.lost else ""
    return " ".join(filter(None, (known, lost, losses(answer.results))))


def _where(answer: Answer) -> str:
    found = winner_of(answer)
    if found is None:
        return ""
    places = runs_in(found[1].strategy)
    if places is None:
        return f"{found[1].strategy} is not of this suite; its author knows."
    return f"{'; '.join(places)}." if places else ONLY_HERE.format(name=found[1].strategy)


def _next_step(answer: Answer, results_dir: str) -> tuple[str, str]:
    """Return the advice and the command for it."""
    found = winner_of(answer)
    case, group = found or (answer.cases[0], None)
    firsts = [next(iter(row.group.runs.values())) for row in answer.results]
    seeds = case.comparison.seeds
    if group is None or len(seeds) < ENOUGH_SEEDS:
        # The last override of a key counts.
        more = [replace(one, overrides=(*one.overrides, f"seed={seed}")) for one in firsts for seed in NEXT_SEEDS]
        return f"Run more seeds; now {spell_seeds(seeds)}:", " && ".join(commands_of(more, results_dir))
    record = next(iter(group.runs.values()))
    rerun = " && ".join(commands_of(group.runs.values(), results_dir))
    if str(record.labels["harness"]) != "simulate":
        return AGAIN, rerun
    values = decisive_overrides(record.overrides, record.config_dir)
    words = [f"{key}{text}" for key, text in values.items() if key.partition("/")[0].split(".")[0] not in NOT_OF_A_JOB]
    try:
        for word in words:
            if word.partition("=")[0] not in STATED:
                check_of_job("overrides", word)
    except UserError:
        # A recommendation would be for another job.
        return AGAIN, rerun
    return "Freeze a plan and judge it on fresh seeds:", command_line(
        ["recommend", *words, *results_word(results_dir)], record.config_dir
    )
