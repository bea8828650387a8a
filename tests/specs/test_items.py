"""Shapes put together of the items of several modalities."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.specs.shapes import Items, concatenate, shapes_of


def items(counts: list[int], encoder: list[int], llm: list[int]) -> Items:
    return Items(np.array(counts), np.array(encoder), np.array(llm))


TWO = {"image": items([2, 0, 1], [40, 80, 160], [10, 20, 40]), "audio": items([1, 1, 0], [7, 8], [3, 4])}


def test_items_stand_beside_their_sample_by_modality() -> None:
    shapes = shapes_of(np.array([5, 6, 7]), TWO)
    assert shapes.modalities == ("image", "audio")
    assert shapes.sample_ids.tolist() == [0, 1, 2]
    assert shapes.item_offsets.tolist() == [0, 3, 4, 5]
    assert shapes.item_modality.tolist() == [0, 0, 1, 1, 0]
    assert shapes.item_encoder_tokens.tolist() == [40, 80, 7, 8, 160]
    assert shapes.item_llm_tokens.tolist() == [10, 20, 3, 4, 40]
    assert shapes.llm_tokens.tolist() == [38, 10, 47]


def test_samples_follow_each_other() -> None:
    both = concatenate([shapes_of(np.array([5, 6, 7]), TWO), shapes_of(np.array([1, 1, 1]), TWO, np.array([9, 8, 7]))])
    assert both.sample_ids.tolist() == [0, 1, 2, 9, 8, 7]
    assert both.item_offsets.tolist() == [0, 3, 4, 5, 8, 9, 10]
    assert both.llm_tokens.tolist() == [38, 10, 47, 34, 5, 41]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (items([1, 1], [4, 4], [1, 1]), "image: counts=2: must be of all 3 samples"),
        (items([1, 1, 1], [4, 4], [1, 1, 1]), "image: items=2: must be 3, the sum of counts"),
        (items([1, 1, 1], [4, 4, 4], [1, 1]), "image: items=2: must be 3, the sum of counts"),
        (items([1, 1, 1], [4, 4, 0], [1, 1, 1]), "item_encoder_tokens has the value 0"),
    ],
)
def test_columns_that_do_not_fit_are_refused(part: Items, said: str) -> None:
    with pytest.raises(UserError, match=said):
        shapes_of(np.array([1, 2, 3]), {"image": part})
