"""What all figures share."""

from __future__ import annotations

from threading import Event, Thread

import matplotlib as mpl
import matplotlib.colors

from entrain_bench.figures._style import FONT_PT, INK, is_dark, styled


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


def test_text_is_white_on_dark_colors_only() -> None:
    dark = {"black": (0.0, 0.0, 0.0), "blue": (0.1, 0.35, 0.7), "ink": mpl.colors.to_rgb(INK)}
    light = {"white": (1.0, 1.0, 1.0), "yellow": (0.9, 0.9, 0.2), "sky": (0.6, 0.75, 0.95)}
    assert {name for name, colour in (dark | light).items() if is_dark(colour)} == {*dark}
