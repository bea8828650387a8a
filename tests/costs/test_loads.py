"""Loads of chunks over ranks of context parallelism, counted token by token."""

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
from entrain_bench.costs.roofline import Roofline
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.layer import Attention
from support.builders import tiny_cluster, tiny_model

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
