"""Figures that rank: the order, names and numbers of bars, what is said of missing results, the messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from entrain_bench.answers.labels import spell
from entrain_bench.answers.statistics import Interval
from entrain_bench.answers.tables import ALL
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.figures._ranked import Row, change, draw_ranked, number, ranked_panels
from entrain_bench.figures._style import FAMILY_COLOURS, TINT, lighter, message_of, styled
from entrain_bench.figures.iteration_time import with_all
from support.figures import MANY, MODELS, TRACES, drawn, errors, table, written

STRATEGIES = [*MANY, "ninth", "tenth"]
FAMILY = dict.fromkeys(STRATEGIES[1:5], "published") | dict.fromkeys(STRATEGIES[5:9], "out_of_the_box")


def many(fails: str = "") -> pd.DataFrame:
    """Later strategies are slower; one fails at one seed."""
    data = table(STRATEGIES, TRACES[:2])
    lost = (data["strategy"] == fails) & (data["seed"] == 2)
    data = data.assign(status=data["status"].mask(lost, "failed"))
    return data.assign(strategy_family=data["strategy"].map(FAMILY).fillna(""))


def rows_of(panel: Axes) -> list[list[str]]:
    """Texts of each row from top to bottom, without the headings."""
    rows: dict[float, list[str]] = {}
    for text in panel.texts:
        assert isinstance(text, Text)
        rows.setdefault(float(text.xy[1]), []).append(text.get_text())  # type: ignore[attr-defined]
    return [[*filter(None, rows[y])] for y in sorted(rows) if y >= 0]


def test_every_strategy_has_a_bar_a_name_and_its_numbers_fastest_first() -> None:
    figure, shown = drawn("iteration_time", many())
    # A panel for each trace, and one for all of them, per model.
    assert len(figure.axes) == 3 * len(MODELS)
    # All traces come first; a row has a panel for each model.
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles[:3] == ["All traces, Llama 1B", "All traces, Llama 3B", "ChartQA, Llama 1B"]
    panel = figure.axes[len(MODELS)]
    rows = rows_of(panel)
    assert [row[-1] for row in rows] == [spell(name) for name in STRATEGIES]
    times = shown[(shown["workload"] == TRACES[0]) & (shown["model"] == MODELS[0])].set_index("strategy")
    assert rows[0][:2] == ["1.01", "fastest"]
    assert rows[1][:2] == [number(times.loc["beta", "iteration_time_s"]), "+10 ±0.2"]
    assert [bar.get_width() for bar in panel.patches] == pytest.approx([*times["iteration_time_s"]])
    colours = [bar.get_facecolor()[:3] for bar in panel.patches]
    wanted = [lighter(FAMILY_COLOURS[FAMILY.get(name, "")], TINT) for name in STRATEGIES]
    assert colours == wanted
    assert message_of(figure) == (
        "Fastest strategy of 4 jobs: Alpha 4. All traces, Llama 1B: Alpha leads Beta by 10 ±0.2%. "
        "All traces, Llama 3B: Alpha leads Beta by 10 ±0.2%."
    )


def test_with_one_seed_nothing_is_bold_and_nothing_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    several, one = (drawn("iteration_time", data)[0] for data in (many(), many().query("seed == 0")))
    weights = [{text.get_fontweight() for text in figure.axes[0].texts} for figure in (several, one)]
    assert weights == [{"bold", "normal"}, {"normal"}]
    assert message_of(one) == (
        "Fastest strategy of 4 jobs: Alpha 4. Only one seed was run, so differences may be noise."
    )
    assert any("bold" in text for text in written(several, monkeypatch))
    assert not any("bold" in text for text in written(one, monkeypatch))


def test_ties_over_all_traces_are_named() -> None:
    data = many()
    fastest = data[data["strategy"] == "alpha"].set_index(["workload", "model", "seed"])["iteration_time_s"]
    tied = data["strategy"] == "beta"
    keys = list(zip(data["workload"], data["model"], data["seed"], strict=True))
    factor = 1 + 0.02 * (data["seed"] - 1)
    times = data["iteration_time_s"].mask(tied, factor * fastest.reindex(keys).to_numpy())
    message = message_of(drawn("iteration_time", data.assign(iteration_time_s=times))[0])
    assert "All traces, Llama 1B: no significant difference between Alpha and Beta." in message


def test_a_strategy_that_lacks_a_seed_has_a_star_and_stands_last(monkeypatch: pytest.MonkeyPatch) -> None:
    figure, _ = drawn("iteration_time", many("alpha"))
    assert [row[-1] for row in rows_of(figure.axes[0])][-1] == "Alpha*"
    assert "*: some seeds have no result" in written(figure, monkeypatch)
    assert message_of(figure).startswith("Fastest strategy of 4 jobs: Beta 4.")


def test_all_traces_are_the_geometric_mean_of_those_with_a_result() -> None:
    data = with_all(many("beta"))
    means = data[data["workload"] == ALL].set_index(["model", "strategy", "seed"])
    own = data[data["workload"] != ALL].set_index(["model", "strategy", "seed"])["iteration_time_s"]
    first, second = own.loc[MODELS[0], "gamma", 1]
    assert means.loc[(MODELS[0], "gamma", 1), "iteration_time_s"] == pytest.approx((first * second) ** 0.5)
    assert means.loc[(MODELS[0], "beta", 2), "status"] == "failed"
    assert with_all(table(["one"], TRACES[:1]))["workload"].unique().tolist() == TRACES[:1]


def test_errors_of_estimates_show_every_strategy_by_name() -> None:
    data = errors(["alpha", "beta", "theta"], TRACES[:1])
    exact = data["strategy"] == "theta"
    times = data["iteration_time_s"].where(~exact, data["iteration_time_s"] / (1 + 2 * data["belief_error"]))
    figure, _ = drawn("misprediction", data.assign(iteration_time_s=times))
    rows = rows_of(figure.axes[0])
    assert [row[-1] for row in rows] == ["Theta", "Alpha", "Beta"]
    assert rows[0][:2] == ["+0", "+0 ±0.0"]
    assert rows[1][:2] == ["+50", "+100 ±0.0"]
    assert message_of(figure) == (
        "Estimates wrong by up to 50% slow down Alpha most: +100% time, mean over 2 jobs. Below 0.1%: Theta."
    )


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((1.12, 1.10, 1.14, 8), "+12 ±2%"),
        ((1.12, 1.116, 1.124, 8), "+12 ±0.4%"),
        ((2.15, 0.1, 21.0, 2), "+115 ±>99%"),
        ((1.12, 1.12, 1.12, 1), "+12%"),
        ((0.999, 0.99, 1.01, 8), "+0 ±1%"),
    ],
)
def test_changes_are_written_with_half_the_width_of_their_interval(interval: Sequence[float], text: str) -> None:
    mean, low, high, seeds = interval
    assert change(Interval(mean, low, high, int(seeds))) == text


def test_no_name_of_ours_and_no_number_touches_another() -> None:
    files = [config_tree() / "strategy" / f"{name}.yaml" for name in choices("strategy")]
    labels = [yaml.safe_load(file.read_text())["label"] for file in files]
    with styled():
        figure, axes = ranked_panels(4, len(labels))
        for panel in axes:
            rows = [Row(f"{label}*", (0.0, 0.4, 0.7), 1.0, ["4.44", "+129 ±0.5", "0.00"]) for label in labels]
            draw_ranked(panel, "COCO", ("s", "% slower", "P"), rows)
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        boxes = [text.get_window_extent(renderer) for panel in axes for text in panel.texts if text.get_text()]
    for place, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[:place])
