"""The sentences of an answer, the same wherever it is shown: ``templates/sentences.jinja`` words its values."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.comparison import (
    MARGIN,
    TIME,
    Standing,
    Verdict,
)
from entrain_bench.answers.posterior import Chance, ChanceSummary, rank_chances
from entrain_bench.answers.text import load_template, paragraphs_of
from entrain_bench.records.records import Record
from entrain_bench.specs.workload import Counts

# Above this share of an iteration, the host's work is named: training hides it only if hosts are as fast, and idle.
LONG_ASSIGNMENT = 0.05
ASSIGNMENT = "assignment_time_s"


def _say(macro: str, *values: Any) -> list[str]:
    return paragraphs_of(getattr(load_template("sentences.jinja").module, macro)(*values))


def _one(macro: str, *values: Any) -> str:
    return " ".join(_say(macro, *values))


def sentences(answer: Answer) -> list[str]:
    """Return the statements of an answer; none if there is nothing to compare."""
    return _say("all", answer.to_dict())


def short_answer(answer: Answer) -> str:
    """One sentence: which variants are the fastest, or nearly so, in the most cases, and their speedups."""
    cases = answer.contested
    wins = Counter(result.name for case in cases for result in case.results if _is_near(result.standing))
    names = [name for name, number in wins.items() if number == max(wins.values())]
    placed = [(case, result) for case in cases for result in case.results if result.name in names]
    gains = [gain for case, result in placed if (gain := case.speedup(result))]
    best = {"names": names, "num_won": wins[names[0]] if names else 0, "gains": [gain.mean for gain in gains]}
    seeds = max((gain.num_values for gain in gains), default=0)
    return _one("short", best | {"num_cases": len(cases), "num_seeds": seeds, "baseline": answer.baseline})


def _is_near(standing: Standing) -> bool:
    behind = standing.behind
    return standing.verdict == Verdict.FASTEST or (behind is not None and behind.mean <= MARGIN)


def problems(answer: Answer) -> list[str]:
    """Lines on runs without a result: how many, at which seeds, why; one line for all runs of equal reason."""
    return [_one("problem", problem) for problem in answer.to_dict()["problems"]]


def headline_sentences(ahead: Mapping[str, Any]) -> tuple[str, str]:
    """Leaders over jobs (``headline.ahead``): overall; of the published systems and in a framework today."""
    return _one("first", ahead), _one("rivals", ahead)


def posterior_sentences[Name: Hashable](
    jobs: Sequence[Mapping[Name, Chance]], labels: Mapping[Name, str], ours: Sequence[Name] = ()
) -> list[str]:
    """P(fastest) and lead over jobs, of the strategy that is the fastest in most draws, then of those of ``ours``."""
    ranked = rank_chances(jobs)
    named = dict.fromkeys([*ranked[:1], *(name for name in ours if name in ranked)])
    chances = {name: ChanceSummary.of(jobs, name) for name in named}
    return [_one("chance", labels[name], chance, "job") for name, chance in chances.items() if chance]


def notices(records: Sequence[Record]) -> list[str]:
    """Return notices on samples, then remarks of runs."""
    return [*sample_notices(records), *run_notices(records)]


def sample_notices(records: Sequence[Record]) -> list[str]:
    """Return a line on every workload that was truncated or reduced, each line once."""
    lines = dict[str, None]()
    for record in records:
        parts = [{"component": path, **counts, "share": share} for path, counts, share in _listed(record.samples)]
        if parts:
            lines |= dict.fromkeys(_say("samples", record.labels, record.config.get("global_batch"), parts))
    return [*lines]


def run_notices(records: Sequence[Record]) -> list[str]:
    """Return the remarks of runs, each line once."""
    return [*dict.fromkeys(f"harness {r.labels['harness']}: {line}" for r in records for line in r.remarks)]


def host_notices(records: Sequence[Record]) -> list[str]:
    """Return a line on strategies whose assignment takes more than ``LONG_ASSIGNMENT`` of an iteration on the host."""
    shares = dict[str, float]()
    for record in records:
        if record.status == "ok" and ASSIGNMENT in record.metrics:
            name = str(record.labels["strategy"])
            share = record.metrics[ASSIGNMENT] / record.metrics[TIME]
            shares[name] = max(share, shares.get(name, 0.0))
    return _say("host", [(name, share) for name, share in shares.items() if share > LONG_ASSIGNMENT])


def _listed(samples: Counts, component: str = "", share: float = 1.0) -> Iterator[tuple[str, dict[str, float], float]]:
    """Components by their path, empty for a workload that is none, with their counts and their share of all samples."""
    numbers = {name: value for name, value in samples.items() if not isinstance(value, Mapping)}
    share *= numbers.get("share", 1.0)
    if "listed" in numbers:
        yield component, numbers, share
    for name, value in samples.items():
        if isinstance(value, Mapping):
            yield from _listed(value, f"{component}.{name}".lstrip("."), share)
