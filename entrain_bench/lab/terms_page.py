"""The page of ``entrain-bench check-terms``: the answer, every try, and options that were not tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from entrain_bench.answers.text import count, listing, markdown_table, percent
from entrain_bench.lab.terms import CONTENDERS, FACTORS, Gain, Outcome, Terms, Untried, Verdict

# Verdicts that the answer counts apart from leads that survive.
OTHERS = {Verdict.TIED: "tied", Verdict.LOST: "lost", Verdict.UNDECIDED: "undecided"}


def terms_answer(terms: Terms, outcome: Outcome) -> str:
    """One sentence: leads that survive, random values that gain, the largest gain."""
    verdicts = Counter(one.verdict for one in outcome.tries)
    others = [f"{verdicts[verdict]} {word}" for verdict, word in OTHERS.items() if verdicts[verdict]]
    survive = f"{verdicts[Verdict.SURVIVES]} of {count(len(outcome.tries), 'lead')} survive"
    rest = f" ({listing(others)})" if others else ""
    share = f"{100 * terms.tolerance:g}%"
    found = f"{len(outcome.gains)} of {count(outcome.num_ran, 'random value')} that ran gain over {share}"
    largest = max(outcome.gains, key=lambda one: one.gain, default=None)
    top = f", at most {percent(1 + largest.gain)} ({largest.strategy}, {largest.job})" if largest else ""
    return f"{survive}{rest}, and {found}{top}."


def terms_markdown(terms: Terms, outcome: Outcome) -> str:
    """The page: the answer, every try with its verdict, random values that gain, and options that were not tried."""
    rows = [
        [one.name, one.job, one.before, one.after, "" if one.lead is None else percent(1 + one.lead), one.verdict]
        for one in outcome.tries
    ]
    heading = ["try", "job", "leader before", "leader after", "lead over the runner-up", "lead"]
    factors = listing([f"{factor:g}" for factor in FACTORS], "or")
    share = f"{100 * terms.tolerance:g}%"
    options = [one.options for one in outcome.untried]
    parts = [
        f"# Random options and other terms\n\n{terms_answer(terms, outcome)}\n",
        "Written by `entrain-bench check-terms`; jobs and tries are in `experiments/terms.yaml`. "
        "One seed, unless said.\n",
        markdown_table(heading, rows, right=heading[4:5]),
        "## Random values of options\n",
        f"A draw changes about half of the options of a strategy's assigner and scheduler. A number becomes {factors} "
        f"times its own value, a word another one that is allowed. {terms.draws} draws for each strategy and job run "
        f"on the layout that the tuner chose for the strategy's own values. Those that are faster by more "
        f"than {share} on one seed run on {terms.seeds} seeds. Faster by more than {share} over all of these:\n",
        _gains(outcome.gains),
        "## Not tried\n",
        "- Options of planners are not drawn: they decide the layout, which the tuner searches.\n"
        "- No layout is tuned again for drawn values.\n"
        f"{_not_drawn(outcome)}"
        f"- {outcome.num_repeated} of {count(outcome.num_drawn, 'draw')} describe a run that was there already.\n"
        f"- {sum(map(bool, options))} draws and {options.count(())} strategies on a job have no result (below).\n"
        f"- The larger budget is given to the {terms.leaders} fastest of each job and `{terms.lpt}`.\n"
        f"- Changed jobs run strategies within {CONTENDERS:g}x of the fastest.\n",
        *([_untried(outcome.untried)] if outcome.untried else []),
    ]
    return "\n".join(parts)


def _gains(gains: Sequence[Gain]) -> str:
    ordered = sorted(gains, key=lambda one: (-one.gain, one.job, one.strategy, one.options))
    rows = [[one.job, one.strategy, f"`{' '.join(one.options)}`", percent(1 + one.gain)] for one in ordered]
    return markdown_table(["job", "strategy", "options", "gain"], rows, right=["gain"]) if rows else "None.\n"


def _not_drawn(outcome: Outcome) -> str:
    named = [f"`{name}` of {strategy}" for strategy, names in outcome.not_drawn.items() for name in names]
    return f"- Options that hold components or free names are not drawn: {', '.join(named)}.\n" if named else ""


def _untried(untried: Sequence[Untried]) -> str:
    """Draws without a result, by kind and strategy, with the first job, values and reason."""

    def kind(one: Untried) -> tuple[str, str]:
        return one.lack, one.strategy

    groups = [[*group] for _, group in groupby(sorted(untried, key=kind), kind)]
    rows = [
        [
            one.lack,
            one.strategy,
            str(len(group)),
            one.job,
            f"`{' '.join(one.options)}`" if one.options else "",
            one.reason,
        ]
        for group in groups
        for one in group[:1]
    ]
    return markdown_table(["no result", "strategy", "times", "first job", "values", "reason"], rows, right=["times"])
