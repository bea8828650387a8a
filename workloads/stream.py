"""Random access into an endless stream of samples that is made block by block."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from entrain_bench.errors import require


def stable_rng(name: str, *key: int) -> np.random.Generator:
    """A generator that depends on the name and the key only, on every machine and in every process."""
    return np.random.default_rng([zlib.crc32(name.encode()), *key])


def stream_blocks(iteration: int, num_samples: int, seed: int, block_samples: int) -> Iterator[tuple[int, int, int]]:
    """Where iteration ``iteration`` of a stream of batches lies.

    Yields:
        ``(block, start, stop)``: samples ``start`` to ``stop`` within a block, blocks in order.

    Raises:
        UserError: for a negative iteration or seed, or an empty batch.
    """
    require(iteration >= 0, "iteration", iteration, "0 or more")
    require(seed >= 0, "seed", seed, "0 or more")
    require(num_samples >= 1, "num_samples", num_samples, "at least 1")
    first, last = iteration * num_samples, (iteration + 1) * num_samples
    for block in range(first // block_samples, (last - 1) // block_samples + 1):
        base = block * block_samples
        yield block, max(first - base, 0), min(last - base, block_samples)
