"""Transfers between modules that all pass through one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import BoolArray, FloatArray, IntArray, rows_of
from entrain_bench.costs.links import send_s
from entrain_bench.program import Program
from entrain_bench.specs.cluster import LinkTier


@dataclass(frozen=True, slots=True)
class Relay:
    """One rank that gathers each transfer from all its sources and then scatters it to its destinations.

    A gather starts when the last source is done. Its link carries one gather and one scatter at a time.

    Attributes:
        transfer: transfer that carries each dependency ``[dependencies]``; -1 for those that take another way.
        link_s: how long each transfer occupies the link, first in one direction, then in the other ``[transfers]``.
    """

    transfer: IntArray
    link_s: FloatArray


def relay_between_modules(program: Program, travels: BoolArray, tier: LinkTier) -> Relay:
    """One transfer for each LLM microbatch of all replicas and direction (DFLOP, arXiv:2603.25120, section 4).

    Transfers are numbered by microbatch, forward before backward.

    Args:
        program: whose dependencies between modules are carried.
        travels: dependencies along which bytes go from one set of ranks to another ``[dependencies]``.
        tier: the rank's link to the others.
    """
    source, target = program.dep_actions, rows_of(program.dep_offsets)
    carried = np.flatnonzero(travels & (program.module[source] != program.module[target]))
    source, target = source[carried], target[carried]
    llm = program.model.llm_index
    of_llm = np.where(program.module[source] == llm, source, target)
    microbatch = program.chunks[llm].microbatch[program.chunk[of_llm]]
    labels, number = np.unique(2 * microbatch + program.kind[target], return_inverse=True)
    transfer = np.full(len(program.dep_actions), -1)
    transfer[carried] = number
    total_bytes = np.bincount(number, weights=program.dep_bytes[carried], minlength=len(labels))
    return Relay(transfer, send_s(total_bytes, 1, tier))
