"""Patches on their grids: places by hand, and windows against their definition."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.specs.items import Items, shapes_of
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.modules.positions import arrange
from entrain_bench.train.running.data import MadeUp, SampleData
from support.builders import TOKENS
from support.train.modules import module_config


def test_a_known_grid_by_hand() -> None:
    # 2 x 3 blocks of 2 x 2 patches; windows of 2 x 2 blocks: the first four blocks of columns 0 and 1, then column 2.
    arranged = arrange((24,), ((4, 6),), 4, 16)
    assert arranged.order.tolist() == [*range(8), *range(12, 20), *range(8, 12), *range(20, 24)]
    assert arranged.windows == (16, 8)
    assert arranged.rows.tolist() == [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2 + [0, 0, 1, 1] + [2, 2, 3, 3]
    assert arranged.columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3] * 2 + [4, 5] * 4


def test_an_unknown_grid_is_near_square() -> None:
    # 5 blocks: a row of 3 and a row of 2.
    arranged = arrange((20,), (), 4, 0)
    assert arranged.rows.tolist() == [0, 0, 1, 1] * 3 + [2, 2, 3, 3] * 2
    assert arranged.columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 0, 1, 0, 1, 2, 3, 2, 3]
    assert arrange((20, 24), ((0, 0), (4, 6)), 4, 0).columns[:20].tolist() == arranged.columns.tolist()


def test_positions_of_samples_by_hand() -> None:
    # A picture of 2 x 3 LLM tokens, two frames of 1 x 2 that make a video, audio of 2 tokens, an unknown grid of 3.
    shapes = shapes_of(
        np.array([2, 1]),
        {
            "image": Items(np.array([1, 1]), np.array([24, 12]), np.array([6, 3]), np.array([[4, 6], [0, 0]])),
            "video": Items(np.array([2, 0]), np.array([8, 8]), np.array([2, 2]), np.array([[2, 4], [2, 4]])),
            "audio": Items(np.array([1, 0]), np.array([4]), np.array([2])),
        },
    )
    config = module_config("tiny_llm", mrope_sections=[4, 2, 2], mrope_frame_step=2)
    llm = ModelSpec.from_config({"name": "m", "modules": {"llm": config}, "tokens": TOKENS}).llm
    data = SampleData(shapes, MadeUp(0, 96))
    assert data.positions(llm, np.array([0])).T.tolist() == [
        *[[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]],
        *[[3, 3, 3], [3, 3, 4], [5, 3, 3], [5, 3, 4]],
        *[[5, 5, 5], [6, 6, 6], [7, 7, 7], [8, 8, 8]],
    ]
    assert data.positions(llm, np.array([1])).T.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [2, 2, 2]]
    assert torch.equal(data.inputs(llm, 0, np.array([1])).pack.positions, data.positions(llm, np.array([1])))
    assert data.encoder_pack(np.array([0, 3, 4])).grids == ((4, 6), (0, 0), (0, 0))


pictures = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


@given(blocks=pictures, span=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_windows_are_squares_of_one_picture_and_every_token_has_a_place(
    blocks: list[tuple[int, int]], span: int
) -> None:
    grids = tuple((2 * rows, 2 * columns) for rows, columns in blocks)
    lengths = tuple(rows * columns for rows, columns in grids)
    arranged = arrange(lengths, grids, 4, (2 * span) ** 2)
    assert torch.equal(arranged.order[arranged.place], torch.arange(sum(lengths)))
    picture = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[arranged.order]
    names = torch.stack([picture, arranged.rows // (2 * span), arranged.columns // (2 * span)], 1)
    runs = names.split(arranged.windows)
    assert all(len(run.unique(dim=0)) == 1 for run in runs)
    # Runs of one window are not cut, windows of one row of a picture stay in order, and blocks stay whole.
    assert len({tuple(run[0].tolist()) for run in runs}) == len(runs)
    assert [tuple(run[0].tolist()) for run in runs] == sorted(tuple(run[0].tolist()) for run in runs)
    assert (arranged.order.view(-1, 4) == arranged.order[::4, None] + torch.arange(4)).all()
    places = torch.stack([picture, arranged.rows, arranged.columns], 1)
    assert len(places.unique(dim=0)) == sum(lengths)
