"""Packs that are timed: lengths by hand, and no sequence longer than the module takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.run.cells import compose_cells
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.profiling.stages import DEPTH, longest_of, packs_of, split_tokens, targets_of

VISION, LLM = ModelSpec.from_config(compose_cells(["model=tiny"])[0].config.model).modules


def test_lengths_are_in_proportion_of_odd_numbers() -> None:
    assert split_tokens(64, 4) == (4, 12, 20, 28)
    assert split_tokens(10, 3) == (1, 3, 6)


@given(tokens=st.integers(1, 10_000), share=st.floats(0, 1))
def test_lengths_are_positive_and_add_up(tokens: int, share: float) -> None:
    number = 1 + int(share * (tokens**0.5 - 1))
    lengths = split_tokens(tokens, number)
    assert len(lengths) == number
    assert sum(lengths) == tokens
    assert min(lengths) >= 1
    assert longest_of(tokens, number) == lengths[-1] == max(lengths)


def test_every_kind_is_a_target_and_blocks_are_stacked() -> None:
    assert [(t.kind, t.depths) for t in targets_of(VISION, 2)] == [
        ("embed", (1,)),
        ("window_block", (1, DEPTH)),
        ("block", (1, DEPTH)),
        ("head", (1,)),
    ]


def test_only_blocks_are_timed_for_several_context_parallel_ranks() -> None:
    assert [(t.kind, t.cp) for t in targets_of(VISION, 2, 4)] == [("window_block", 4), ("block", 4)]


def test_blocks_take_one_a_few_and_many_sequences_and_ends_one() -> None:
    embed, block, head = targets_of(LLM, 1)
    assert [len(lengths) for lengths in packs_of(block, 256)] == [1, 4, 16]
    assert [len(lengths) for lengths in packs_of(block, 1)] == [1]
    assert [*packs_of(embed, 256)] == [*packs_of(head, 256)] == [(256,)]


@pytest.mark.parametrize(("context", "numbers"), [(8192, [16, 256]), (1023, [128, 256]), (100, [])])
def test_no_sequence_is_longer_than_the_context(context: int, numbers: list[int]) -> None:
    short = replace(LLM, config=replace(LLM.config, context_tokens=context))
    packs = [*packs_of(targets_of(short, 1)[1], 65536)]
    assert [len(lengths) for lengths in packs] == numbers
    assert all(max(lengths) <= context for lengths in packs)
