"""Compositions that are shared between cells: the same as Hydra's own for every cell."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer, compose
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.sources import in_tree
from entrain_bench.config.tree import CONFIG_MODULE, CONFIG_NAME

OVERRIDES = [
    "strategy=dip strategy.planner.chunks=one strategy.scheduler.search_rounds=0",
    "strategy.planner.encoder_stages=3 strategy=entrain figure=sensitivity seed=3",
    "workload=uniform_mix cluster=h100x64 cluster.num_nodes=4 cluster.name=h100x32 workload.vision_share=0.75",
    "strategy=entrain strategy/assigner=megatron strategy.scheduler.split_backward=false layout.tp=null",
    "model=tiny cluster=tiny workload=synthetic workload.modalities.image.llm_tokens.sigma=0.5 harness=train",
    "workload=trace \"workload.path='my file.parquet'\" speed.gemm=0.7 action_noise=0.1 figure=robustness",
    # A list, and what is inside of one.
    "model.modules.vision.modalities=[image,video]",
    "cluster.tiers.0.latency_s=1e-3",
    "++strategy.label=Mine",
    # Interpolations between groups, and of a key that is none.
    "model=vit7b_llm120b model.modules.llm.hidden_size=4096 seed=2",
    "model=vit7b_llm120b 'strategy.name=\"of seed ${seed}\"' seed=2",
]


def hydras_own(overrides: list[str]) -> RunConfig:
    with in_tree(), hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        values: Any = OmegaConf.to_container(hydra.compose(CONFIG_NAME, overrides=overrides), resolve=True)
    return RunConfig.from_values(values)


@pytest.fixture
def composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[list[str]] = []
    original = hydra.compose

    def compose(*arguments: Any, **options: Any) -> Any:
        asked.append(options["overrides"])
        return original(*arguments, **options)

    monkeypatch.setattr(hydra, "compose", compose)
    return asked


@pytest.mark.wide
@pytest.mark.parametrize("text", OVERRIDES)
def test_what_is_put_in_afterwards_is_where_hydra_puts_it(text: str) -> None:
    overrides = shlex.split(text)
    assert Composer().run(overrides) == hydras_own(overrides)


@pytest.mark.wide
def test_cells_that_differ_inside_of_choices_share_a_composition(composed: list[list[str]]) -> None:
    composer = Composer()
    cells = composer.sweep(["figure=sensitivity", "workload=coco", "model=tiny"]).cells
    stages = [composer.run(cell).strategy["planner"]["encoder_stages"] for cell in cells]
    assert {*stages} == {None, 2, 3, 4, 5, 6, 7}
    composer.run(["model=tiny", "workload=coco", "strategy=entrain", "strategy.assigner.defer=false"])
    # The sweep, the default run, and each choice once.
    assert len(composed) == 2 + 4


@pytest.mark.wide
def test_a_large_sweep_composes_choices_and_not_their_combinations(composed: list[list[str]]) -> None:
    composer = Composer()
    choices = ["strategy=megatron,entrain", "workload=coco,chartqa", "model=tiny,tiny_av", "cluster=tiny,a40x16"]
    cells = composer.sweep([*choices, "seed=0,1"]).cells
    runs = [composer.run(cell) for cell in cells]
    assert len(cells) == 32
    # The sweep, the default run and each choice once.
    assert len(composed) == 2 + 8
    for place in (0, 13, 31):
        assert runs[place] == hydras_own([*cells[place]])
    composer.save()
    assert [Composer().run(cell) for cell in cells] == runs
    assert len(composed) == 2 + 8 + 3


def test_a_choice_that_reaches_into_other_groups_is_composed_with_them(tmp_path: Path) -> None:
    (tmp_path / "strategy").mkdir()
    text = "# @package _global_\ndefaults: [/strategy/planner@strategy.planner: megatron]\n"
    text += "strategy: {name: wide, assigner: {}, scheduler: {}}\nmodel: {label: Theirs}\n"
    (tmp_path / "strategy" / "wide.yaml").write_text(text)
    composer = Composer(str(tmp_path))
    cells = composer.sweep(["strategy=wide", "model=tiny", "seed=range(16)"]).cells
    run = composer.run(cells[3])
    assert (run.strategy["name"], run.model["name"], run.model["label"], run.seed) == ("wide", "tiny", "Theirs", 3)


@pytest.mark.wide
def test_a_figure_that_says_something_about_runs_is_composed(tmp_path: Path) -> None:
    (tmp_path / "figure").mkdir()
    text = "# @package _global_\nhydra: {sweeper: {params: {workload: coco}}}\niterations: 2\n"
    (tmp_path / "figure" / "mine.yaml").write_text(text)
    composer = Composer(str(tmp_path))
    (cell,) = composer.sweep(["figure=mine"]).cells
    assert composer.run(cell).iterations == 2


def test_a_deleted_key_has_its_default() -> None:
    composer = Composer()
    assert composer.run(["seed=3", "layout.dp=8", "~seed", "~mlflow", "~layout.dp"]) == composer.run([])
    figure = composer.sweep(["figure=sensitivity"]).cells
    seeds = {text for cell in figure for text in cell if text.startswith("seed=")}
    assert len(composer.sweep(["figure=sensitivity", "~seed"]).cells) == len(figure) / len(seeds)
    with pytest.raises(UserError, match="strategy: must be given"):
        composer.run(["~strategy"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("workload=chartqa", "workload.path=mine.parquet"),
        ("workload.path=./opencqa_ocr.parquet",),
    ],
)
def test_a_file_of_the_users_does_not_go_by_the_name_of_another(overrides: tuple[str, ...]) -> None:
    with pytest.raises(
        UserError, match=r"^workload\.path=\S+: workload=\w+ always reads \w+\.parquet. To use your file, pass"
    ):
        compose(*overrides)


def test_files_of_the_users_beside_others_and_under_a_name_of_their_own() -> None:
    assert compose("workload=trace", "workload.path=mine.parquet").workload["path"] == "mine.parquet"
    assert compose("workload=trace", "workload.path=chartqa_test.parquet").workload["path"] == "chartqa_test.parquet"
    named = compose("workload=chartqa", "workload.path=mine.parquet", "workload.name=mine").workload
    assert (named["name"], named["path"]) == ("mine", "mine.parquet")
    assert compose("workload=chartqa", "workload.path=chartqa_test_by_image.parquet").workload["name"] == "chartqa"
