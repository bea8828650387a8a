"""Any strategy's assignment of samples in other training loops, as a batch sampler of PyTorch's."""

from entrain_bench.sampler.sampler import BalancedBatchSampler, own_loader

__all__ = ["BalancedBatchSampler", "own_loader"]
