"""A PyTorch batch sampler whose batches are the microbatches of a strategy's assignment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from entrain_bench.balancing.interface import Observer
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import UserError, require
from entrain_bench.config.given_plan import checked_plan
from entrain_bench.program.layout import Layout
from entrain_bench.sampler.learning import Lessons, Timings, executed
from entrain_bench.sampler.microbatches import FIXED, Dealt
from entrain_bench.sampler.planning import BatchPlan, fingerprint, plan_batches
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.stream import stable_rng

# Iterations whose microbatches are kept: those that loaders run ahead, and those that are observed.
KEPT = 64
# What a state must have in common with the sampler that takes it: they decide which samples an iteration has.
STREAM = ("samples", "seed", "shuffle", "global_batch")


class BalancedBatchSampler(Sampler[list[int]]):
    """Yields a data-parallel rank's microbatches: lists of dataset indices, as a strategy assigns them.

    An epoch is a permutation of all samples, cut into global batches; the last one, if it is not whole, is left out.
    Every rank assigns each global batch by itself and takes what is its own: assignments have the same bits on every
    machine, so ranks agree without communication.

    ``iter()`` begins the epoch at its start, or where a loaded state stands; after an epoch it begins the next.

    Attributes:
        layout: data-parallel ranks are the replicas of its LLM.
        rank, world_size: data-parallel rank of this process, and how many there are.
        global_batch: samples of an iteration, over all ranks.
        num_iterations: global batches, optimizer steps, of an epoch.
        num_microbatches: those of every rank in every iteration; None unless ``counts`` is ``fixed``.
    """

    def __init__(
        self,
        shapes: SampleShapes | str | Path,
        *,
        strategy: str,
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
        learning_lag: int = 2,
        overrides: Sequence[str] = (),
        config_dir: str | None = None,
    ) -> None:
        """Read what is configured, and lay out the model.

        Args:
            shapes: sizes of the samples, the row of index i at i: of arrays (``entrain_bench.shapes_of``), or the path
                of a shape trace (docs/workloads.md).
            strategy: name of a strategy; its assigner is used, and its planner with ``layout="planned"``.
            model: name of the model, whose costs assigners balance.
            cluster: name of the cluster, likewise.
            global_batch: samples of an iteration, a multiple of ``world_size`` x ``microbatch_size``.
            microbatch_size: samples of a microbatch on average; assigners that balance work fill them unevenly.
            rank: data-parallel rank of this process; None asks ``torch.distributed``.
            world_size: data-parallel ranks; None asks ``torch.distributed``.
            seed: of the order of samples.
            shuffle: whether each epoch has an order of its own; otherwise samples come as they are listed.
            layout: a layout; ``data_parallel``: each rank holds the whole model, split by ``layout.tp`` and
                ``layout.cp`` at most (overrides; 1); ``planned``: the strategy's planner chooses.
            counts: microbatches of an iteration: ``fixed``: ``global_batch / (world_size x microbatch_size)`` on every
                rank; ``equal``: on every rank as many as the assigner gave the rank with most; ``assigned``: what it
                gave each. Ranks that must have more split those with most samples.
            learning_lag: iterations until what was observed (``observe``) changes assignments.
            overrides: further configuration, ``key=value`` as on the command line.
            config_dir: a folder of yours with further choices.

        Raises:
            UserError: naming the argument, the configuration or the data that is wrong.
        """
        self.rank, self.world_size = _place(rank, world_size)
        require(learning_lag >= 1, "learning_lag", learning_lag, "at least 1")
        self._plan: BatchPlan = plan_batches(
            shapes,
            layout,
            counts,
            self.world_size,
            overrides,
            config_dir,
            strategy=strategy,
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
        self._stream: dict[str, Any] = {
            "samples": fingerprint(self._plan.shapes),
            "seed": seed,
            "shuffle": bool(shuffle),
            "global_batch": global_batch,
        }
        self._lag = learning_lag
        self._lessons = Lessons((0,), (self._plan.setting.strategy,))
        self._dealt: dict[int, Dealt] = {}
        self._batches: tuple[int, IntArray] | None = None
        self._furthest = -1
        # Where the epoch stands: the next microbatch is ``_place`` of ``_iteration``.
        self._epoch, self._iteration, self._place, self._resumed = 0, 0, 0, False

    @classmethod
    def from_plan(cls, shapes: SampleShapes | str | Path, plan: str | Path, **options: Any) -> Self:
        """The sampler of a plan's file (``entrain-bench recommend``): its job, its strategy and its layout.

        A rank is a replica of the plan's LLM. Options are the constructor's ``rank``, ``world_size``, ``shuffle``,
        ``counts``, ``learning_lag`` and ``config_dir``.

        Raises:
            UserError: naming the file, the argument or the data that is wrong.
        """
        known = checked_plan(plan)
        job = known.job
        return cls(
            shapes,
            strategy=known.strategy,
            model=job.model,
            cluster=job.cluster,
            global_batch=job.global_batch,
            microbatch_size=job.microbatch_size,
            seed=job.seed,
            layout=known.layout,
            overrides=[text for text in (*known.options, *job.overrides) if not text.startswith("workload")],
            **options,
        )

    def __len__(self) -> int:
        """Microbatches of this rank in an epoch.

        Raises:
            TypeError: where assigners choose their number.
        """
        if self.num_microbatches is None:
            raise TypeError("the number of microbatches is not known beforehand unless counts=fixed")
        return self.num_iterations * self.num_microbatches

    def __iter__(self) -> Iterator[list[int]]:
        """The epoch's microbatches on this rank, iteration after iteration."""
        if not self._resumed:
            self._epoch += self._iteration == self.num_iterations
            self._iteration, self._place = 0, 0
        self._resumed = False
        return self._walk(self._epoch, self._iteration, self._place)

    def _walk(self, epoch: int, first: int, place: int) -> Iterator[list[int]]:
        for iteration in range(first, self.num_iterations):
            batches = self.microbatches(iteration, epoch)
            for index in range(place, len(batches)):
                self._epoch, self._iteration, self._place = epoch, iteration, index + 1
                if index + 1 == len(batches):
                    self._iteration, self._place = iteration + 1, 0
                yield batches[index]
            place = 0

    @property
    def epoch(self) -> int:
        """The epoch that is iterated, from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin this epoch; a state that was loaded within it still holds."""
        require(epoch >= 0, "epoch", epoch, "at least 0")
        if not (self._resumed and epoch == self._epoch):
            self._epoch, self._iteration, self._place, self._resumed = epoch, 0, 0, False

    def microbatches(self, iteration: int, epoch: int | None = None, rank: int | None = None) -> list[list[int]]:
        """A rank's microbatches of one iteration: how many there are, whatever a loader has taken ahead.

        Iterations count from 0, in the present epoch by default.
        """
        epoch = self._epoch if epoch is None else epoch
        dealt = self._deal(epoch, iteration)
        samples = self._samples(epoch)[iteration]
        return [samples[list(row)].tolist() for row in dealt[self.rank if rank is None else rank]]

    def believed_s(self, iteration: int, epoch: int | None = None) -> FloatArray:
        """Seconds that each rank's samples of an iteration are believed to take forward, one by one ``[ranks]``.

        The slowest rank over the mean is what imbalance costs a loop whose ranks hold the whole model.

        Iterations count from 0, in the present epoch by default.
        """
        epoch = self._epoch if epoch is None else epoch
        ranks = self._deal(epoch, iteration)
        placed = self.layout.modules[self._plan.setting.job.model.llm_index]
        batch = self._plan.shapes.take(self._samples(epoch)[iteration])
        encoder_s, llm_s = self._plan.setting.profile.estimate_samples(batch, placed.tp, placed.cp)
        each_s = encoder_s + llm_s
        return np.array([sum(float(each_s[list(row)].sum()) for row in rows) for rows in ranks])

    @property
    def learns(self) -> bool:
        """Whether the strategy's assigner learns from what is observed."""
        return isinstance(self._plan.setting.strategy.assigner, Observer)

    def observe(self, iteration: int, timings: Timings) -> None:
        """Let the assigner learn what an iteration of the present epoch took; one that learns nothing ignores it.

        Every rank must be told the same, of all ranks, after the same iterations. It changes assignments from the
        iteration ``learning_lag`` later on.

        Args:
            iteration: of the present epoch.
            timings: seconds of forward and backward ``[ranks, microbatches, 2]`` for every module of the model, by its
                name.

        Raises:
            UserError: for timings that are not of the iteration's microbatches, and where an iteration that it would
                change has been taken already, by a loader that runs ahead.
        """
        if not self.learns:
            return
        first = self._count(self._epoch, iteration) + self._lag
        ahead = self._furthest - first + 1
        if ahead > 0:
            raise UserError(
                f"learning_lag={self._lag}: must be at least {self._lag + ahead}, because the loader already took "
                f"{ahead} of the iterations that observing iteration {iteration} would change"
            )
        require(first > self._lessons.first[-1], "observe: iteration", iteration, "later than the last observed one")
        setting, strategy = self._plan.setting, self._lessons.strategies[-1]
        batch = self._plan.shapes.take(self._samples(self._epoch)[iteration])
        dealt = self._deal(self._epoch, iteration)
        timeline = executed(setting.job.model, batch, self.layout, dealt, timings)
        learnt = strategy.observe(timeline, setting.profile)
        self._lessons = Lessons((*self._lessons.first, first), (*self._lessons.strategies, learnt))

    def state_dict(self, iteration: int | None = None) -> dict[str, Any]:
        """Where the sampler stands, as plain values; the same on every rank after the same iterations.

        Args:
            iteration: the one of the present epoch to go on with, where a loader has taken more than was trained on;
                None: behind the microbatch that was taken last.
        """
        require(
            iteration is None or 0 <= iteration <= self.num_iterations,
            "iteration",
            iteration,
            f"0..{self.num_iterations}",
        )
        at, place = (self._iteration, self._place) if iteration is None else (iteration, 0)
        over = at == self.num_iterations
        epoch, at = (self._epoch + 1, 0) if over else (self._epoch, at)
        position = {"epoch": epoch, "iteration": at, "microbatch": place}
        lessons = self._lessons.since(self._count(epoch, at)) if self.learns else []
        return {**position, **self._stream, "plan": self._plan.name, "lessons": lessons}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where a state stands.

        At the start of an iteration the strategy, its layout and the number of ranks may be others than those of the
        state: iterations keep their samples. What an assigner has learnt needs the same assigner.

        Raises:
            UserError: for a state of other samples, seed, order or global batch, or from within an iteration of another
                plan.
        """
        keys = {"epoch", "iteration", "microbatch", "plan", "lessons", *STREAM}
        require(keys <= {*state}, "state", sorted(state), f"what state_dict returns: {sorted(keys)}")
        for name in STREAM:
            require(
                state[name] == self._stream[name],
                f"state: {name}",
                state[name],
                f"{self._stream[name]}, as in this sampler",
            )
        place = state["microbatch"]
        same = place == 0 or state["plan"] == self._plan.name
        require(same, "state: microbatch", place, "0 (the start of an iteration), because the plan differs")
        if state["lessons"] and self.learns:
            self._lessons = self._lessons.restored(state["lessons"])
        else:
            self._lessons = Lessons((0,), (self._plan.setting.strategy,))
        self._dealt, self._furthest = {}, -1
        self._epoch, self._iteration, self._place = state["epoch"], state["iteration"], place
        self._resumed = True

    def _deal(self, epoch: int, iteration: int) -> Dealt:
        """Microbatches of all ranks in an iteration, kept for a while."""
        require(0 <= iteration < self.num_iterations, "iteration", iteration, f"0..{self.num_iterations - 1}")
        number = self._count(epoch, iteration)
        if number not in self._dealt:
            while len(self._dealt) >= KEPT:
                del self._dealt[next(iter(self._dealt))]
            self._dealt[number] = self._plan.deal(self._lessons.at(number), self._samples(epoch)[iteration])
            self._furthest = max(self._furthest, number)
        return self._dealt[number]

    def _samples(self, epoch: int) -> IntArray:
        """Samples of every global batch of an epoch ``[iterations, global_batch]``."""
        if self._batches is None or self._batches[0] != epoch:
            num_samples = len(self._plan.shapes)
            order = np.arange(num_samples)
            if self._stream["shuffle"]:
                order = stable_rng("sampler", self._stream["seed"], epoch).permutation(num_samples)
            whole = order[: self.num_iterations * self.global_batch]
            self._batches = epoch, whole.reshape(self.num_iterations, self.global_batch)
        return self._batches[1]

    def _count(self, epoch: int, iteration: int) -> int:
        """An iteration's number over epochs."""
        return epoch * self.num_iterations + iteration


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, or those of ``torch.distributed``."""
    if rank is None or world_size is None:
        if not (dist.is_available() and dist.is_initialized()):
            missing = "rank" if rank is None else "world_size"
            raise UserError(f"{missing}=None: must be given, because torch.distributed is not initialized")
        rank = dist.get_rank() if rank is None else rank
        world_size = dist.get_world_size() if world_size is None else world_size
    require(0 <= rank < world_size, "rank", rank, f"0..{world_size - 1}, one of world_size")
    return rank, world_size
