"""A second simulator in plain Python, written from docs/costs.md and the configuration, for checking the first one.

It takes from a program what strategies decide (layout, chunks, the order of each lane) and rebuilds all else: layers
and their times, dependencies, bytes, links, holds, queues, shards, buckets, steps. It knows no memory, no U-Net, no
packs that context parallelism cuts as a whole.
"""

from support.independent.simulator import Times, simulate

__all__ = ["Times", "simulate"]
