"""What all figures share."""

from __future__ import annotations

from threading import Event, Thread

import matplotlib as mpl

from entrain_bench.figures._style import FONT_PT, styled


def test_one_thread_draws_at_a_time() -> None:
    entered, before = Event(), mpl.rcParams["font.size"]

    def draw() -> None:
        with styled():
            entered.set()

    with styled():
        assert mpl.rcParams["font.size"] == FONT_PT != before
        other = Thread(target=draw)
        other.start()
        assert not entered.wait(0.2)
        # Figures are made of figures.
        with styled():
            pass
        assert not entered.is_set()
    other.join(10.0)
    assert entered.is_set()
    assert mpl.rcParams["font.size"] == before
