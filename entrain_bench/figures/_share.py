"""An answer in one picture to send: the winner with its interval, the job, all speedups, and the command."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.sentences import gain_text
from entrain_bench.answers.statistics import Interval
from entrain_bench.answers.text import count, listing, speedup, spell_seeds
from entrain_bench.base.errors import UserError
from entrain_bench.figures._style import COLOURBLIND, FAINT, INK, MODEL_ERROR, lighter, small_png

WIDTH_IN = 8.0
BAR_IN = 0.27
LINE_IN = 0.16
EDGE_IN = 0.25
HEAD_IN = 0.79
AXIS_IN = 0.45
TITLE_PT = 15.0
TEXT_PT = 9.0
CODE_PT = 7.5
# Letters of a line of the gain, of the job and of a command; commands that are shown, and bars.
GAIN_LETTERS = 105
JOB_LETTERS = 118
CODE_LETTERS = 124
MAX_COMMANDS = 3
MAX_BARS = 12
PLURALS = {"harness": "harnesses"}


def share_png(answer: Answer, results_dir: str) -> bytes:
    """The picture of an answer; the same bytes for the same data.

    Raises:
        UserError: if there is nothing to compare.
    """
    gains = speedups_of(answer)
    if len(gains) < 2:
        raise UserError("share=true: needs results of at least two strategies for the same job. Run another strategy")
    return small_png(lambda: draw(answer, gains, results_dir))


def speedups_of(answer: Answer) -> dict[str, Interval]:
    """Speedups over the baseline by variant, the fastest first: of the case, or over all cases."""
    if len(answer.cases) > 1:
        return {name: each.speedup for name, each in answer.overall.items()}
    found = {row.name: row.standing.speedup for row in answer.results if row.standing.num_ok}
    return {name: gain for name, gain in found.items() if gain}


def job_text(answer: Answer) -> str:
    """Describe the job of all runs in one line: labels that cases share, otherwise the number of labels."""
    parts = []
    for heading in answer.cases[0].job:
        values = dict.fromkeys(case.job[heading] for case in answer.cases)
        parts.append(
            f"{heading} {next(iter(values))}"
            if len(values) == 1
            else count(len(values), heading, PLURALS.get(heading, ""))
        )
    seeds = [seed for case in answer.cases for seed in case.comparison.seeds]
    return ", ".join([*parts, spell_seeds(seeds)])


def draw(answer: Answer, gains: dict[str, Interval], results_dir: str) -> Figure:
    """Words above bars of speedups with 95% intervals, the commands below; as high as that needs."""
    winner = answer.fastest
    wins = sum(case.winner is not None and case.winner.name == winner for case in answer.cases)
    where = f" in {wins} of {len(answer.cases)} cases" if len(answer.cases) > 1 else ""
    title = f"{winner} is the fastest{where}" if winner else "Not decided"
    good = answer.cases[0].first_and_ties[1] if len(answer.cases) == 1 else ()
    also = f". As good: {listing(good)}." if good else ""
    won = textwrap.wrap(f"{gain_text(answer) or 'no speedup over the baseline is known'}{also}", GAIN_LETTERS)
    job = textwrap.wrap(f"{job_text(answer)}.", JOB_LETTERS)
    commands = _commands(answer, results_dir)
    shown = dict([*gains.items()][:MAX_BARS])
    cut = f"{len(shown)} of {len(gains)} strategies shown. " if len(shown) < len(gains) else ""
    simulated = all(record.labels["harness"] == "simulate" for record in answer.records)
    foot = [*commands, *filter(None, [f"{cut}Simulated; {MODEL_ERROR}" if simulated else cut.strip()])]
    head_in = HEAD_IN + LINE_IN * len([*won, *job])
    foot_in = LINE_IN * len(foot) + EDGE_IN
    height_in = head_in + BAR_IN * len(shown) + AXIS_IN + foot_in
    figure = Figure(figsize=(WIDTH_IN, height_in))
    panel = figure.add_axes(
        (0.2, (foot_in + AXIS_IN) / height_in, 0.68, BAR_IN * len(shown) / height_in),
    )
    left = EDGE_IN / WIDTH_IN

    def write(lines: Sequence[str], top_in: float, **style: Any) -> None:
        for number, line in enumerate(lines):
            figure.text(left, 1 - (top_in + LINE_IN * number) / height_in, line, va="top", **style)

    write([title], 0.2, fontsize=TITLE_PT, fontweight="bold", color=INK)
    write(won, 0.52, fontsize=TEXT_PT + 1, color=INK)
    write(job, 0.62 + LINE_IN * len(won), fontsize=TEXT_PT - 0.5, color=INK)
    write(commands, height_in - foot_in, fontsize=CODE_PT, family="monospace", color=INK)
    write(foot[len(commands) :], height_in - foot_in + LINE_IN * len(commands), fontsize=CODE_PT, color=FAINT)
    for place, (name, gain) in enumerate(shown.items()):
        colour = COLOURBLIND[0] if name == winner else lighter(COLOURBLIND[7])
        panel.barh(place, gain.mean, 0.72, color=colour)
        panel.hlines(place, gain.low, gain.high, color=INK, linewidth=0.9)
        text = "baseline" if name == answer.baseline else speedup(gain)
        panel.text(max(gain.high, gain.mean), place, f"  {text}", va="center", fontsize=TEXT_PT - 1, color=INK)
    panel.axvline(1.0, color=INK, linewidth=0.6)
    panel.set_yticks(range(len(shown)), [*shown], fontsize=TEXT_PT)
    panel.set(ylim=(len(shown) - 0.5, -0.5), xlim=(0, 1.3 * max(gain.high for gain in shown.values())))
    panel.set_xlabel(f"Speedup over {answer.baseline}, 95% interval (higher is better)", fontsize=TEXT_PT - 1)
    panel.grid(visible=False, axis="y")
    return figure


def _commands(answer: Answer, results_dir: str) -> list[str]:
    """The commands of the runs in lines that fit; of many the first ones, and how many more there are."""
    lines = commands_of(answer.records, results_dir)
    shown = [
        line
        for command in lines[:MAX_COMMANDS]
        for line in textwrap.wrap(command, CODE_LETTERS, break_long_words=True, break_on_hyphens=False)
    ]
    more = len(lines) - MAX_COMMANDS
    return [*shown, *([f"# and {count(more, 'more command')} in report.md"] if more > 0 else [])]
