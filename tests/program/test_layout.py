"""Lanes by their definition, and layouts that model or cluster cannot take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import stages_behind, three_phase_program
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout, check_tensor_parallel, check_words
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from support.builders import chain_layout, placed, tiny_cluster, tiny_model, uniform_batch

MODEL = tiny_model(encoder=2, llm=4)
VISION, LLM = MODEL.modules
SHAPES = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4), (4, 1, 1), (3, 2, 1)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES), st.sampled_from(SHAPES))
def test_lanes_are_the_largest_sets_of_ranks_that_share_every_block(
    seed: int, encoder: tuple[int, int, int], llm: tuple[int, int, int]
) -> None:
    rng = np.random.default_rng(seed)
    pool = int(rng.integers(8, 13))
    modules = [
        placed(module, rng.permutation(pool)[: np.prod(shape)].reshape(shape), tp=shape[2])
        for module, shape in ((VISION, encoder), (LLM, llm))
    ]
    layout = Layout(tuple(modules), 1)
    blocks_of: dict[int, list[tuple[int, int]]] = {}
    for index, module in enumerate(modules):
        flat = module.ranks.reshape(-1, module.ranks_per_block).tolist()
        for block, ranks in enumerate(flat):
            for rank in ranks:
                blocks_of.setdefault(rank, []).append((index, block))
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in sorted(blocks_of):
        groups.setdefault(tuple(blocks_of[rank]), []).append(rank)
    expected = sorted(groups.items(), key=lambda group: group[1][0])
    assert layout.lane_first_rank.tolist() == [ranks[0] for _, ranks in expected]
    assert layout.lane_width.tolist() == [len(ranks) for _, ranks in expected]
    assert layout.num_lanes == len(expected)
    assert layout.num_ranks == len(blocks_of)
    for index, (module, blocks) in enumerate(zip(modules, layout.blocks, strict=True)):
        assert blocks.num_stages == module.pp
        for block in range(module.dp * module.pp):
            lanes = blocks.lanes[blocks.offsets[block] : blocks.offsets[block + 1]].tolist()
            assert sorted(lanes) == [at for at, (key, _) in enumerate(expected) if (index, block) in key]
        first = blocks.first_lane()
        assert first.shape == (module.dp, module.pp)


def test_virtual_stages_share_lanes_and_are_described() -> None:
    # Replica by replica, stages 0, 1, 2 on blocks 0, 1, 0.
    ranks = np.array([[[0, 1], [2, 3], [0, 1]], [[4, 5], [6, 7], [4, 5]]])
    layout = Layout((placed(VISION, [[[0]], [[4]]]), placed(LLM, ranks, tp=2)), 1)
    check_layout(layout, MODEL, tiny_cluster())
    vision, llm = layout.blocks
    assert layout.lane_first_rank.tolist() == [0, 1, 2, 4, 5, 6]
    assert layout.lane_width.tolist() == [1, 1, 2, 1, 1, 2]
    assert [part.tolist() for part in np.split(llm.lanes, llm.offsets[1:-1])] == [
        [0, 1],
        [2],
        [0, 1],
        [3, 4],
        [5],
        [3, 4],
    ]
    assert llm.rank_set[0] == llm.rank_set[2] != llm.rank_set[1]
    assert (vision.lanes.tolist(), vision.offsets.tolist()) == ([0, 3], [0, 1, 2])
    assert layout.modules[1].stages_per_rank == 2
    assert layout.describe()["llm"] == "tp2 cp1 pp3 dp2 layers 2/2/2 virtual x2"
    with pytest.raises(IncompatibleError, match="a rank holds 2 stages of llm"):
        stages_behind(layout)
    shapes, assignment = uniform_batch(MODEL, 2, dp=2)
    with pytest.raises(IncompatibleError, match="a rank holds 2 stages of llm"):
        three_phase_program(MODEL, shapes, layout, assignment)


def test_stages_behind_counts_the_lanes_after_each_stage_of_the_chain() -> None:
    assert [row.tolist() for row in stages_behind(chain_layout(MODEL, 2, 3, 1, dp=3))] == [[4, 3], [2, 1, 0]]
    audio = chain_layout(tiny_model(2, 2, audio=2), 2, 2, 1)
    assert [row.tolist() for row in stages_behind(audio)] == [[3, 2], [3, 2], [1, 0]]


# Refused layouts

Change = Callable[[ModuleLayout], ModuleLayout]
REPEATED = r"llm\.ranks=repeated: must be distinct"
SCATTERED = r"llm\.ranks=scattered: must be conse"
REFUSED: dict[str, tuple[Change, str]] = {
    "heads": (
        lambda m: replace(m, tp=3, ranks=np.arange(6).reshape(1, 2, 3)),
        r"layout\.tp=3: must divide the 8 heads",
    ),
    "key-value heads": (lambda m: replace(m, tp=8, ranks=np.arange(16).reshape(1, 2, 8)), "the 4 key-value heads of"),
    "too few layers": (lambda m: replace(m, layers_per_stage=(2, 2)), r"layers_per_stage=4: must be 6 layers in all"),
    "empty stage": (lambda m: replace(m, layers_per_stage=(6, 0)), r"layers_per_stage=\(6, 0\): must be positive"),
    "shape": (lambda m: replace(m, cp=2), r"llm\.ranks=\(1, 2, 1\): must be of shape \(1, 2, 2\)"),
    "replicas on one rank": (lambda m: replace(m, ranks=np.array([[[1], [2]], [[2], [1]]])), REPEATED),
    "stages out of turn": (
        lambda m: replace(m, layers_per_stage=(2, 2, 1, 1), ranks=np.array([[[1], [2], [1], [1]]])),
        REPEATED,
    ),
    "replicas that differ": (lambda m: replace(m, ranks=np.array([[[1], [1]], [[2], [3]]])), REPEATED),
    "falling": (lambda m: replace(m, tp=2, ranks=np.array([[[2, 1], [4, 3]]])), SCATTERED),
    "gaps": (lambda m: replace(m, tp=2, ranks=np.array([[[2, 4], [6, 8]]])), SCATTERED),
    "no multiple": (lambda m: replace(m, tp=2, ranks=np.array([[[1, 2], [3, 4]]])), SCATTERED),
    "beyond": (lambda m: replace(m, ranks=m.ranks + 98), r"llm\.ranks=99\.\.100: must be within the 100 ranks"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_layout_that_does_not_fit_is_refused(change: Change, message: str) -> None:
    cluster = tiny_cluster(num_nodes=10, gpus_per_node=10)
    layout = chain_layout(MODEL, 1, 2, 4)
    check_layout(layout, MODEL, cluster)
    broken = Layout((layout.modules[0], change(layout.modules[1])), 4)
    with pytest.raises(UserError, match=message):
        check_layout(broken, MODEL, cluster)


@pytest.mark.parametrize("ranks", [[1, 2, 2, 1], [1, 2, 3, 3], [2, 2, 1], [1, 1]])
def test_stages_may_go_back_the_way_they_came(ranks: list[int]) -> None:
    llm = placed(LLM, [[[rank] for rank in ranks]])
    check_layout(Layout((placed(VISION, [[[0]]]), llm), 1), MODEL, tiny_cluster())


@pytest.mark.parametrize("ranks", [[1, 2, 3, 3, 1], [1, 2, 2, 3], [1, 2, 2, 1, 2]])
def test_stages_that_go_back_another_way_are_refused(ranks: list[int]) -> None:
    llm = placed(LLM, [[[rank] for rank in ranks]])
    with pytest.raises(UserError, match=r"llm\.ranks=repeated: must be distinct, or those of the stages before"):
        check_layout(Layout((placed(VISION, [[[0]]]), llm), 1), MODEL, tiny_cluster())


def test_vocabularies_are_padded_except_in_training() -> None:
    (cell,) = compose_cells(["model=tiny_av", "model.modules.llm.vocab_size=1022"])
    model = prepare(cell.config).job.model
    assert model.llm.padded(2) is model.llm
    check_words(model.llm, 2)
    padded = model.llm.padded(4)
    hidden = padded.config.hidden_size
    # 1022 words need 2 x 512; the first layer holds an embedding, the last a weight that is as large, and a norm.
    assert padded.config.vocab_size == 1024
    for mine, whole in zip(
        (model.llm.layers[0], model.llm.layers[-1]), (padded.layers[0], padded.layers[-1]), strict=True
    ):
        assert whole.parameters - mine.parameters == 2 * hidden
    assert padded.layers[-1].gemms[0].n == 1024
    assert padded.layers[1:-1] == model.llm.layers[1:-1]
    check_tensor_parallel(model.llm, 4)
    with pytest.raises(UserError, match=r"layout.tp=4: must divide the 1022 words of module llm"):
        check_words(model.llm, 4)
    audio = model.module("audio")
    assert audio.sharded_sizes["channels of embed_gemms[0]"] == audio.layers[0].gemms[0].n
