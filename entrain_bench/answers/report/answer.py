"""The answer: for every model and workload which strategy to use, by how much, how sure, why, and what failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from entrain_bench.answers.labels import consecutive
from entrain_bench.answers.report.cases import Case, main_cases
from entrain_bench.answers.report.page import Block, Bullets, Paragraph, Section, Table, Text, plain, row
from entrain_bench.answers.report.words import count, listing, of_case, runs_link, seconds, speedup, status

# What a row says beside the names that tell it apart.
USE, BY, AS_GOOD, WHY, WITHOUT, RUNS = "use", "speed-up", "as good", "why", "without result", "runs"
SURE = (
    "Speed-ups compare seed by seed; in brackets stands the 95% interval over seeds. As good are strategies that are "
    "not significantly slower than the fastest (paired tests, 5% for all of a row). A strategy that lacks a result at "
    "any seed is never recommended. Why: idle and busy seconds of an iteration, the baseline's first, means over the "
    "seeds with a result. The number of runs leads to their command."
)
ONE_SEED = "With one seed nothing is known about other samples of the same data: there are no intervals."


def answer(cases: Sequence[Case], main: str) -> Section:
    """The cases of the main setting.

    Args:
        cases: all that are compared.
        main: the main setting in words.
    """
    mine = main_cases(cases)
    seeds = sorted({seed for case in mine for seed in case.seeds})
    clusters = [] if "cluster=" in main else [listing(sorted({case.cluster for case in mine}))]
    setting = f"{', '.join([*clusters, main])}; seed{'s' if len(seeds) > 1 else ''}"
    blocks: list[Block] = [Bullets([*_sentences(mine)])]
    if len(seeds) == 1:
        blocks.append(plain(ONE_SEED))
    blocks.append(answer_table(mine, ["model", "workload"]))
    blocks.append(Paragraph((Text("Setting:", strong=True), Text(f"{setting} {consecutive(seeds)}."))))
    return Section("answer", "Which strategy to use", [*blocks, plain(SURE)])


def elsewhere(cases: Sequence[Case]) -> Section | None:
    """The same for every other setting in which several strategies ran; None if there is none."""
    others = [case for case in cases if case.setting and len(case.summary) > 1]
    if not others:
        return None
    words = "Settings are named by what differs from the main one, which the answer above is for."
    return Section("settings", "Other settings", [plain(words), answer_table(others, ["setting", "model", "workload"])])


def answer_table(cases: Sequence[Case], naming: Sequence[str]) -> Table:
    """A row a case."""
    rows = [
        row(
            *(str(getattr(case, name)) for name in naming),
            Text(case.labels[case.best[0]] if case.best else "none", strong=True),
            Text(by_how_much(case), link=case.anchor),
            # Labels may have commas.
            "; ".join(case.labels[name] for name in case.best[1:]) or "no other",
            why(case),
            "; ".join(f"{label} {status(case, name)}" for name, label in case.labels.items() if status(case, name))
            or "none",
            runs_link(case),
        )
        for case in cases
    ]
    return Table([*naming, USE, BY, AS_GOOD, WHY, WITHOUT, RUNS], rows, right=[RUNS])


def by_how_much(case: Case) -> str:
    """The best strategy's speed-up, and over which strategy."""
    if not case.best:
        return "-"
    if len(case.summary) == 1:
        return "nothing to compare with"
    base = case.labels[case.baseline]
    if case.best[0] == case.baseline:
        return f"{base} itself"
    if not case.summary[case.baseline]["num_ok"]:
        return f"{base} {status(case, case.baseline)}"
    return f"{speedup(case, case.best[0])} over {base}"


def why(case: Case) -> str:
    """Where the best strategy gains over the baseline, or the baseline over the next: busy and idle seconds."""
    if len(case.best) == 0 or case.best[0] == case.baseline or not case.summary[case.baseline]["num_ok"]:
        return "-"
    own, base = case.summary[case.best[0]], case.summary[case.baseline]
    parts = (f"{name} {seconds(base[f'{name}_s'])} to {seconds(own[f'{name}_s'])} s" for name in ("idle", "busy"))
    return ", ".join(parts)


def _also(case: Case) -> str:
    """Who is not told apart from the fastest."""
    others = [case.labels[name] for name in case.best[1:]]
    return f"; not significantly slower: {listing(others)}" if others else ""


def _sentences(cases: Sequence[Case]) -> Iterable[Sequence[Text]]:
    """Who wins where, in words, the most frequent first; where nobody can be recommended; and who lacks results."""
    winners: dict[str, list[Case]] = {}
    for case in cases:
        if case.best:
            winners.setdefault(case.labels[case.best[0]], []).append(case)
    for label, won in sorted(winners.items(), key=lambda item: (-len(item[1]), item[0])):
        where = "; ".join(f"{of_case(case)} ({by_how_much(case)}{_also(case)})" for case in won)
        yield (Text(label, strong=True), Text(f"is the fastest for {where}."))
    if nowhere := [of_case(case) for case in cases if not case.best]:
        yield (Text(f"No strategy has all its results for {listing(nowhere)}."),)
    if failing := sum(bool(case.problems) for case in cases):
        yield (Text(f"Some runs have no result in {count(failing, 'case')}:"), Text("which and why", link="failed"))
