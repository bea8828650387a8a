"""The page of some runs, and of what else is known: a pure function; and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from entrain_bench.answers.answer import Answer, Pictures
from entrain_bench.answers.case import Case
from entrain_bench.answers.commands import shared_overrides
from entrain_bench.answers.comparison import FAILED
from entrain_bench.answers.posterior import interval
from entrain_bench.answers.report.decision import decision
from entrain_bench.answers.report.evidence import (
    Anchor,
    claims_section,
    environment,
    fidelity_section,
    firmness,
    rerun,
)
from entrain_bench.answers.report.page import Block, Image, Page, Section, Table, Text, row
from entrain_bench.answers.report.read import Material, setting_of
from entrain_bench.answers.report.spent import baseline_group, spent
from entrain_bench.answers.sentences import (
    NO_RESULT,
    NOT_DECIDED,
    answer_json,
    outcome_of,
    over_baseline,
    problems,
    sentences,
)
from entrain_bench.answers.text import NOTHING, consecutive, count, seconds, speedup, times

TITLE = "Which balancing strategy to use"
SURE = (
    "A speedup is the baseline's time over the strategy's, seed by seed; in brackets stands the 95% confidence "
    "interval over seeds. As good are strategies that are not significantly slower than the fastest, and at most 5% "
    "slower. A strategy that failed at any seed cannot win."
)
HOW = (
    "Speedup over {base}: geometric mean over models and workloads at every seed, then over seeds with its 95% "
    "confidence interval. Strategies that lack a result have no mean, and cases in which {base} lacks one are left out."
)
PROBABLE = "P(fastest)"
PROBABLE_WORDS = (
    "P(fastest) is the share of posterior draws of the hardware constants in which the strategy is the fastest; each "
    "draw has plans and a seed of its own. Brackets hold its speedup over the fastest other strategy in 90% of draws."
)
PARTS = (
    "Means over seeds, in seconds of an iteration. Busy and idle are a GPU's average share: together they are the "
    "iteration; idle is bubble_ratio of it, and busy includes communication inside forwards and backwards. Exposed "
    "communication (exposed_comm_s) is the time a GPU waits for communication inside either. Step is the time before "
    "the first forward and after the last backward (iteration_time_s - core_time_s). The bound (lower_bound_s) holds "
    "for the layout that the strategy chose."
)


def page_of(material: Material, pictures: Pictures | None = None) -> Page:
    """The page of runs of which at least one has a result; drawing pictures takes most of the time."""
    main = material.main
    others = material.others
    cases = [*main.cases, *others.cases]
    places = {id(case): f"runs-{number}" for number, case in enumerate(cases, start=1)}

    def anchor(case: Case) -> str:
        return places[id(case)]

    failed = [*problems(material.answer.results, material.answer.varying or ["strategy"])]
    sections = [
        _decision(main, material.results_dir, pictures.standings(main) if pictures else None),
        _answer(main, material.notes, anchor),
        _ranking(main),
        _time_spent(main, anchor),
        firmness(main, others, anchor),
        _others(others, anchor),
        Section("failed", "Runs without a result", [failed]) if failed else None,
        claims_section(material.claims, material.results_dir) if material.claims is not None else None,
        fidelity_section(material.fidelity, pictures) if material.fidelity is not None else None,
        environment(material),
        rerun(material.answer.about(cases), anchor, material.results_dir),
    ]
    return Page(TITLE, [section for section in sections if section])


def report_json(material: Material) -> str:
    """The sentences and numbers of the page as JSON."""
    main = material.main
    others = material.others
    found = {
        "entrain_bench": material.version,
        "sentences": sentences(main),
        "cases": answer_json(main, material.results_dir),
        "other_settings": {"sentences": sentences(others), "cases": answer_json(others, material.results_dir)},
        "notes": [*material.notes],
    }
    return json.dumps(found, indent=1) + "\n"


def answer_page(answer: Answer, results_dir: str, standings: bytes | None = None) -> Page:
    """The decision on some runs alone, with a table of every case and the commands; at least one case.

    ``standings`` is the picture of the answer.
    """
    places = {id(case): f"runs-{number}" for number, case in enumerate(answer.cases, start=1)}

    def anchor(case: Case) -> str:
        return places[id(case)]

    table = _table(answer, anchor, answer.varying)
    sections = [
        _decision(answer, results_dir, standings),
        Section("answer", "Every case", [sentences(answer), table, SURE]),
        rerun(answer, anchor, results_dir),
    ]
    return Page(TITLE, sections)


def _decision(main: Answer, results_dir: str, standings: bytes | None) -> Section:
    """Return the part for readers who read nothing else."""
    blocks: list[Block] = [decision(main, results_dir)]
    if standings is not None:
        caption = "Iteration time: means over seeds, with 95% confidence intervals; the runs of the table below."
        blocks.append(Image(standings, caption))
    return Section("decision", "Decision", blocks)


def _answer(main: Answer, notes: Sequence[str], anchor: Anchor) -> Section:
    seeds = sorted({seed for case in main.cases for seed in case.comparison.seeds})
    setting = ", ".join(f"{heading} {text}" for heading, text in setting_of(main.cases[0]).items())
    shared = " ".join(shared_overrides(main.records, [*main.cases[0].job, "strategy", "seed"]))
    blocks: list[Block] = [
        [*sentences(main), *notes],
        _table(main, anchor, ["workload", "model"]),
        f"Setting: {setting}; {f'{shared}; ' if shared else ''}seeds {consecutive(seeds)}.",
        SURE,
        *([PROBABLE_WORDS] if any(map(main.chances, main.cases)) else []),
    ]
    return Section("answer", "Every case", blocks)


def _others(others: Answer, anchor: Anchor) -> Section | None:
    """The same for every other setting in which several strategies ran; None if there is none."""
    answer = others.about([case for case in others.cases if case.contested], others.varying)
    if not answer.cases:
        return None
    return Section("settings", "Other settings", [sentences(answer), _table(answer, anchor, answer.varying)])


def _table(answer: Answer, anchor: Anchor, naming: Sequence[str]) -> Table:
    names = [name for name in naming if name in answer.cases[0].job]
    drawn = any(answer.chances(case) for case in answer.cases)
    rows = []
    for case in answer.cases:
        failed = "; ".join(_without(answer, case)) or "none"
        runs = Text(f"{len(case.records)}", link=anchor(case))
        job = (case.job[name] for name in names)
        seeds = consecutive(case.comparison.seeds)
        use, gain, *rest = _verdict(answer, case)
        chance = [_probable(answer, case)] if drawn else []
        rows.append(row(*job, use, gain, *chance, *rest, failed, seeds, runs))
    heading = [
        *names,
        "use",
        "speedup",
        *([PROBABLE] if drawn else []),
        "as good",
        "why",
        "without result",
        "seeds",
        "runs",
    ]
    return Table(heading, rows, ["runs"])


def _probable(answer: Answer, case: Case) -> str:
    """P(fastest) of the fastest strategy, and the 90% interval of its speedup over the fastest other."""
    found = answer.chances(case)
    chance = found.get(case.best[0]) if case.best else None
    if chance is None:
        return NOTHING
    return f"{chance.probability:.2f}" + (f" ({interval(chance.lead)})" if chance.lead else "")


def _verdict(answer: Answer, case: Case) -> Iterator[str | Text]:
    """Yield the strategy to use, its speedup, those that are as good, and the reason."""
    outcome, first, good = outcome_of(answer, case)
    words = {NO_RESULT: "none", NOT_DECIDED: f"not decided: {' or '.join(first)}"}
    yield Text(words.get(outcome) or first[0], strong=True)
    if not case.best:
        yield from (NOTHING if case.contested else "nothing to compare with", NOTHING, NOTHING)
        return
    group = case.groups[case.best[0]]
    yield over_baseline(case, group) or (f"{case.baseline} itself" if group.strategy == case.baseline else NOTHING)
    yield "; ".join(good) or "no other"
    base = baseline_group(case)
    if not base or base is group or not (own := spent(group)) or not (other := spent(base)):
        yield NOTHING
    else:
        yield ", ".join(f"{part} {seconds(other[part])} to {seconds(own[part])} s" for part in ("idle", "busy"))


def _without(answer: Answer, case: Case) -> Iterator[str]:
    """Strategies with runs that have no result: ``dip failed at 2 of 8 seeds``."""
    for own in case.comparison.with_verdict(FAILED):
        group = case.groups[own]
        lost = [record.status for record in group.runs.values() if record.status != "ok"]
        yield f"{answer.variant(group)} {lost[0]} at {len(lost)} of {count(len(group.runs), 'seed')}"


def _ranking(main: Answer) -> Section | None:
    """Strategies over the cases of the main setting; None if there is one case only."""
    found = main.overall
    if len(main.cases) < 2 or len(found) < 2:
        return None
    rows = []
    for name, each in found.items():
        ends = f"{times(each.least)} to {times(each.greatest)}"
        best = f"{each.num_best} of {len(main.cases)}"
        rows.append(row(name, Text(speedup(each.speedup), link="rerun"), ends, best))
    heading = ["strategy", "speedup", "least to greatest", "fastest or as good"]
    how = HOW.format(base=main.baseline)
    return Section("ranking", "Ranking over workloads", [Table(heading, rows, heading[1:]), how])


def _time_spent(main: Answer, anchor: Anchor) -> Section:
    """Where an iteration's time goes under the baseline and the fastest strategy of every case."""
    parts = ["iteration", "busy", "idle", "exposed comm.", "step", "bound"]
    heading = ["workload", "model", "strategy", *(f"{name} (s)" for name in parts), "runs"]
    rows = []
    for case in main.cases:
        shown = [baseline_group(case), *(case.groups[own] for own in [*case.best, *case.groups][:1])]
        for group in {id(each): each for each in shown if each}.values():
            if found := spent(group):
                name = Text(main.variant(group), strong=tuple(group.own.values()) in case.best)
                runs = Text(f"{len(case.records)}", link=anchor(case))
                job = (case.job[each] for each in heading[:2])
                rows.append(row(*job, name, *(seconds(found[part]) for part in parts), runs))
    return Section("time", "Where the time goes", [Table(heading, rows, heading[3:]), PARTS])
