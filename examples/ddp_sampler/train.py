"""A DDP loop with gradient accumulation over a strategy's microbatches, and what it gains on arrival order.

torchrun --nproc-per-node 2 examples/ddp_sampler/train.py
torchrun --nproc-per-node 2 examples/ddp_sampler/train.py --strategies best lpt --padding longest
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
import torch.distributed as dist
from scipy import stats
from small_vlm import RandomContent, Sample, SmallVlm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import entrain_bench as eb

# Arrival order, and the sampler's own choice.
BASELINE, BEST = "megatron", "best"
FOLDER = str(Path(__file__).parent)


def train_iteration(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Sequence[Sample]],
    share: float,
) -> None:
    """One optimizer step: gradients are summed over microbatches and averaged over ranks with the last one.

    Args:
        model: returns the loss of every sample.
        optimizer: of its weights.
        microbatches: this rank's samples.
        share: ranks over samples of the global batch: DDP averages over ranks, what is wanted is a mean over samples.
    """
    optimizer.zero_grad()
    for index, samples in enumerate(microbatches):
        last = index == len(microbatches) - 1
        with nullcontext() if last else model.no_sync():
            (model(samples).sum() * share).backward()
    optimizer.step()


def trace_shapes(name: str, max_image_tokens: int) -> eb.SampleShapes:
    """The samples of a packaged trace, images scaled down to a number of LLM tokens."""
    options = ["workload=trace", f"workload.path={name}", f"workload.max_image_tokens={max_image_tokens}"]
    config = eb.compose(*options, "model=small_vlm", config_dir=FOLDER)
    source = eb.prepare(config).source
    assert isinstance(source, eb.ListedShapes)
    return source.shapes


def sampler_of(strategy: str, shapes: eb.SampleShapes, options: argparse.Namespace) -> eb.BalancedBatchSampler:
    """This rank's microbatches."""
    return eb.BalancedBatchSampler(
        shapes,
        strategy=None if strategy == BEST else strategy,
        padding=options.padding,
        model="small_vlm",
        cluster="hostx2",
        global_batch=options.global_batch,
        microbatch_size=options.microbatch_size,
        config_dir=FOLDER,
        overrides=options.overrides,
    )


def iterations_s(strategy: str, shapes: eb.SampleShapes, options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Seconds of one iteration after another, assignment and loading included.

    Yields:
        Wall time from and to a barrier; and processor time of the busiest rank, which is what the wall time would be on
        cores that nobody else uses.
    """
    sampler = sampler_of(strategy, shapes, options)
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallVlm(options.padding == "longest"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(DataLoader(RandomContent(shapes), batch_sampler=sampler, collate_fn=list))
    share = dist.get_world_size() / options.global_batch
    for iteration in range(sampler.num_iterations):
        dist.barrier()
        started, used = perf_counter(), process_time()
        count = len(sampler.microbatches(iteration))
        train_iteration(model, optimizer, list(islice(batches, count)), share)
        busy = torch.tensor(process_time() - used)
        dist.all_reduce(busy, dist.ReduceOp.MAX)
        yield perf_counter() - started, float(busy)


def measure(names: Sequence[str], shapes: eb.SampleShapes, options: argparse.Namespace) -> np.ndarray:
    """Seconds of the same iterations under every strategy ``[iterations, strategies, 2]``: wall, busiest rank.

    Strategies take turns, so that what else the machine does hits all alike. The first iteration warms up.
    """
    loops = [iterations_s(name, shapes, options) for name in names]
    return np.array([[next(loop) for loop in loops] for _ in range(options.iterations + 1)])[1:]


def interval(ratios: np.ndarray) -> str:
    """Mean and 95% interval (Student's t) of independent ratios."""
    half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / len(ratios) ** 0.5
    return f"{ratios.mean():.3f} ± {half:.3f}"


def main() -> None:
    """Measure every strategy on the same iterations, in turn, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["disttrain", "entrain", "dflop"])
    parser.add_argument("--padding", default="none", choices=["none", "longest"])
    parser.add_argument("--trace", default="mathvision.parquet")
    parser.add_argument("--max-image-tokens", type=int, default=1024)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--overrides", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = trace_shapes(options.trace, options.max_image_tokens)
    names = [BASELINE, *options.strategies]
    measured = np.array([measure(names, shapes, options) for _ in range(options.repetitions)])
    if dist.get_rank() == 0:
        # Iterations have the same samples under every strategy; repetitions of one are not independent.
        median = np.median(measured, axis=0)
        samplers = [sampler_of(name, shapes, options) for name in names]
        # Of the slowest rank, in the iterations that were measured.
        believed_s = np.array([[s.believed_s(1 + i).max() for i in range(options.iterations)] for s in samplers])
        for index, name in enumerate(names):
            mean_s, ratio = median[:, index].mean(axis=0), median[:, 0] / median[:, index]
            gain = np.mean(believed_s[0] / believed_s[index])
            wall, busy = (f"{s:6.3f} s, {BASELINE}/{name} {interval(r)}" for s, r in zip(mean_s, ratio.T, strict=True))
            print(f"{name:12} wall {wall}   busiest rank {busy}   as believed {gain:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
