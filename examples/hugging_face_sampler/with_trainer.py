"""A ``transformers.Trainer`` over a strategy's microbatches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer

from entrain_bench import BalancedBatchSampler
from entrain_bench.sampler import own_loader


class BalancedTrainer(Trainer):
    """Trains on this rank's microbatches, and resumes from its own checkpoints, by skipping what was trained on.

    A model that takes ``num_items_in_batch``, as those of transformers do, has the gradient of the mean over all tokens
    of the global batch, whatever company they come in (``average_tokens_across_devices``, the default).

    Args:
        sampler: of this rank; the arguments' ``gradient_accumulation_steps`` is its ``num_microbatches``.
        arguments: those of a ``Trainer``.
    """

    def __init__(self, *, sampler: BalancedBatchSampler, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sampler = sampler

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The Trainer's hook for loaders of one's own."""
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_sampler=self.sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )
        return own_loader(loader, self.args.device, self.args.gradient_accumulation_steps)
