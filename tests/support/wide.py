"""What runs with ``make test``, and what with ``make test WIDE=1`` only: the same for each strategy, figure, trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from entrain_bench.config.tree import choices

# One of every kind: a list schedule, deferral, encoders on all ranks, a chain, sharded weights.
FEW = ("braid", "entrain", "hetero_colocated", "megatron", "orchmllm")
# Whose TP x CP x DP is all ranks.
WITHOUT_STAGES = ("flexsp", "fsdp", "orchmllm", "veomni")


def wide_unless(quick: bool) -> list[pytest.MarkDecorator]:
    return [] if quick else [pytest.mark.wide]


def each(names: Iterable[str], few: Collection[str] = FEW) -> list[object]:
    """Every name as a parameter, few of them in every run of the tests."""
    return [pytest.param(name, marks=wide_unless(name in few)) for name in names]


def each_strategy(few: Collection[str] = FEW) -> list[object]:
    """Every strategy as a parameter, few of them in every run of the tests."""
    return each(choices("strategy"), few)


def own_dp(strategy: str) -> tuple[str, ...]:
    return ("layout.dp=null",) if strategy in WITHOUT_STAGES else ()
