"""Where an encoder's ranks meet the LLM's: shared or disjoint ranks, and ratios of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import ModuleLayout


@dataclass(frozen=True, slots=True)
class Ratio:
    """How replicas meet at the boundary; at least one of the two is 1.

    Encoder replica u and LLM replica v are of one group if ``u // fan_in == v // fan_out``.

    Attributes:
        fan_in: encoder replicas whose shards one LLM replica concatenates.
        fan_out: LLM replicas among which one encoder replica's shard is sliced.
    """

    fan_in: int
    fan_out: int


def is_integer_ratio(encoder_dp: int, llm_dp: int) -> bool:
    """Whether one degree is a multiple of the other."""
    return encoder_dp % llm_dp == 0 or llm_dp % encoder_dp == 0


def find_ratio(encoder: ModuleLayout, llm: ModuleLayout) -> Ratio:
    """The ratio of two layouts; ``IncompatibleError`` if it is no integer."""
    if not is_integer_ratio(encoder.dp, llm.dp):
        raise IncompatibleError(
            f"layout: {encoder.module} has dp={encoder.dp}, {llm.module} has dp={llm.dp}: "
            "the batch-dimension transform needs one to be a multiple of the other"
        )
    return Ratio(max(1, encoder.dp // llm.dp), max(1, llm.dp // encoder.dp))


def is_colocated(encoder: ModuleLayout, llm: ModuleLayout) -> bool:
    """Whether both modules occupy exactly the same ranks."""
    return np.array_equal(np.unique(encoder.ranks), np.unique(llm.ranks))


def is_disjoint(encoder: ModuleLayout, llm: ModuleLayout) -> bool:
    """Whether the modules share no rank."""
    return not np.intersect1d(encoder.ranks, llm.ranks).size


def are_grids(encoder: ModuleLayout, llm: ModuleLayout) -> bool:
    """Whether both are grids over the same ranks whose groups hold the same ranks; the encoder in one stage.

    Colocated collectives then stay inside a group (arXiv:2605.27678, section 1). A rank has one place in a grid:
    virtual stages make none, and neither do groups of several widths.
    """
    if encoder.widths or llm.widths:
        return False
    if encoder.pp > 1 or not is_integer_ratio(encoder.dp, llm.dp) or not is_colocated(encoder, llm):
        return False
    groups = min(encoder.dp, llm.dp)
    ours, theirs = (np.sort(module.ranks.reshape(groups, -1), axis=1) for module in (encoder, llm))
    return np.array_equal(ours, theirs)
