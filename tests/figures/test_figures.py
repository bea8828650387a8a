"""All figures: their sweeps, legible pages, the same bytes from the same data, the command line."""

from __future__ import annotations

import importlib.util
import itertools
import re
from typing import Any

import pytest
import yaml

from entrain_bench.cli import run_command
from entrain_bench.commands import figures
from entrain_bench.commands.outputs import ON_REQUEST
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.figures._runner import discover, render
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, SINGLE_COLUMN_IN
from entrain_bench.run.cells import compose_cells
from support.figures import ALL_TRACES, MANY, TRACES, data_of, drawn, texts
from support.wide import each

EXPERIMENTS = config_tree()
SEEDS = re.compile(r"range\(\d+\)")
NAMES = list(discover())
# Others are drawn by one of these.
DRAWN = [name for name in NAMES if importlib.util.find_spec(f"entrain_bench.figures.{name}")]
# Numbers in cells are a little smaller than all else.
LEAST_PT = 6.5
MAX_HEIGHT_IN = 5.0
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
def test_a_figure_fits_a_page_and_its_texts_are_legible(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, _, message = drawn(name, data_of(name, MANY, ALL_TRACES))
    assert figure.get_figwidth() in (SINGLE_COLUMN_IN, DOUBLE_COLUMN_IN)
    assert figure.get_figheight() <= MAX_HEIGHT_IN
    placed = list(texts(figure, monkeypatch).values())
    assert len(placed) > 10
    assert message.endswith(".")
    page = figure.bbox
    for text, box in placed:
        assert text.get_fontsize() >= LEAST_PT, text
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
    everything = [*(name for name in NAMES if name not in ON_REQUEST), "claims", "results"]
    assert asked == [everything, ["measured_gantt"]]
    assert len(everything) > 10
