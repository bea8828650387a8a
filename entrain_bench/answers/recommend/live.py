"""Progress of the race: a table that is redrawn on a terminal, otherwise lines."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from entrain_bench.answers.comparison import TIME, Times, Verdict
from entrain_bench.answers.recommend.strategy_race import StrategyVariant, standings
from entrain_bench.answers.recommend.words import ranking_lines, so_far
from entrain_bench.records.records import Record


class Ticker:
    """Says on standard error how the race stands; ``total`` strategies are in the first round."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._total = total
        self._started = perf_counter()
        # Compared are runs of the same seeds only: those of the first round, and of every round that has ended.
        self._times: dict[str, Times] = {}
        self._num_rounds = 0
        self._num_runs = 0
        self._leader = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, variant: StrategyVariant, seed: int, record: Record) -> None:
        """Take a run into account; a new leader is worth a line."""
        self._num_runs += 1
        if not self._num_rounds:
            self._times[variant.name] = {seed: record.metrics[TIME] if record.status == "ok" else None}
            leader = standings(self._times).ranked[0]
            if self._times[leader].get(seed) is not None and leader != self._leader:
                self._leader = leader
                self.say(f"fastest so far: {so_far(self._times, self._total)}")
        self._draw()

    def end_of_round(self, times: Mapping[str, Times]) -> None:
        """Say how a round has ended."""
        self._times = {**times}
        self._num_rounds = self._num_rounds + 1
        self.say(f"round {self._num_rounds}: {so_far(times, self._total)}")
        self._draw()

    def say(self, line: str) -> None:
        """A line with the seconds until now, where there is no terminal to draw on."""
        if not self._console.is_terminal:
            self._console.print(f"{self._clock()} {line}", soft_wrap=True, markup=False, highlight=False)

    def _draw(self) -> None:
        if self._console.is_terminal:
            comparison = standings(self._times) if self._times else None
            table = (
                ranking_lines(comparison, self._console.width)
                if comparison and comparison.with_verdict(Verdict.FASTEST)
                else []
            )
            line = f"{self._clock()} so far: {self._num_runs} runs, {len(self._times)} of {self._total} strategies"
            self._live.update(Group(*map(Text, [*table, line])), refresh=True)

    def _clock(self) -> str:
        return f"[{perf_counter() - self._started:5.1f} s]"
