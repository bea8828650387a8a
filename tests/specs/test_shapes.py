"""Items and their grids beside their samples."""

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.specs.shapes import Items, SampleShapes, concatenate, shapes_of
from entrain_bench.specs.tokens import TokenRules, are_steps
from entrain_bench_workloads.tokens import audio_items, image_items, video_items
from entrain_bench_workloads.trace import truncated
from support.builders import TOKENS


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


def test_steps_over_audio_have_a_kernel_and_a_stride_and_may_have_no_padding() -> None:
    assert are_steps(((3, 1, 1), (1, 2, 0)))
    assert not any(are_steps((step,)) for step in ((0, 1, 1), (1, 0, 1), (1, 1, -1), (1, 1)))


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
        (items([1, 1, 1], [4, 4, 0], [1, 1, 1]), "item_encoder_tokens=0: must be at least 1"),
    ],
)
def test_columns_that_do_not_fit_are_refused(part: Items, said: str) -> None:
    with pytest.raises(UserError, match=said):
        shapes_of(np.array([1, 2, 3]), {"image": part})


RULES = TokenRules(**TOKENS)


def pictures() -> SampleShapes:
    """A sample of a wide picture, audio and four seconds of video, and one of a high picture."""
    image = image_items(np.array([1, 1]), np.array([280.0, 56.0]), np.array([56.0, 140.0]), RULES, 16384)
    video = video_items(np.array([4.0, np.nan]), np.array([112.0]), np.array([56.0]), RULES, 4, 768)
    audio = audio_items(np.array([1.0, np.nan]), RULES)
    return shapes_of(np.array([5, 5]), {"image": image, "video": video, "audio": audio})


def test_grids_by_hand() -> None:
    shapes = pictures()
    assert shapes.item_grids is not None
    # Rows and columns of patches of 14 pixels; each group of two frames is an item; audio has none.
    assert shapes.item_grids.tolist() == [[4, 20], *[[4, 8]] * 4, [0, 0], [10, 4]]
    assert shapes.take(np.array([1, 0])).item_grids.tolist()[:2] == [[10, 4], [4, 20]]
    assert concatenate([shapes, shapes]).item_grids.tolist() == 2 * shapes.item_grids.tolist()
    cut = truncated(shapes, int(shapes.item_llm_tokens[:2].sum()))
    assert cut.item_grids.tolist() == [[4, 20], [4, 8], [10, 4]]


def test_unknown_grids_are_zero_beside_known_ones_and_absent_alone() -> None:
    plain = shapes_of(np.array([1]), {"image": Items(np.array([1]), np.array([8]), np.array([2]))})
    assert plain.item_grids is None
    assert concatenate([plain, plain]).item_grids is None
    known = shapes_of(np.array([1]), {"image": Items(np.array([1]), np.array([8]), np.array([2]), np.array([[2, 4]]))})
    assert concatenate([plain, known]).item_grids.tolist() == [[0, 0], [2, 4]]


def test_a_grid_of_another_number_of_tokens_is_refused() -> None:
    items = Items(np.array([1]), np.array([8]), np.array([2]), np.array([[2, 3]]))
    with pytest.raises(UserError, match="an item of 8 encoder tokens has a grid of 2 x 3"):
        shapes_of(np.array([1]), {"image": items})
    with pytest.raises(UserError, match="item columns differ in length"):
        shapes_of(np.array([1]), {"image": Items(np.array([1]), np.array([8]), np.array([2]), np.zeros((1, 3), int))})
