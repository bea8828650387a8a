"""Any strategy's assignment of samples in other training loops, as a batch sampler of PyTorch's."""

from entrain_bench.sampler.sampler import BalancedBatchSampler, Progress, own_loader

__all__ = ["BalancedBatchSampler", "Progress", "own_loader"]
