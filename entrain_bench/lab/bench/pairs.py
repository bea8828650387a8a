"""Our training runtime and megatron-core, in turn on the same ranks of this machine.

torch is imported on use: it would count as memory of the other cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from entrain_bench.lab.bench.measures import Measure

NUM_RANKS = 2
REPEATS = 15


def against_megatron(overrides: Sequence[str]) -> Iterator[Measure]:
    """Seconds of an iteration of our runtime and of megatron-core's 1F1B schedule."""
    from entrain_bench.lab.bench.training import take_turns
    from entrain_bench.train.launching.group import on_ranks

    first, last = on_ranks(take_turns, NUM_RANKS, overrides, REPEATS)
    yield "1f1b", _with_ratios(first | last)


def against_bridge(replicas: Sequence[tuple[int, int]]) -> Iterator[Measure]:
    """Seconds of a microbatch across the encoder-LLM boundary: our messages and ``BridgeCommunicator``.

    Args:
        replicas: DP of encoder and LLM, one rank per replica.
    """
    from entrain_bench.lab.bench.bridge import compare_boundary
    from entrain_bench.train.launching.group import on_ranks

    for encoder_dp, llm_dp in replicas:
        by_rank = on_ranks(compare_boundary, encoder_dp + llm_dp, encoder_dp, llm_dp, REPEATS)
        different = max(found["different_tensors"] for found in by_rank)
        yield f"dp{encoder_dp}_dp{llm_dp}", _with_ratios(by_rank[0] | {"different_tensors": different})


def _with_ratios(found: dict[str, float]) -> dict[str, float]:
    ratios = {"ratio": ("ours_s", "megatron_s"), "shortest_ratio": ("ours_shortest_s", "megatron_shortest_s")}
    return found | {name: found[ours] / found[theirs] for name, (ours, theirs) in ratios.items()}
