"""OrchMLLM (arXiv:2503.23830): batches of every phase balanced after they are drawn; the layout is FSDP's."""

from .assigner import PostBalancing

__all__ = ["PostBalancing"]
