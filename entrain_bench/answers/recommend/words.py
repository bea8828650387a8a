"""An answer as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from entrain_bench.answers.comparison import Times
from entrain_bench.answers.console_table import GAP, NOTHING, Column, decimals, table_lines
from entrain_bench.answers.recommend.answer import Answer
from entrain_bench.answers.recommend.evidence import Firm
from entrain_bench.answers.recommend.layout_words import layout_lines
from entrain_bench.answers.recommend.race import AS_GOOD, FAR, FAR_BEHIND, SLOWER, Place, places
from entrain_bench.answers.recommend.spent_words import loss_words, spent_lines
from entrain_bench.answers.report.words import listing
from entrain_bench.answers.statistics import Interval
from entrain_bench.answers.words import spell_seeds
from entrain_bench.records.records import labels_of

GIB = 2**30
INDENT = "  "
# Narrower, columns and words go one below the other.
LEAST_WIDTH = 40
# Strategies that a line on the race so far names.
NUM_NAMED = 3


def answer_lines(answer: Answer, width: int) -> Iterator[str]:
    """The whole answer.

    Args:
        answer: what is known.
        width: places of a line; names and numbers are never cut.
    """
    yield from _wrapped(headline(answer), width)
    yield from _wrapped(setting(answer), width)
    yield ""
    yield from ranking_lines(answer.places, width)
    if len(answer.spent) > 1:
        yield from _wrapped(_seeds_word(answer), width)
    for name, reason in answer.reasons.items():
        yield from _wrapped(f"No result: {name}: {reason}", width, hang=INDENT)
    yield ""
    yield from _section("Layout", _layout(answer), width)
    yield from _section("Memory", [_memory(answer)], width)
    seeds = spell_seeds([int(record.labels["seed"]) for record in answer.records[answer.best.name]])
    yield from _wrapped(f"Where the time goes, seconds of an iteration (a GPU's average, {seeds})", width)
    yield from (INDENT + line for line in spent_lines(answer.spent, width - len(INDENT)))
    yield from _hung(loss_words(answer.spent), width)
    yield ""
    yield from _section("Room", [_room(answer)], width)
    if answer.firm:
        yield from _section(_firm_heading(answer), [*_firm_lines(answer)], width)


def no_result_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """Why nobody has a result: the reason that most give, and where there are several a line for each with its names.

    Args:
        reasons: by strategy.
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    ranked = sorted(names, key=lambda reason: -len(names[reason]))
    share = "" if len(ranked) == 1 else f", of {len(names[ranked[0]])} of {len(reasons)}"
    yield f"no strategy has a result{share}: {ranked[0]}"
    if share:
        yield from (f"{listing(names[reason])}: {reason}" for reason in ranked)


def headline(answer: Answer) -> str:
    """What to run, how long it takes, and who else is as good."""
    time = answer.best.time
    assert time
    over = ""
    if answer.baseline and answer.speedup:
        over = f", {_times(answer.speedup)} as fast as {answer.baseline}"
    return f"Run {' '.join(answer.contender.overrides)}: {_seconds(time)} an iteration{over}. {_as_good(answer.places)}"


def _as_good(ranked: Sequence[Place]) -> str:
    good = [place.name for place in ranked if place.verdict == AS_GOOD]
    if len(ranked) == 1 or not any(place.behind for place in ranked):
        return "There is nothing to compare it with."
    if all(place.time is None or place.time.num_values == 1 for place in ranked):
        return "With one seed, chance is not ruled out."
    if good:
        return f"Not significantly slower: {listing(good)}."
    far = " or far behind" if any(place.verdict == FAR_BEHIND for place in ranked) else ""
    return f"All others are significantly slower{far}."


def setting(answer: Answer) -> str:
    """The job in words."""
    labels, config = labels_of(answer.config), answer.config
    names = ", ".join(f"{name} {labels[name]}" for name in ("model", "workload", "cluster"))
    size = "planned" if config.microbatch_size is None else config.microbatch_size
    return f"{names} ({answer.num_gpus} GPUs), global batch {config.global_batch}, microbatches of {size} samples."


def ranking_lines(ranked: Sequence[Place], width: int) -> list[str]:
    """A table of those with a result, as many columns of it as there is room for."""
    shown = [place for place in ranked if place.time]
    digits = decimals([place.time.mean for place in shown if place.time])
    columns = [
        Column("strategy", [place.name for place in shown]),
        Column("s/iter", [f"{place.time.mean:.{digits}f}" for place in shown if place.time]),
        Column("behind", [f"{_percent(place.behind.mean)}" if place.behind else NOTHING for place in shown]),
        Column("95%", [_range(place.behind) for place in shown]),
        Column("seeds", [f"{place.time.num_values}" for place in shown if place.time]),
        Column("", [VERDICTS.get(place.verdict, "") for place in shown]),
    ]
    # The first three say who is how fast.
    while len(columns) > 3 and sum(column.width + len(GAP) for column in columns) - len(GAP) > width:
        columns.pop(3)
    return table_lines(columns, 1)


VERDICTS = {AS_GOOD: "as good", SLOWER: "slower", FAR_BEHIND: "far behind"}


def so_far(times: Mapping[str, Times]) -> str:
    """The race until now in one line: the fastest and the next, and how many runs that is of."""
    ranked = [place for place in places(times) if place.time]
    lost = len(times) - len(ranked)
    without = f", {lost} without a result" if lost else ""
    seeds = spell_seeds([seed for own in times.values() for seed in own])
    if not ranked:
        return f"no result yet ({len(times)} of the strategies, {seeds})"
    best, *others = ranked
    assert best.time
    digits = decimals([best.time.mean])
    named = [f"{place.name} {_percent(place.behind.mean)}" for place in others[:NUM_NAMED] if place.behind]
    then = f", then {', '.join(named)}" if named else ""
    return f"{best.name} {best.time.mean:.{digits}f} s{then} ({_strategies(len(ranked))}{without}; {seeds})"


def _strategies(number: int) -> str:
    return f"{number} strateg{'y' if number == 1 else 'ies'}"


def _seeds_word(answer: Answer) -> str:
    far = (
        f" Far behind: {FAR:g} times the fastest at the first seed or more."
        if any(place.verdict == FAR_BEHIND for place in answer.places)
        else ""
    )
    ended = " Ended early by seconds=: with more seeds more would be told apart." if answer.raced.out_of_time else ""
    return (
        "Behind: geometric mean of the times over the fastest's, seed by seed, with its 95% interval. Slower: "
        f"significantly, by paired tests; it then ran at no further seeds.{far}{ended}"
    )


def _layout(answer: Answer) -> Iterator[str]:
    yield from layout_lines(answer.layout)
    config, layout, number = answer.config, answer.layout, answer.layout.num_microbatches
    size = config.global_batch / (answer.num_replicas * number)
    yield f"{number} microbatch{'' if number == 1 else 'es'} a replica, of {size:g} samples on average."
    memory = config.strategy["scheduler"].get("memory", "module")
    recomputed = [placed.module for placed in layout.modules if placed.recompute]
    if memory != "module":
        yield f"The scheduler recomputes what its order has no memory for (memory={memory})."
    elif not recomputed:
        yield "Nothing is recomputed."
    if answer.num_alike < len(answer.seeds):
        alike = f"{answer.num_alike} of {len(answer.seeds)}"
        yield f"That is planned on the samples of seed {answer.seeds[0]}; {alike} seeds lead to this very layout."


def _memory(answer: Answer) -> str:
    peak, budget, capacity = (each / GIB for each in (answer.peak_bytes, answer.budget_bytes, answer.capacity_bytes))
    return (
        f"At most {peak:.1f} GiB of a GPU's {capacity:.1f} ({100 * peak / capacity:.0f}%); {budget - peak:.1f} GiB are "
        f"left of the {budget:.1f} that programs may use (memory_fraction={answer.config.memory_fraction:g})."
    )


def _room(answer: Answer) -> str:
    time = answer.best.time
    assert time
    digits = decimals([answer.bound_s])
    return (
        f"No layout and no order on this cluster is below {answer.bound_s:.{digits}f} s, so nothing is more than "
        f"{time.mean / answer.bound_s:.2f}x as fast; under this layout the bound is {answer.layout_bound_s:.{digits}f} "
        f"s ({time.mean / answer.layout_bound_s:.2f}x)."
    )


def _firm_heading(answer: Answer) -> str:
    rivals = [*answer.firm[0].rivals]
    among = f", against {listing(rivals)}" if rivals else ""
    return f"How firm that is{among} (planned anew, {spell_seeds(answer.changed_seeds)})"


def _firm_lines(answer: Answer) -> Iterator[str]:
    for row in answer.firm:
        yield f"{row.label}: {_firm_words(answer.best.name, row)}"


def _firm_words(best: str, row: Firm) -> str:
    if row.change is None:
        return f"{best} has no result" + (f"; {listing(row.overtaking)} has" if row.overtaking else "")
    took = f"{best} takes {row.change.mean:.2f}x its time"
    if row.overtaking:
        ahead = [f"{name} ({1 / ratio.mean:.2f}x)" for name, ratio in row.rivals.items() if ratio and ratio.mean < 1]
        return f"{took}; faster is then {listing(ahead)}"
    return f"{took} and stays the fastest" if row.rivals else took


def _seconds(time: Interval) -> str:
    digits = decimals([time.mean])
    interval = f" (95% {time.low:.{digits}f} to {time.high:.{digits}f})" if time.num_values > 1 else ""
    return f"{time.mean:.{digits}f} s{interval}"


def _times(ratio: Interval) -> str:
    return f"{ratio.mean:.2f}x" + (f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.num_values > 1 else "")


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"


def _range(ratio: Interval | None) -> str:
    if ratio is None or ratio.num_values == 1:
        return NOTHING
    return f"{_percent(ratio.low)} to {_percent(ratio.high)}"


def _section(title: str, lines: Iterator[str] | Sequence[str], width: int) -> Iterator[str]:
    yield from _wrapped(title, width)
    yield from _hung(lines, width)
    yield ""


def _hung(lines: Iterator[str] | Sequence[str], width: int) -> Iterator[str]:
    for line in lines:
        yield from _wrapped(line, width, INDENT, 2 * INDENT)


def _wrapped(text: str, width: int, first: str = "", hang: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(width, LEAST_WIDTH),
        initial_indent=first,
        subsequent_indent=hang or first,
        break_long_words=False,
        break_on_hyphens=False,
    )
