"""Heads with logits of labelled tokens only: their times and memory, and how context parallelism spreads them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.costs.loads import Packs
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.roofline import Roofline
from entrain_bench.specs.framework import with_labelled_head
from entrain_bench.specs.layer import LOGIT_CHUNK_TOKENS
from support.builders import placed, samples, tiny_cluster, tiny_model

MODEL = tiny_model()
LABELLED = with_labelled_head(MODEL)
HEAD = len(LABELLED.llm.kinds) - 1


def counted(chunk: list[tuple[int, int]], cp: int, whole: bool) -> int:
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
    assert packs.most_labelled(cp).tolist() == [counted(chunk, cp, whole) for chunk in chunks]


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
