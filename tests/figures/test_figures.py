"""All figures: their sweeps, legible pages, the same bytes from the same data, the command line."""

from __future__ import annotations

import importlib.util
import itertools
import re
from typing import Any

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from entrain_bench.answers.labels import FAMILIES, OURS, strategy_facts
from entrain_bench.cli import run_command
from entrain_bench.commands import figures
from entrain_bench.commands.outputs import ON_REQUEST
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.figures._runner import discover, render
from entrain_bench.figures._style import FONT_PT, MAX_HEIGHT_IN, strategy_colours
from entrain_bench.run.cells import compose_cells
from support.committed import committed
from support.figures import ALL_TRACES, MANY, TRACES, data_of, drawn, texts
from support.wide import each

EXPERIMENTS = config_tree()
SEEDS = re.compile(r"range\(\d+\)")
NAMES = list(discover())
# Others are drawn by one of these.
DRAWN = [name for name in NAMES if importlib.util.find_spec(f"entrain_bench.figures.{name}")]
MAX_PANELS = 6
MAX_LETTERS = 40
OFTEN = ("iteration_time", "robustness", "schedule_gantt", "where_time_goes")


def test_every_figure_is_found_and_cites_what_it_corresponds_to() -> None:
    assert {*NAMES} - {*DRAWN} == {"quick"}
    for name in DRAWN:
        module = importlib.import_module(f"entrain_bench.figures.{name}")
        assert "arXiv:" in (module.__doc__ or "")
        assert f"experiments/figure/{module.EXPERIMENT}.yaml" in (module.__doc__ or "")


# All choices of a group; of the strategies those that the figure shows.
GLOB = re.compile(r"glob\(\*(?:,exclude=\[(.*)\])?\)")


def sweep_of(experiment: str) -> dict[str, Any]:
    stated = content(f"figure/{experiment}")
    params = stated["hydra"]["sweeper"]["params"] if "hydra" in stated else stated
    return {key: str(values) for key, values in params.items()}


def content(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text())
    return values


def shown(experiment: str) -> list[str]:
    """The strategies that ``glob(*)`` means in a figure, without those that it excludes."""
    found = GLOB.fullmatch(sweep_of(experiment)["strategy"])
    left_out = ((found and found[1]) or "").split(",")
    wanted = content(f"figure/{experiment}").get("figure", {}).get("strategies", ["all"])
    return [
        name
        for name in choices("strategy")
        if name not in left_out and content(f"strategy/{name}").get("in_figures", "all") in wanted
    ]


@pytest.mark.wide
@pytest.mark.parametrize("experiment", sorted(path.stem for path in (EXPERIMENTS / "figure").glob("*.yaml")))
def test_every_sweep_composes(experiment: str) -> None:
    sweep = sweep_of(experiment)
    for group in ("strategy", "workload", "model", "cluster"):
        for choice in filter(None, GLOB.sub("", sweep.get(group, "")).split(",")):
            assert choice in choices(group), choice
    globs = {key: GLOB.fullmatch(values) for key, values in sweep.items()}
    seeds = {key for key, values in sweep.items() if SEEDS.fullmatch(values)}
    few = [f"{key}={sweep[key].split(',')[-1]}" for key, all_of in globs.items() if not all_of and key not in seeds]
    few += [f"{key}=0" for key in seeds]
    expected = len(shown(experiment)) if any(globs.values()) else 1
    expected *= len(content(f"figure/{experiment}").get("figure", {}).get("jobs", [()]))
    assert len(compose_cells([f"figure={experiment}", *few], multirun=True)) == expected


def test_figures_leave_out_strategies_whose_yaml_says_so() -> None:
    assert "megatron_rigid" not in {*shown("iteration_time"), *shown("systems")}
    assert {*shown("systems")} < {*shown("iteration_time")}


def test_everything_is_free_in_the_headline_and_its_runs_are_those_of_the_other_free_figures() -> None:
    only = ["workload=opencqa_ocr", "model=qwen25vl_llama3_1b", "seed=0"]
    headline = [cell.config for cell in compose_cells(["figure=iteration_time", *only], multirun=True)]
    for config in headline:
        layout = config.layout
        assert {layout.tp, layout.cp, layout.pp, layout.dp, layout.recompute, config.microbatch_size} == {None}
        assert config.tuning == "equal"
    shared = [["figure=quick"], ["figure=tuning_budget", "tuning_budget=96"]]
    assert all(cell.config in headline for sweep in shared for cell in compose_cells([*sweep, *only], multirun=True))


@pytest.mark.wide
@pytest.mark.parametrize("name", each(DRAWN, OFTEN))
def test_the_same_data_gives_the_same_bytes(name: str) -> None:
    module = importlib.import_module(f"entrain_bench.figures.{name}")
    data = data_of(name, MANY[:1], TRACES[:2])
    first, second = (render(lambda: module.draw(data)) for _ in range(2))
    assert first == second
    assert b"CreationDate" not in first["pdf"]
    assert b"/Subtype /Type3" not in first["pdf"]
    assert first["csv"].count(b"\n") > 3


@pytest.mark.wide
@pytest.mark.parametrize("name", each(DRAWN, OFTEN))
def test_a_figure_of_many_names_is_legible(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_picture(*drawn(name, data_of(name, MANY, ALL_TRACES)), monkeypatch)


@pytest.mark.parametrize("name", DRAWN)
def test_a_committed_figure_is_legible_and_a_system_has_its_colour(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, table, message = drawn(name, committed(name))
    check_picture(figure, table, message, monkeypatch)
    facts = strategy_facts()
    colours = strategy_colours(
        {one.label: int(one.order) for one in facts}, [one.label for one in facts if one.family == FAMILIES[OURS]]
    )
    for legend in [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]:
        for handle in legend.legend_handles:
            assert handle.get_label() not in colours or handle.get_color() == colours[handle.get_label()]


def check_picture(figure: Figure, table: pd.DataFrame, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's width at most; texts of at least 7 pt, apart from each other, and none a sentence."""
    assert figure.get_figheight() <= MAX_HEIGHT_IN[figure.get_figwidth()]
    assert len(figure.axes) <= MAX_PANELS
    assert len(table)
    assert message.endswith(".")
    placed = list(texts(figure, monkeypatch).values())
    assert len(placed) > 10
    page = figure.bbox
    for text, box in placed:
        assert text.get_fontsize() >= FONT_PT, text
        assert text.get_rotation() in (0, 30, 90), text
        assert not text.get_text().endswith("."), text
        assert all(len(line) <= MAX_LETTERS for line in text.get_text().splitlines()), text
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
        assert inside, f"clipped: {text}"
    for (one, a), (other, b) in itertools.combinations(placed, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        # Boxes of slanted labels overlap where the labels do not.
        slanted = one.get_rotation() == other.get_rotation() != 0
        assert apart or slanted, f"{one} overlaps {other}"


@pytest.mark.wide
def test_what_needs_training_is_drawn_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(figures, "make", lambda wanted, *_, **__: not asked.append([output.name for output in wanted]))
    assert run_command(["figures"]) == run_command(["figures", "measured_gantt"]) == 0
    everything = [*(name for name in NAMES if name not in ON_REQUEST), "results"]
    assert asked == [everything, ["measured_gantt"]]
    assert len(everything) > 10
