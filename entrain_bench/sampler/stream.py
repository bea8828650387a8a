"""A balanced stream of samples whose sizes are found on the way."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from entrain_bench.base.errors import UserError, require
from entrain_bench.sampler.padding import NONE
from entrain_bench.sampler.planning import DATA_PARALLEL, FIXED, BatchPlan, place_of, plan_batches
from entrain_bench.specs.shapes import shapes_from_lists

# Text tokens of a sample, and modality, encoder tokens and LLM tokens of each of its items.
type Size = tuple[int, Sequence[tuple[str, int, int]]]


class BalancedStream(IterableDataset[list[Any]]):
    """This rank's microbatches of a stream, as lists of samples: ``DataLoader(stream, batch_size=None, ...)``.

    Every rank reads the whole stream into a buffer of one global batch, and takes its part of it. Let the stream yield
    samples that are cheap to read, and decode those of a microbatch in ``collate_fn``. An incomplete last batch is left
    out. To resume, set ``start`` to the next iteration: earlier samples are read and passed by.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        size: Callable[[Any], Size],
        *,
        model: str,
        cluster: str,
        global_batch: int,
        microbatch_size: int,
        strategy: str | None = None,
        padding: str = NONE,
        rank: int | None = None,
        world_size: int | None = None,
        overrides: Sequence[str] = (),
        config_dir: str | None = None,
    ) -> None:
        """Take a stream that is the same on all ranks; ``size`` reads a sample's sizes.

        Other arguments are those of ``BalancedBatchSampler``; errors in them end the first iteration.
        """
        self.rank, self.world_size = place_of(rank, world_size)
        self.global_batch = global_batch
        self.start = 0
        self._samples = samples
        self._size = size
        self._options = {"model": model, "cluster": cluster, "microbatch_size": microbatch_size, "seed": 0}
        self._where = padding, overrides, config_dir
        self._strategy = strategy
        self._plan: BatchPlan | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this rank's microbatches; ``UserError`` for several workers, which would mix iterations."""
        worker = get_worker_info()
        require(worker is None or worker.num_workers == 1, "num_workers", worker and worker.num_workers, "0 or 1")
        stream = islice(iter(self._samples), self.start * self.global_batch, None)
        while len(buffer := [*islice(stream, self.global_batch)]) == self.global_batch:
            sizes = [self._size(sample) for sample in buffer]
            modalities = dict.fromkeys(item[0] for _, items in sizes for item in items)
            shapes = shapes_from_lists([*modalities], sizes)
            if self._plan is None:
                padding, overrides, config_dir = self._where
                options = {**self._options, "global_batch": self.global_batch}
                self._plan = plan_batches(
                    shapes,
                    DATA_PARALLEL,
                    FIXED,
                    self.world_size,
                    overrides,
                    config_dir,
                    strategy=self._strategy,
                    padding=padding,
                    **options,
                )
                self._plan.warn([shapes])
            model = self._plan.setting.job.model
            if unknown := {*modalities} - {name for module in model.encoders for name in module.config.modalities}:
                raise UserError(f"size: modality {min(unknown)}: model={model.name} has no encoder for it")
            dealt = self._plan.deal(self._plan.setting.strategy.assigner, shapes)
            for row in dealt[self.rank]:
                yield [buffer[index] for index in row]
