"""OmniBal (arXiv:2407.20761): data, model and memory balanced together.

Mini-batches under two caps by iterative sampling and filtering (``assigner``), and stages that cut
encoder and LLM wherever trials say (``planner``). Recomputation by stage, as far as memory demands, is
``entrain_bench.balancing.recomputation``'s.
"""

from .assigner import OmniBalAssigner
from .planner import OmniBalPlanner

__all__ = ["OmniBalAssigner", "OmniBalPlanner"]
