"""Any strategy's assignment of samples in other training loops, as a batch sampler of PyTorch's."""

from entrain_bench.sampler.sampler import BalancedBatchSampler, Progress, own_loader
from entrain_bench.sampler.stream import BalancedStream

__all__ = ["BalancedBatchSampler", "BalancedStream", "Progress", "own_loader"]
