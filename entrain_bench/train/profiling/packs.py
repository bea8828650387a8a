"""Targets of a profile: kinds of layers, and packs of sequences that tell products, attention and sequences apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from entrain_bench.specs.model import ModuleSpec

# Blocks of the deeper stage; what each adds to a stage of one block is the time of a layer.
DEPTH = 4


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of layer at a tensor-parallel degree, and the numbers of its layers in the stages that are timed."""

    module: ModuleSpec
    kind: str
    tp: int
    depths: tuple[int, ...]


def targets_of(module: ModuleSpec, tp: int) -> list[Target]:
    """Every kind of layer of a module; only blocks are stacked."""
    return [Target(module, layer.kind, tp, (1, DEPTH) if layer.attention else (1,)) for layer in module.kinds]


def packs_of(target: Target, tokens: int) -> Iterator[tuple[int, ...]]:
    """Packs of ``tokens`` in all: one sequence, for blocks also a few and many, of different lengths.

    As few sequences as an LLM's context allows take the place of one; there is no pack if it allows none.
    """
    longest, most = target.module.config.context_tokens or tokens, isqrt(tokens)
    allowed = [number for number in range(1, most + 1) if longest_of(tokens, number) <= longest]
    wanted = {1, isqrt(most), most} if len(target.depths) > 1 else {1}
    for number in sorted({max(each, *allowed[:1]) for each in wanted if allowed}):
        yield split_tokens(tokens, number)


def split_tokens(tokens: int, number: int) -> tuple[int, ...]:
    """Lengths in proportion 1 : 3 : 5 ..., as whole tokens allow; ``number`` squared is at most ``tokens``."""
    ends = [tokens * index * index // (number * number) for index in range(number + 1)]
    return tuple(end - start for start, end in pairwise(ends))


def longest_of(tokens: int, number: int) -> int:
    """The last and longest of these lengths."""
    return tokens - tokens * (number - 1) ** 2 // number**2
