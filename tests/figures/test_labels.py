"""What strategies, workloads and models are called in figures, their order and colours."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from entrain_bench.answers.labels import distinct_labels, in_order, label_columns, names, orders
from entrain_bench.base.errors import UserError
from entrain_bench.figures._style import strategy_colours
from entrain_bench.run.cells import compose_cells
from support.figures import drawn, table, written


def test_labels_are_derived_from_names_and_stay_apart() -> None:
    names = ["qwen25vl_llama3_1b", "whisper_qwen25_7b", "tiny", "chartqa", "opencqa_ocr", "x"]
    expected = ["Llama 1B", "Qwen 7B", "Tiny", "ChartQA", "OpenCQA OCR", "X"]
    assert list(distinct_labels(names).values()) == expected
    assert distinct_labels(["vit1b_llm7b"]) == {"vit1b_llm7b": "VIT 1B LLM 7B"}
    both = distinct_labels(["qwen25vl_llama3_1b", "qwen25vl_whisper_llama3_1b"])
    assert list(both.values()) == ["Qwen25vl Llama3 1B", "Qwen25vl Whisper Llama3 1B"]


def test_a_label_in_the_yaml_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first", "second"])
    data["workload_label"] = data["workload"].map({"coco": "COCO captions"}).fillna("")
    figure, shown, _ = drawn("iteration_time", data)
    assert {"COCO captions", "OpenCQA OCR", "Llama 1B"} < set(written(figure, monkeypatch))
    assert "coco" in set(shown["workload"])


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
