"""Kinds of sharding over data- and context-parallel ranks, which hold the same weights: ``layout.sharding``."""

ZERO1 = "zero1"  # optimizer states (arXiv:1910.02054)
ZERO2 = "zero2"  # gradients as well: every backward reduce-scatters its own, and each rank adds up its shard
ZERO3 = "zero3"  # weights as well: every pass gathers them layer by layer and drops them
ZERO3_KEPT = "zero3_kept"  # as ZeRO-3, but an iteration gathers weights once and keeps them until its last backward
HYBRID = "hybrid"  # ZeRO-3 inside a node; every backward all-reduces shards of gradients over nodes (HSDP)
SHARDINGS = (ZERO1, ZERO2, ZERO3, ZERO3_KEPT, HYBRID)
