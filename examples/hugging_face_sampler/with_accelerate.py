"""A loop of accelerate's over a strategy's microbatches; a checkpoint resumes it at the iteration that comes next."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from entrain_bench import BalancedBatchSampler
from entrain_bench.sampler import Progress, own_loader


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    sampler: BalancedBatchSampler,
    accelerator: Accelerator,
    epochs: int,
    save: str | None = None,
    resume: str | None = None,
) -> None:
    """Train, with a checkpoint after every iteration.

    Args:
        model: returns the loss of every sample of a batch.
        optimizer: of its weights.
        dataset: the sampler's.
        sampler: of this rank.
        accelerator: with ``gradient_accumulation_steps=sampler.num_microbatches``.
        epochs: to train, counted from the sampler's first.
        save: folder of the checkpoint.
        resume: folder of a checkpoint to go on from.
    """
    # The loader is not handed to prepare, which would deal this rank's microbatches out to all.
    model, optimizer = accelerator.prepare(model, optimizer)
    steps = accelerator.gradient_accumulation_steps
    loader = own_loader(DataLoader(dataset, batch_sampler=sampler), accelerator.device, steps)
    progress = Progress(sampler)
    accelerator.register_for_checkpointing(progress)
    if resume:
        accelerator.load_state(resume)
    for epoch in range(sampler.epoch, epochs):
        loader.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            with accelerator.accumulate(model):
                # Of the mean over the global batch: microbatches differ in size, and so may ranks. Ranks are averaged
                # by DDP, and backward divides by the number of microbatches.
                share = sampler.world_size * steps / sampler.global_batch
                accelerator.backward(model(batch).sum() * share)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.iteration += 1
                if save:
                    accelerator.save_state(save)
        progress.iteration = 0
