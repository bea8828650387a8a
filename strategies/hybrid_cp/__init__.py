"""Dynamic context parallelism of Megatron-LM (``--dynamic-context-parallel`` and ``--hybrid-context-parallel``).

Each round of a batch has context-parallel groups of its own over the DP x CP plane: wide for long samples, narrow for
short ones.
"""

from .assigner import GroupsByLength

__all__ = ["GroupsByLength"]
