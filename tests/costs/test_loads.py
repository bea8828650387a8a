"""Loads of chunks over ranks of context parallelism, counted token by token; heads over labelled tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.costs.layer_times import Stages
from entrain_bench.costs.loads import Packs
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.roofline import Roofline
from entrain_bench.specs.framework import FrameworkOptions, with_labelled_head
from entrain_bench.specs.layer import LOGIT_CHUNK_TOKENS, Attention
from support.builders import placed, samples, tiny_cluster, tiny_model

MODEL = tiny_model()
PACK = FrameworkOptions(cp_split="pack")


def attention_of(module: int) -> Attention:
    return next(kind.attention for kind in MODEL.modules[module].kinds if kind.attention)


def counted(lengths: list[int], cp: int, causal: bool) -> float:
    """Share of the busiest rank by its definition: token by token."""
    seen = [position + 1 if causal else length for length in lengths for position in range(length)]
    cuts = [len(seen) * piece // (2 * cp) for piece in range(2 * cp + 1)]
    pieces = [sum(seen[low:high]) for low, high in itertools.pairwise(cuts)]
    ranks = [pieces[rank] + pieces[2 * cp - 1 - rank] for rank in range(cp)]
    return cp * max(ranks) / sum(ranks)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(2, 5),
    st.booleans(),
)
def test_shares_against_counting(chunks: list[list[int]], cp: int, causal: bool) -> None:
    packs = Packs(
        np.array([length for chunk in chunks for length in chunk]), np.cumsum([0, *(len(chunk) for chunk in chunks)])
    )
    attention = replace(attention_of(1), causal=causal)
    shares = packs.slowest_share(attention, cp)
    assert shares.tolist() == pytest.approx([counted(chunk, cp, causal) for chunk in chunks])
    assert np.all(shares >= 1 - 1e-12)


def test_windows_and_single_ranks_are_even() -> None:
    packs = Packs(np.array([1, 1, 1, 1, 12]), np.array([0, 5]))
    assert packs.slowest_share(replace(attention_of(0), window_tokens=4), 2).tolist() == [1.0]
    assert packs.slowest_share(attention_of(1), 1).tolist() == [1.0]


def test_only_attention_of_several_ranks_takes_longer() -> None:
    lengths, offsets = np.array([64, 64, 64, 64, 4096]), np.array([0, 5])
    llm = MODEL.llm
    even, cut = Roofline(tiny_cluster()), Roofline(tiny_cluster(), PACK)
    for cp in (1, 2):
        one, other = (each.layers_s(llm, each.loads(llm, lengths, offsets), 1, cp) for each in (even, cut))
        for kind, a, b in zip(llm.kinds, one, other, strict=True):
            slower = bool(kind.attention) and cp > 1
            assert (b.forward_s > a.forward_s).tolist() == [slower]
            assert (b.backward_s > a.backward_s).tolist() == [slower]
            assert (a.forward_comm_s == b.forward_comm_s).all()
    # Alone nothing is uneven, and no bound counts on uneven shares.
    alone = [each.layers_s(llm, each.loads(llm, lengths), 1, 2) for each in (even, cut)]
    assert all((a.total_s == b.total_s).all() for a, b in zip(*alone, strict=True))
    counts = llm.kind_counts([len(llm.layers)])
    work = [each.work_s(llm, each.loads(llm, lengths, offsets), Stages(counts, 1, 2, False)) for each in (even, cut)]
    assert (work[0] == work[1]).all()


def test_only_emulation_refuses_packs_over_several_ranks() -> None:
    PACK.check_executable(MODEL.llm, 2, "train")
    PACK.check_executable(MODEL.llm, 1, "emulate")
    with pytest.raises(IncompatibleError, match="cp_split=pack: must be sample with harness=emulate"):
        PACK.check_executable(MODEL.llm, 2, "emulate")
    with pytest.raises(IncompatibleError, match="attention_kernel=unfused: must be null with harness=train"):
        FrameworkOptions(attention_kernel="unfused").check_executable(MODEL.llm, 1, "train")
    with pytest.raises(UserError, match="cp_split=document: unknown"):
        FrameworkOptions(cp_split="document")


LABELLED = with_labelled_head(MODEL)
HEAD = len(LABELLED.llm.kinds) - 1


def counted_labels(chunk: list[tuple[int, int]], cp: int, whole: bool) -> int:
    """Labelled tokens of the rank with most of them, token by token: those before a sample's last."""
    rows = [[length - 1 - some <= place < length - 1 for place in range(length)] for length, some in chunk]
    ranks = [0] * cp
    for row in [list(itertools.chain.from_iterable(rows))] if whole else rows:
        cuts = [len(row) * piece // (2 * cp) for piece in range(2 * cp + 1)]
        for piece, (low, high) in enumerate(itertools.pairwise(cuts)):
            ranks[min(piece, 2 * cp - 1 - piece)] += sum(row[low:high])
    return max(ranks)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(
            st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), min_size=1, max_size=5
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 5),
    st.booleans(),
)
def test_the_rank_with_most_labels_against_counting(chunks: list[list[tuple[int, int]]], cp: int, whole: bool) -> None:
    lengths, labelled = np.array([pair for chunk in chunks for pair in chunk]).T
    packs = Packs(lengths, np.cumsum([0, *map(len, chunks)]), whole, labelled)
    assert packs.most_labelled(cp).tolist() == [counted_labels(chunk, cp, whole) for chunk in chunks]


def test_a_short_text_behind_a_long_image_is_all_on_the_rank_with_the_last_piece() -> None:
    packs = Packs(np.array([800]), np.array([0, 1]), whole=False, labelled=np.array([40]))
    assert packs.most_labelled(4).tolist() == [40]
    assert replace(packs, labelled=np.array([799])).most_labelled(4).tolist() == [200]


def test_labelled_logits_are_a_head_over_fewer_tokens_that_runs_twice() -> None:
    cluster, lengths, labelled = tiny_cluster(1, 8), np.array([3000, 1000]), np.array([60, 40])
    offsets = np.array([0, 2])
    whole, part = (Roofline(cluster) for _ in range(2))
    alone = part.layers_s(LABELLED.llm, part.loads(LABELLED.llm, lengths, offsets, labelled), 1, 1)[HEAD]
    every = whole.layers_s(MODEL.llm, whole.loads(MODEL.llm, lengths, offsets), 1, 1)[HEAD]
    few = whole.layers_s(MODEL.llm, whole.loads(MODEL.llm, np.array([100])), 1, 1)[HEAD]
    assert (alone.forward_s < 0.5 * every.forward_s).all()
    # The head over 100 tokens, but with a norm over 4,000, and with its forward once more in backward.
    layer = LABELLED.llm.layers[-1]
    norm = part._elementwise_s(layer, np.array([4000.0]), 1, 1)
    joint = whole._elementwise_s(MODEL.llm.layers[-1], np.array([100.0]), 1, 1)
    logits = part._elementwise_s(layer.labelled, np.array([100.0]), 1, 1)
    assert alone.forward_s == pytest.approx(few.forward_s - joint[0] + logits[0] + norm[0])
    again = alone.forward_s - norm[0]
    assert alone.backward_s == pytest.approx(few.backward_s - joint[1] + logits[1] + norm[1] + again)


def test_memory_holds_a_chunk_of_logits_and_none_of_other_tokens() -> None:
    place = placed(MODEL.llm, [[[0], [1]]])
    memory = Memory(MODEL)
    states = memory.stage_state_bytes(LABELLED.llm, place) - memory.stage_state_bytes(MODEL.llm, place)
    vocabulary = MODEL.llm.config.vocab_size
    # Logits in fp32, and in bf16 while they are cast.
    assert states.tolist() == pytest.approx([0.0, LOGIT_CHUNK_TOKENS * vocabulary * (4 + 2)])
    kept = memory.token_bytes(MODEL.llm, place)[0] - memory.token_bytes(LABELLED.llm, place)[0]
    assert kept.tolist() == pytest.approx([0.0, 4 * vocabulary])


def test_model_flops_count_logits_that_are_computed() -> None:
    shapes = samples((10, [50]), (30, []))
    missing = MODEL.training_flops(shapes) - LABELLED.training_flops(shapes)
    unlabelled = shapes.llm_tokens.sum() - shapes.labelled_tokens.sum()
    config = MODEL.llm.config
    assert missing == pytest.approx(6 * config.hidden_size * config.vocab_size * unlabelled)
    assert shapes.labelled_tokens.tolist() == [10, 29]
