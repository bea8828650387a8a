"""Progress of cells that run, on standard error: a line each, and how long the rest will take."""

from __future__ import annotations

import sys
from time import perf_counter

from entrain_bench.answers.console_table import describe_cell
from entrain_bench.run.cells import Done

MINUTE_S = 60.0


class Watch:
    """Counts cells and says when the last will be done.

    Args:
        total: cells in all.
        finished: of them, those that need no run.
    """

    def __init__(self, total: int, finished: int = 0) -> None:
        self.total, self._finished, self._run = total, finished, 0
        self._started = perf_counter()

    @property
    def any_run(self) -> bool:
        """Whether a cell was run."""
        return self._run > 0

    def skip(self) -> None:
        """Count a cell that needs no run."""
        self._finished += 1

    def __call__(self, done: Done) -> None:
        """Print the line of a cell that was run."""
        self._run += 1
        place = f"[{self._run + self._finished}/{self.total}]"
        if done.record is None:
            say(f"{place} not recorded: {done.problem}")
            return
        left = self.total - self._run - self._finished
        rest = f", {spell_s(left * (perf_counter() - self._started) / self._run)} left" if left else ""
        say(f"{describe_cell(place, done.record)} ({done.seconds:.1f} s{rest})")


def say(line: str) -> None:
    """A line on standard error."""
    print(line, file=sys.stderr, flush=True)


def spell_s(seconds: float) -> str:
    """A duration in words that are no more exact than an estimate is."""
    return f"about {seconds / MINUTE_S:.0f} min" if seconds >= 1.5 * MINUTE_S else f"about {seconds:.0f} s"
