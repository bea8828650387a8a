"""The look that figures share, what strategies and jobs are called, and what stands next to a figure."""

from __future__ import annotations

import json
from dataclasses import replace
from threading import Event, Thread

import matplotlib as mpl
import pandas as pd
import pytest

from entrain_bench.answers.labels import distinct_labels, in_order, label_columns, names, orders
from entrain_bench.base.errors import UserError
from entrain_bench.figures._runner import sidecar
from entrain_bench.figures._style import FONT_PT, strategy_colours, styled
from entrain_bench.run.cells import compose_cells


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


def test_labels_are_derived_from_names_and_stay_apart() -> None:
    names = ["qwen25vl_llama3_1b", "whisper_qwen25_7b", "internvl15_26b", "tiny", "chartqa", "dflop_mixed", "x"]
    expected = ["Llama 1B", "Qwen 7B", "InternVL 26B", "Tiny", "ChartQA", "DFLOP mixed", "X"]
    assert list(distinct_labels(names).values()) == expected
    assert distinct_labels(["vit1b_llm7b"]) == {"vit1b_llm7b": "ViT 1B LLM 7B"}
    both = distinct_labels(["qwen25vl_llama3_1b", "qwen25vl_whisper_llama3_1b"])
    assert list(both.values()) == ["Qwen2.5-VL Llama 3 1B", "Qwen2.5-VL Whisper Llama 3 1B"]


def test_strategies_stand_in_their_display_order_with_the_same_colour_everywhere() -> None:
    cells = compose_cells(["strategy=entrain,dip,megatron", "model=tiny"], multirun=True)
    rows = pd.DataFrame([{"strategy": cell.config.strategy["name"], **label_columns(cell.config)} for cell in cells])
    unknown = pd.DataFrame([{"strategy": "mine", "strategy_label": "", "strategy_order": None}])
    ordered = in_order(pd.concat([unknown, rows], ignore_index=True))
    assert names(ordered, "strategy") == {"megatron": "Megatron", "entrain": "Entrain", "dip": "DIP", "mine": "Mine"}
    colours = strategy_colours(orders(ordered))
    assert len(set(colours.values())) == 4
    assert strategy_colours(orders(ordered[ordered["strategy"] == "dip"])) == {"dip": colours["dip"]}


@pytest.mark.parametrize("order", ["first", -1])
def test_a_display_order_that_is_no_place_is_named(order: object) -> None:
    (cell,) = compose_cells(["strategy=entrain", "model=tiny"])
    config = replace(cell.config, strategy={**cell.config.strategy, "display_order": order})
    with pytest.raises(UserError, match=f"strategy.display_order={order}: must be"):
        label_columns(config)


def test_a_caption_says_setting_seeds_and_cost_source() -> None:
    cells = compose_cells(["strategy=megatron", "layout.dp=4,null", "seed=0,1,2"], multirun=True)
    found = json.loads(sidecar("Some times.", "some command", cells))
    assert found["command"] == "some command"
    assert found["caption"].startswith(
        "Some times. Setting: cluster a40x64, harness simulate, global_batch 512, microbatch_size 4, layout.tp 2, "
        "layout.cp 1, layout.pp null, layout.dp 4 or null. Seeds: 0 to 2. Costs: fitted (a40x64). Model error: "
    )
    assert found["setting"]["layout.dp"] == [4, None]
    assert (found["seeds"], found["cost_source"]) == ([0, 1, 2], {"a40x64": "fitted"})
