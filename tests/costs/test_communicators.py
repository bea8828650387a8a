"""Communicators of a rank, counted by hand."""

from dataclasses import replace

import numpy as np

from entrain_bench.costs.communicators import count_communicators
from entrain_bench.costs.memory import Memory
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from support.builders import placed, tiny_model

MODEL = tiny_model()


def on_same_ranks(dp: int, pp: int, tp: int, cp: int, model: ModelSpec = MODEL) -> Layout:
    ranks = np.arange(dp * pp * tp * cp).reshape(pp, dp, tp * cp).swapaxes(0, 1)
    return Layout(tuple(placed(module, ranks, tp, cp) for module in model.modules), 4)


def test_communicators_of_a_grid_by_hand() -> None:
    # One of TP, one of CP, one of DP x CP, one of all ranks; both modules share them.
    assert set(count_communicators(MODEL, on_same_ranks(2, 2, 2, 2)).tolist()) == {4}
    assert set(count_communicators(MODEL, on_same_ranks(2, 2, 2, 1)).tolist()) == {3}
    assert set(count_communicators(MODEL, on_same_ranks(1, 2, 1, 1)).tolist()) == {1}
    assert set(count_communicators(MODEL, on_same_ranks(1, 1, 1, 1)).tolist()) == {0}


def test_a_tied_embedding_adds_one_at_both_ends() -> None:
    llm = MODEL.llm
    tied = replace(MODEL, modules=(replace(llm, config=replace(llm.config, tied_embeddings=True)),))
    assert count_communicators(tied, on_same_ranks(2, 3, 1, 1, tied)).reshape(3, 2).tolist() == [[3, 3], [2, 2], [3, 3]]


def test_modules_with_other_degrees_and_widths_have_their_own() -> None:
    vision, llm = MODEL.modules
    narrow = placed(vision, np.arange(8).reshape(8, 1, 1))
    split = placed(llm, np.arange(8).reshape(2, 1, 4), 2, 2)
    # Gradients of either; TP 2 and CP 2 of the LLM; all ranks.
    assert set(count_communicators(MODEL, Layout((narrow, split), 4)).tolist()) == {5}
    widths = tuple((1, 2**n) for n in range(4))
    wide = ModuleLayout(llm.name, 1, 1, (len(llm.layers),), np.arange(8).reshape(8, 1, 1), widths=widths)
    # CP 2, 4 and 8; gradients of both modules, on the same ranks; all ranks.
    assert set(count_communicators(MODEL, Layout((narrow, wide), 4)).tolist()) == {5}


def test_every_communicator_is_charged_on_every_rank() -> None:
    layout = on_same_ranks(2, 2, 2, 2)
    none, each = (Memory(MODEL, FrameworkOptions(communicator_bytes=size)) for size in (0.0, 9e7))
    assert set((each.lane_state_bytes(layout) - none.lane_state_bytes(layout)).tolist()) == {4 * 9e7}
