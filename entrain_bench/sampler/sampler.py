"""A PyTorch batch sampler whose batches are microbatches of a strategy's assignment, also in Hugging Face's loops."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import require
from entrain_bench.base.remembered import remembered
from entrain_bench.config.given import checked_plan
from entrain_bench.program.layout import Layout
from entrain_bench.sampler.padding import NONE, Dealt
from entrain_bench.sampler.planning import FIXED, BatchPlan, fingerprint, place_of, plan_batches
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import stable_rng

# Iterations whose microbatches are kept: those that loaders run ahead.
KEPT = 64
# Iterations by which a strategy's gain is judged.
JUDGED = 8


class BalancedBatchSampler(Sampler[list[int]]):
    """PyTorch batch sampler that yields a rank's microbatches, as lists of dataset indices chosen by a strategy.

    An epoch is a permutation of all samples, cut into global batches; an incomplete last batch is left out. Every rank
    computes the assignment of each global batch, bit-identical on every machine, and takes its own part.

    ``iter()`` starts the epoch at its beginning or at a loaded state. After an epoch it starts the next one.

    Attributes:
        layout: layout in use; data-parallel ranks are the replicas of its LLM.
        rank, world_size: data-parallel rank of this process, and number of data-parallel ranks.
        global_batch: samples of an iteration over all ranks.
        num_iterations: global batches (optimizer steps) of an epoch.
        num_microbatches: microbatches of every rank in every iteration; None unless ``counts`` is ``fixed``.
    """

    def __init__(
        self,
        shapes: SampleShapes | str | Path,
        *,
        strategy: str | None = None,
        model: str,
        cluster: str,
        global_batch: int,
        microbatch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        layout: Layout | str = "data_parallel",
        counts: str = FIXED,
        padding: str = NONE,
        overrides: Sequence[str] = (),
        config_dir: str | None = None,
    ) -> None:
        """Compose the configuration and choose the layout; docs/sampler.md explains layouts and counts.

        Args:
            shapes: sizes of samples by dataset index: ``entrain_bench.shapes_of``, or the path of a shape trace.
            strategy: name of the strategy whose assigner is used; with ``layout="planned"`` also its planner. None: the
                best for a data-parallel loop with this padding. A warning says if a strategy gains nothing there.
            model: name of the model, whose costs assigners balance.
            cluster: name of the cluster, whose costs assigners balance.
            global_batch: samples of an iteration, a multiple of ``world_size`` x ``microbatch_size``.
            microbatch_size: average samples of a microbatch; assigners that balance work fill microbatches unevenly.
            rank: data-parallel rank of this process; None: from ``torch.distributed``.
            world_size: number of data-parallel ranks; None: from ``torch.distributed``.
            seed: seed of the sample order.
            shuffle: whether each epoch has its own random order; if not, samples keep their order.
            layout: a ``Layout``, ``data_parallel``: each rank holds the whole model, or ``planned``.
            counts: number of microbatches of an iteration: ``fixed``, ``equal`` on all ranks, or as ``assigned``.
            padding: ``longest`` if your collator pads a microbatch to its longest sample, ``none`` if it packs.
            overrides: further configuration, ``key=value`` as on the command line.
            config_dir: your folder with further choices.

        Raises:
            UserError: naming the argument, the configuration or the data that is wrong.
        """
        self.rank, self.world_size = place_of(rank, world_size)
        self._plan: BatchPlan = plan_batches(
            shapes,
            layout,
            counts,
            self.world_size,
            overrides,
            config_dir,
            strategy=strategy,
            padding=padding,
            model=model,
            cluster=cluster,
            global_batch=global_batch,
            microbatch_size=microbatch_size,
            seed=seed,
        )
        self.layout = self._plan.layout
        self.num_microbatches = self._plan.num_microbatches if counts == FIXED else None
        self.global_batch = global_batch
        num_samples = len(self._plan.shapes)
        self.num_iterations = num_samples // global_batch
        require(self.num_iterations >= 1, "global_batch", global_batch, f"at most {num_samples}, the number of samples")
        # Values that a loaded state must share with the sampler: they decide the samples of an iteration.
        self._stream: dict[str, Any] = {
            "samples": fingerprint(self._plan.shapes),
            "seed": seed,
            "shuffle": bool(shuffle),
            "global_batch": global_batch,
        }
        self._dealt: dict[tuple[int, int], Dealt] = {}
        self._batches: tuple[int, IntArray] | None = None
        self._move(0, 0, 0)
        self._resumed = False
        self._plan.warn([self._plan.shapes.take(rows) for rows in self._samples(0)[:JUDGED]])

    @classmethod
    def from_plan(cls, shapes: SampleShapes | str | Path, plan: str | Path, **options: Any) -> Self:
        """Return a sampler with the job, strategy and layout of a plan that ``entrain-bench recommend`` wrote.

        Options are the constructor's ``rank``, ``world_size``, ``shuffle``, ``counts``, ``padding`` and ``config_dir``.
        ``UserError`` if the file, an argument or the data is invalid.
        """
        known = checked_plan(plan)
        job = known.job
        # Listed shapes have no file, which could be treated in some way.
        others = "workload" if isinstance(shapes, SampleShapes) else ("workload=", "workload.path=", "workload.name=")
        return cls(
            shapes,
            strategy=known.strategy,
            model=job.model,
            cluster=job.cluster,
            global_batch=job.global_batch,
            microbatch_size=job.microbatch_size,
            seed=job.seed,
            layout=known.layout,
            overrides=[text for text in (*known.options, *job.overrides) if not text.startswith(others)],
            **options,
        )

    def __len__(self) -> int:
        """Return the number of microbatches of this rank in an epoch; ``TypeError`` unless ``counts`` is ``fixed``."""
        if self.num_microbatches is None:
            raise TypeError("len() needs counts=fixed; otherwise the assigner chooses the number of microbatches")
        return self.num_iterations * self.num_microbatches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the epoch's microbatches on this rank, iteration by iteration."""
        if not self._resumed:
            self._move(self._epoch + (self._iteration == self.num_iterations), 0, 0)
        self._resumed = False
        return self._walk(self._epoch, self._iteration, self._place)

    def _walk(self, epoch: int, first: int, place: int) -> Iterator[list[int]]:
        for iteration in range(first, self.num_iterations):
            batches = self.microbatches(iteration, epoch)
            for index in range(place, len(batches)):
                last = index + 1 == len(batches)
                self._move(epoch, iteration + last, 0 if last else index + 1)
                yield batches[index]
            place = 0

    def _move(self, epoch: int, iteration: int, place: int) -> None:
        """Make a microbatch, ``place`` of an iteration, the next one."""
        self._epoch = epoch
        self._iteration = iteration
        self._place = place

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` start this epoch; a loaded state within the same epoch is kept."""
        require(epoch >= 0, "epoch", epoch, "at least 0")
        if not (self._resumed and epoch == self._epoch):
            self._move(epoch, 0, 0)
            self._resumed = False

    def microbatches(self, iteration: int, epoch: int | None = None, rank: int | None = None) -> list[list[int]]:
        """Return the microbatches of an iteration of an epoch (None: the current one) on a rank (None: this one)."""
        epoch = self._epoch if epoch is None else epoch
        dealt = self._deal(epoch, iteration)
        samples = self._samples(epoch)[iteration]
        rows = self._plan.rows
        return [rows[samples[list(row)]].tolist() for row in dealt[self.rank if rank is None else rank]]

    def believed_s(self, iteration: int, epoch: int | None = None) -> FloatArray:
        """Return the estimated forward seconds of each rank's microbatches in an iteration, as padded ``[ranks]``.

        Maximum over mean is the load imbalance of a training loop whose ranks hold the whole model.
        """
        epoch = self._epoch if epoch is None else epoch
        return self._plan.ranks_s(self._deal(epoch, iteration), self._plan.shapes.take(self._samples(epoch)[iteration]))

    def state_dict(self, iteration: int | None = None) -> dict[str, Any]:
        """Return the sampler's position as plain values; equal on all ranks after the same iterations.

        Args:
            iteration: next iteration; needed if a loader prefetches. None: after the last microbatch taken.
        """
        at = self._iteration if iteration is None else iteration
        require(0 <= at <= self.num_iterations, "iteration", iteration, f"0..{self.num_iterations}")
        epoch = self._epoch + at // self.num_iterations
        at %= self.num_iterations
        position = {"epoch": epoch, "iteration": at, "microbatch": self._place if iteration is None else 0}
        return {**position, **self._stream, "plan": self._plan.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` resume at a state.

        ``UserError`` for other samples, seed, order or global batch, or another plan within an iteration.
        """
        for name, value in self._stream.items():
            require(state.get(name) == value, f"state: {name}", state.get(name), f"{value}, as in this sampler")
        place = state["microbatch"]
        same = place == 0 or state["plan"] == self._plan.name
        require(same, "state: microbatch", place, "0 (the start of an iteration), because the plan differs")
        self._move(state["epoch"], state["iteration"], place)
        self._resumed = True

    def _deal(self, epoch: int, iteration: int) -> Dealt:
        """Return the microbatches of all ranks in an iteration, cached."""
        require(0 <= iteration < self.num_iterations, "iteration", iteration, f"0..{self.num_iterations - 1}")

        def deal() -> Dealt:
            batch = self._plan.shapes.take(self._samples(epoch)[iteration])
            return self._plan.deal(self._plan.setting.strategy.assigner, batch)

        return remembered(self._dealt, (epoch, iteration), deal, KEPT)

    def _samples(self, epoch: int) -> IntArray:
        """Return the samples of every global batch of an epoch ``[iterations, global_batch]``."""
        if self._batches is None or self._batches[0] != epoch:
            num_samples = len(self._plan.shapes)
            order = np.arange(num_samples)
            if self._stream["shuffle"]:
                order = stable_rng("sampler", self._stream["seed"], epoch).permutation(num_samples)
            whole = order[: self.num_iterations * self.global_batch]
            self._batches = epoch, whole.reshape(self.num_iterations, self.global_batch)
        return self._batches[1]


def own_loader(loader: DataLoader[Any], device: torch.device, accumulation_steps: int) -> DataLoader[Any]:
    """A loader of this rank's microbatches as ``accelerate`` and ``transformers.Trainer`` take it.

    Do not hand the result to ``Accelerator.prepare``, which would deal this rank's batches out to all ranks.
    ``UserError`` for another sampler, and unless ``accumulation_steps`` are an iteration's microbatches.
    """
    from accelerate.data_loader import prepare_data_loader

    sampler = loader.batch_sampler
    count = sampler.num_microbatches if isinstance(sampler, BalancedBatchSampler) else None
    allowed = f"{count}, the microbatches of an iteration of a BalancedBatchSampler with counts=fixed"
    require(accumulation_steps == count, "gradient_accumulation_steps", accumulation_steps, allowed)
    prepared: DataLoader[Any] = prepare_data_loader(
        loader, device, num_processes=1, process_index=0, put_on_device=True
    )
    return prepared


class Progress:
    """The next iteration of the sampler's epoch, which the loop sets, for ``Accelerator.register_for_checkpointing``.

    Loaders run ahead of training; microbatches that they prefetched do not count here.
    """

    def __init__(self, sampler: BalancedBatchSampler) -> None:
        self._sampler = sampler
        self.iteration = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the next iteration begins."""
        return self._sampler.state_dict(self.iteration)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the sampler, and the loop, resume there."""
        self._sampler.load_state_dict(state)
        self.iteration = state["iteration"]
