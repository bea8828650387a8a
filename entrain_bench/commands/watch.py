"""Progress of cells that run, on standard error: a line each, and how long the rest will take."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import perf_counter

from entrain_bench.run.cells import Done

MINUTE_S = 60.0


@dataclass(slots=True)
class Watch:
    """Counts cells and says when the last will be done: of ``total``, ``finished`` need no run and ``run`` had one."""

    total: int
    finished: int = 0
    run: int = 0
    started: float = field(default_factory=perf_counter)

    def __call__(self, done: Done) -> None:
        """Print the line of a cell that ran; count one whose record was there."""
        if done.seconds is None:
            self.finished += 1
            return
        self.run += 1
        place = f"[{self.run + self.finished}/{self.total}]"
        if done.record is None:
            say(f"{place} not recorded: {done.problem}")
            return
        # The words on cells take longer to import than a run to start.
        from entrain_bench.answers.console_table import describe_cell

        left = self.total - self.run - self.finished
        seconds = left * (perf_counter() - self.started) / self.run
        spelled = f"about {seconds / MINUTE_S:.0f} min" if seconds >= 1.5 * MINUTE_S else f"about {seconds:.0f} s"
        rest = f", {spelled} left" if left else ""
        say(f"{describe_cell(place, done.record)} ({done.seconds:.1f} s{rest})")


def say(line: str) -> None:
    """A line on standard error."""
    print(line, file=sys.stderr, flush=True)
