"""Colors that alone tell strategies or families apart stay apart for readers with deuteranopia."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from entrain_bench.config.tree import choices
from entrain_bench.figures._style import FAMILY_COLOURS, NUM_ORDERED, Colour, strategy_colours
from entrain_bench.run.cells import compose_cells

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
LEAST = 15.0


def lab(colour: Colour, seen: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of an sRGB colour after a matrix on linear RGB."""
    rgb = np.array(colour)
    linear = np.clip(seen @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0.0, 1.0)
    part = XYZ @ linear / XYZ.sum(axis=1)
    x, y, z = np.where(part > 216 / 24389, np.cbrt(part), (24389 / 27 * part + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def ciede2000(one: np.ndarray, other: np.ndarray) -> float:
    """The color difference of Sharma, Wu and Dalal 2005."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(mean**7 / (mean**7 + 25.0**7))
    c1, c2 = np.hypot(stretch * a1, b1), np.hypot(stretch * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, stretch * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    grey = c1 * c2 == 0
    turn = 0.0 if grey else (h2 - h1 + 180) % 360 - 180
    hue = h1 + h2 if grey else (h1 + turn / 2) % 360
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    waves = ((0.17, 1, -30), (-0.24, 2, 0), (-0.32, 3, 6), (0.2, 4, -63))
    t = 1 - sum(size * np.cos(np.radians(times * hue + shift)) for size, times, shift in waves)
    dl = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2))
    dc = (c2 - c1) / (1 + 0.045 * chroma)
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * chroma * t)
    angle = np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2)))
    rotation = -2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * np.sin(angle)
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh))


def differences(colours: dict[str, Colour], seen: np.ndarray) -> dict[tuple[str, str], float]:
    places = {name: lab(colour, seen) for name, colour in (colours | {"paper": to_rgb("white")}).items()}
    return {pair: ciede2000(*(places[name] for name in pair)) for pair in combinations(places, 2)}


def shown() -> dict[str, Colour]:
    """Colors of the strategies of figures that tell them apart by color; others name each at its bar or line."""
    every = compose_cells([f"strategy={','.join(choices('strategy'))}"], multirun=True)
    orders = {str(cell.config.strategy["name"]): cell.config.strategy["display_order"] for cell in every}
    orders = {name: order for name, order in orders.items() if order < NUM_ORDERED}
    return strategy_colours(orders | {"a_strategy_of_yours": None, "ours": 0}, ["ours"])


def test_the_difference_is_that_of_the_published_test_data() -> None:
    # Pairs 1, 7 and 17 of Sharma, Wu and Dalal 2005, Table 1.
    for one, other, wanted in (
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
    ):
        assert ciede2000(np.array(one), np.array(other)) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("seen", [np.eye(3), DEUTERANOPIA], ids=["full", "deuteranopia"])
def test_strategies_and_families_stay_apart(seen: np.ndarray) -> None:
    strategies = shown()
    assert len(strategies) > 9
    for colours in (strategies, FAMILY_COLOURS):
        close = {pair: round(value, 1) for pair, value in differences(colours, seen).items() if value < LEAST}
        assert not close
