"""OrchMLLM (arXiv:2503.23830): batches of every phase balanced after they are drawn.

Post-balancing (``balance``), node-wise rearrangement (``rearrangement``) and the assigner that composes them
(``assigner``); the layout is FSDP's.
"""

from .assigner import PostBalancing

__all__ = ["PostBalancing"]
