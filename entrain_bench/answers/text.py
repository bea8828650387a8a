"""How numbers, names and tables are written, wherever they are: intervals, seconds, speedups, lists, Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from entrain_bench.answers.case import NAMES
from entrain_bench.answers.statistics import Interval
from entrain_bench.records.time_shares import TIME_SHARES

# Names that a sentence lists before it says how many more there are.
MAX_NAMES = 8
# Where there is no number.
NOTHING = "-"
# Digits of the least time that are shown at least, and decimals at least and at most.
SIGNIFICANT = 3
DECIMALS = 3
MAX_DECIMALS = 6
# What the classes of GPU time are called.
TIME_WORDS = dict(
    zip(
        TIME_SHARES,
        (
            "ideal work",
            "slower computation: packs, splits",
            "recomputation",
            "communication",
            "unequal stages",
            "unequal replicas",
            "unequal microbatches, order",
            "pipeline fill and drain",
            "step: gradients, optimizer, weights",
            "unused GPUs",
        ),
        strict=True,
    )
)


def times(ratio: float) -> str:
    """A speedup: ``1.52x``."""
    return f"{ratio:.2f}x"


def percent(ratio: float) -> str:
    """A ratio as a change: ``+48.3%``."""
    return f"{100 * (ratio - 1):+.1f}%"


def ends(interval: Interval | None, spell: Callable[[float], str]) -> str:
    """The ends of an interval; a dash where there is none: ``1.48x to 1.56x``."""
    return f"{spell(interval.low)} to {spell(interval.high)}" if interval and interval.num_values > 1 else NOTHING


def speedup(interval: Interval | None) -> str:
    """A speedup and, of several seeds, its interval: ``1.52x (1.48 to 1.56)``."""
    if interval is None:
        return NOTHING
    text = ends(interval, "{:.2f}".format)
    return times(interval.mean) + (f" ({text})" if text != NOTHING else "")


def seconds(value: float | None, digits: int = DECIMALS) -> str:
    """Seconds without their unit; a dash where there are none."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def decimals(values: Sequence[float]) -> int:
    """Decimals that show enough of the least of some seconds."""
    enough = (n for n in range(DECIMALS, MAX_DECIMALS) if min(values, default=1.0) * 10**n >= 10 ** (SIGNIFICANT - 1))
    return next(enough, MAX_DECIMALS)


def count(number: int, noun: str, nouns: str = "") -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def listing(words: Sequence[str], word: str = "and") -> str:
    """``a, b and c``; of many the last are counted: ``a, b and 7 more``."""
    shown = [*words] if len(words) <= MAX_NAMES else [*words[: MAX_NAMES - 1], f"{len(words) - MAX_NAMES + 1} more"]
    *first, last = shown
    return f"{', '.join(first)} {word} {last}" if first else last


def consecutive(values: Sequence[int]) -> str:
    """Whole numbers in words: ``0 to 7`` of those in a row, others one by one."""
    if len(values) > 2 and [*values] == [*range(values[0], values[-1] + 1)]:
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def spell_seeds(seeds: Sequence[int]) -> str:
    """Seeds in words, each once: ``seed 3``, ``seeds 0, 2``, ``seeds 0 to 7``."""
    found = sorted({*seeds})
    return f"seed{'s' if len(found) > 1 else ''} {consecutive(found)}"


def name_of(labels: Mapping[str, str], headings: Sequence[str]) -> str:
    """Some labels as one text: names alone, other labels with their heading."""
    return " ".join(labels[each] if each in NAMES else f"{each}={labels[each]}" for each in headings if each in labels)


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table; columns whose heading is in ``right`` are aligned to the right."""
    rule = ["---:" if name in right else "---" for name in heading]
    lines = ([" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (heading, rule, *rows))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
