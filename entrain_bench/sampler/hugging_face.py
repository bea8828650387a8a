"""The sampler in Hugging Face's loops: a loader that accelerate does not deal out anew, and what checkpoints keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from entrain_bench.base.errors import UserError, require
from entrain_bench.sampler.sampler import BalancedBatchSampler


def own_loader(loader: DataLoader[Any], device: torch.device, accumulation_steps: int) -> DataLoader[Any]:
    """A loader of this rank's microbatches as ``accelerate`` and ``transformers.Trainer`` take it.

    Do not hand the result to ``Accelerator.prepare``, which would deal this rank's batches out to all ranks.
    ``accumulation_steps`` are microbatches of an optimizer step.

    Raises:
        UserError: for a loader over anything else, and for iterations of another number of microbatches.
    """
    from accelerate.data_loader import prepare_data_loader

    sampler = loader.batch_sampler
    if not isinstance(sampler, BalancedBatchSampler):
        raise UserError(f"loader: batch_sampler={type(sampler).__name__}: must be a BalancedBatchSampler")
    if sampler.num_microbatches is None:
        why = "accelerate and Trainer accumulate the same number of microbatches in every step"
        raise UserError(f"counts: must be fixed, because {why}")
    require(
        accumulation_steps == sampler.num_microbatches,
        "gradient_accumulation_steps",
        accumulation_steps,
        f"{sampler.num_microbatches}, the microbatches of an iteration (sampler.num_microbatches)",
    )
    prepared: DataLoader[Any] = prepare_data_loader(
        loader, device, num_processes=1, process_index=0, put_on_device=True
    )
    return prepared


class Progress:
    """The next iteration of the sampler's epoch, which the loop sets, for ``Accelerator.register_for_checkpointing``.

    Loaders run ahead of training; what they have taken does not count here.
    """

    def __init__(self, sampler: BalancedBatchSampler) -> None:
        self._sampler = sampler
        self.iteration = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the next iteration begins."""
        return self._sampler.state_dict(self.iteration)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the sampler, and the loop, go on there."""
        self._sampler.load_state_dict(state)
        self.iteration = state["iteration"]
