"""How numbers, names and tables are written, wherever they are, and the templates that use these functions."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from entrain_bench.answers.statistics import Interval

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# Names that a sentence lists before it says how many more there are.
MAX_NAMES = 8
# Where there is no number.
NOTHING = "-"
# Digits of the least time that are shown at least, and decimals at least and at most.
SIGNIFICANT = 3
DECIMALS = 3
MAX_DECIMALS = 6
# Names of the classes of GPU time (``records.time_shares.TIME_SHARES``).
TIME_WORDS = {
    "time_work_share": "ideal work",
    "time_kernels_share": "slower computation: packs, splits",
    "time_recompute_share": "recomputation",
    "time_comm_share": "communication",
    "time_stages_share": "unequal stages",
    "time_replicas_share": "unequal replicas",
    "time_microbatches_share": "unequal microbatches, order",
    "time_pipeline_share": "pipeline fill and drain",
    "time_step_share": "step: gradients, optimizer, weights",
    "time_unused_share": "unused GPUs",
    "time_exchange_share": "all-to-all of experts",
    "time_experts_share": "unequal experts",
}
# The same in a sentence, without the content of a class.
SHORT_TIME_WORDS = TIME_WORDS | {
    "time_kernels_share": "slower computation",
    "time_microbatches_share": "unequal microbatches and order",
    "time_step_share": "step",
}
# Markdown's markup, without the bar, which tables escape themselves.
MARKUP = re.compile(r"[\\`*_\[\]~$]|^#")
# Characters that begin a person or an issue on GitHub.
REFERENCES = re.compile(r"@(?=\w)|#(?=\d)")

# Narrower, words go one below the other.
LEAST_WIDTH = 40


def times(ratio: float) -> str:
    """A speedup: ``1.52x``."""
    return f"{ratio:.2f}x"


def percent(ratio: float) -> str:
    """A ratio as a change: ``+48.3%``."""
    return f"{100 * (ratio - 1):+.1f}%"


def ends(interval: Interval | None, spell: Callable[[float], str]) -> str:
    """The ends of an interval; a dash where there is none: ``1.48x to 1.56x``."""
    return f"{spell(interval.low)} to {spell(interval.high)}" if interval and interval.num_values > 1 else NOTHING


def speedup(interval: Interval | Mapping[str, Any] | None) -> str:
    """A speedup and, of several seeds, its interval: ``1.52x (1.48 to 1.56)``; of an interval or its fields."""
    if interval is None:
        return NOTHING
    if isinstance(interval, Mapping):
        interval = Interval(**interval)
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
    distinct = sorted({*seeds})
    return f"seed{'s' if len(distinct) > 1 else ''} {consecutive(distinct)}"


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table; columns whose heading is in ``right`` are aligned to the right."""
    rule = ["---:" if name in right else "---" for name in heading]
    lines = ([" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (heading, rule, *rows))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows unmodified, in one line."""
    safe = MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
    safe = safe.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # GitHub would notify a person and link an issue.
    return REFERENCES.sub(r"\g<0><!-- -->", safe)


# Kinds of Markdown that a text of users may not become on a page.
ACTIVE = ("html_block", "html_inline", "link", "image", "autolink", "reference")


def to_html(markdown: str, *, plain: bool = False) -> str:
    """Return HTML of Markdown, whose own HTML stays: texts of users must be escaped (``escape_markdown``).

    With ``plain`` they need not: HTML, links and pictures stay text.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    html: str = (parser.disable([*ACTIVE]) if plain else parser).render(markdown)
    return html


def load_template(name: str) -> Template:
    """Return a template of the folder ``templates``; one for HTML escapes every text.

    The functions of this module are filters there. A name that is not defined is an error.
    """
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    # Not every command words an answer, and importing takes a while.
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    loader = PackageLoader("entrain_bench.answers")
    environment = Environment(
        loader=loader,
        autoescape=select_autoescape(["html"], default=False),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {name: value for name, value in globals().items() if isfunction(value)}
    environment.globals |= {"TIME_WORDS": TIME_WORDS, "SHORT_TIME_WORDS": SHORT_TIME_WORDS, "NOTHING": NOTHING}
    return environment


def paragraphs_of(text: str) -> list[str]:
    """Return the paragraphs of a rendered template, each in one line; blank lines separate them."""
    return [one_line(part) for part in text.split("\n\n") if part.strip()]


def one_line(text: str) -> str:
    """Return a text with one space between words."""
    return " ".join(text.split())


def slug(heading: str) -> str:
    """Return the anchor of a heading in Markdown, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def wrap(text: str, width: int, first: str = "", hang: str | None = None) -> str:
    """Return a text in lines of whole words, each ended; ``first`` and ``hang`` indent the first and other lines."""
    following = first if hang is None else hang
    wrapper = textwrap.TextWrapper(max(width, LEAST_WIDTH), initial_indent=first, subsequent_indent=following)
    wrapper.break_long_words = False
    wrapper.break_on_hyphens = False
    words = one_line(text) if "\n" in text.strip() else text
    return "".join(f"{line}\n" for line in wrapper.wrap(words))
