"""The picture of a sweep: its panel keeps its height, and all that is written has room and stays apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.sentences import sentences
from entrain_bench.figures._standings import MAX_VARIANTS, PANEL_IN, draw, standings_png
from entrain_bench.figures._style import message_of, styled
from entrain_bench.records.records import Record
from support.figures import texts, written
from support.records import record

LONG = "ExhaustiveHeterogeneousPlannerOfManyWords"
DEEP = " ".join(f"some_part_some_parameter_{place}={place}" for place in range(8))


def planned(planners: Sequence[str], workloads: Sequence[str] = ("text",)) -> list[Record]:
    """Two strategies with every planner at two seeds."""
    return [
        record(strategy, 1.0 + place + 0.1 * seed, seed, workload, own={"planner": {"_target_": f"some.{planner}"}})
        for workload in workloads
        for place, planner in enumerate(planners)
        for strategy in ("first", "second_with_a_name")
        for seed in range(2)
    ]


def picture(records: Sequence[Record]) -> Figure:
    with styled():
        return draw(Answer.of(records))


def panel_in(figure: Figure) -> float:
    with styled():
        figure.draw_without_rendering()
    return float(figure.axes[0].get_window_extent().height / figure.dpi)


SWEEPS = {
    "two": planned(["One"]),
    "long names": planned([f"{LONG}{place}" for place in range(6)]),
    "names of several lines": planned([f"{DEEP} {place}" for place in range(6)]),
    "many long names and cases": planned([f"{LONG}{place}" for place in range(7)], [f"data_{n}" for n in range(14)]),
    "long names of cases": planned(["One"], [f"a_workload_with_a_long_name_{place}" for place in range(12)]),
}


@pytest.mark.wide
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("records", SWEEPS.values(), ids=SWEEPS)
def test_all_that_is_written_has_room_and_the_panel_keeps_its_height(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = picture(records)
    assert panel_in(figure) == pytest.approx(PANEL_IN, abs=0.01)
    drawn = [*texts(figure, monkeypatch).values()]
    for text, box in drawn:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text  # noqa: PT018
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text  # noqa: PT018
    for (one, box), (other, there) in combinations(drawn, 2):
        assert not box.overlaps(there), (one, other)


def test_the_picture_says_what_the_answer_says_first() -> None:
    answer = Answer.of(SWEEPS["two"])
    assert message_of(picture(answer.records)) == sentences(answer)[0]
    assert message_of(picture(SWEEPS["two"][:1])) == ""


def test_every_bar_has_its_colour_and_its_name() -> None:
    sweep = Answer.of(SWEEPS["names of several lines"])
    figure = picture(sweep.records)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len({*names}) == len(sweep.variants) == MAX_VARIANTS
    colours = [to_hex(patch.get_facecolor()) for patch in legend.get_patches() if isinstance(patch, Patch)]
    assert len({*colours}) == MAX_VARIANTS, "the palette has ten"


def test_names_that_the_middle_tells_apart_are_not_shortened() -> None:
    planners = [f"{'a_' * 40} {'b_' * 40} {place} {'c_' * 40} {'d_' * 20}" for place in range(2)]
    (legend,) = picture(planned(planners)).legends
    assert len({text.get_text() for text in legend.get_texts()}) == 4
    assert not any("..." in text.get_text() for text in legend.get_texts())


@pytest.mark.wide
def test_it_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "12 of 14 strategies and 12 of 14 cases; table.csv has all"
    assert title in written(picture(SWEEPS["many long names and cases"]), monkeypatch)
    assert not any("table.csv" in text for text in written(picture(SWEEPS["two"]), monkeypatch))


def test_the_same_data_gives_the_same_bytes() -> None:
    sweep = Answer.of(SWEEPS["long names"])
    assert standings_png(sweep) == standings_png(sweep)
