"""Inputs of a sampler from a configuration, and the microbatches of a rank from an assignment."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from entrain_bench.balancing.interface import Assigner
from entrain_bench.balancing.planning import place_chain
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError, UserError, require, unknown_choice
from entrain_bench.config.compose import compose
from entrain_bench.program.assignment import ModuleAssignment, check_assignment
from entrain_bench.program.layout import Layout, check_layout, layout_to_json
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.sampler.padding import LONGEST, NONE, PADDINGS, Dealt, deal_padded, seconds_of
from entrain_bench.specs.job import Degrees, Job
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import ListedShapes

# How many microbatches ranks have.
FIXED = "fixed"
EQUAL = "equal"
ASSIGNED = "assigned"
COUNTS = (FIXED, EQUAL, ASSIGNED)


def deal(labels: ModuleAssignment, num_ranks: int, counts: str = ASSIGNED, num_microbatches: int = 0) -> Dealt:
    """The microbatches of an assignment, samples in order of arrival; a rank is a replica of ``labels``.

    ``counts`` says how many microbatches ranks have: ``fixed``: ``num_microbatches``; ``equal``: as many as the rank
    with most; ``assigned``: as the assigner chose. Ranks with fewer split those with most samples. ``UserError`` if a
    rank has no sample, or cannot have that many microbatches.
    """
    order = np.lexsort((labels.microbatch, labels.replica))
    replica = labels.replica[order]
    place = labels.microbatch[order]
    first = np.flatnonzero((np.diff(replica, prepend=-1) != 0) | (np.diff(place, prepend=-1) != 0))
    rows = [tuple(row.tolist()) for row in np.split(order, first[1:])]
    of_rank: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    for rank, row in zip(replica[first].tolist(), rows, strict=True):
        of_rank[rank].append(row)
    count = {FIXED: num_microbatches, EQUAL: max(map(len, of_rank)), ASSIGNED: 0}[counts]
    for rank, microbatches in enumerate(of_rank):
        samples = sum(map(len, microbatches))
        if not samples:
            why = f"rank {rank} received no sample of a global batch, but every rank needs one"
            raise UserError(f"strategy.assigner: {why}. Raise global_batch, or use another strategy")
        if count and not len(microbatches) <= count <= samples:
            raise UserError(
                f"counts={counts}: rank {rank} has {samples} samples in {len(microbatches)} microbatches, which cannot "
                f"be split into {count}. Use counts={EQUAL if counts == FIXED else ASSIGNED}"
            )
    return tuple(tuple(split(rows, count)) for rows in of_rank)


def split(microbatches: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Halves the microbatch with most samples, the first of several, where it stands, until there are ``count``."""
    rows = list(microbatches)
    while len(rows) < count:
        largest = max(range(len(rows)), key=lambda index: (len(rows[index]), -index))
        row = rows[largest]
        middle = -(-len(row) // 2)
        rows[largest : largest + 1] = [row[:middle], row[middle:]]
    return rows


# Balances total time of ranks that meet once an iteration: nothing else matters without pipelines.
BEST = "lpt"
# A gain of less over arrival order is none.
LEAST_GAIN = 1.01

# Words for layouts that need not be given.
DATA_PARALLEL = "data_parallel"
PLANNED = "planned"
# Keys of the configuration that arguments of the sampler decide.
OWN_KEYS = ("strategy", "model", "cluster", "workload", "workload.path", "global_batch", "microbatch_size", "seed")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How global batches become microbatches, the same on every rank; ``name`` is a hash of all that decides."""

    setting: RunContext
    layout: Layout
    shapes: SampleShapes
    rows: IntArray  # of the trace, which are the indices of the dataset [samples]
    counts: str
    num_microbatches: int
    name: str
    padding: str = NONE
    pads_best: bool = False

    def deal(self, assigner: Assigner, batch: SampleShapes) -> Dealt:
        """Return microbatches of all ranks as positions among samples; ``UserError`` for an invalid assignment."""
        job = self.setting.job
        if self.pads_best:
            return deal_padded(*self.each_s(batch), self.layout.modules[job.model.llm_index].dp, self.num_microbatches)
        assignment = assigner.assign(batch, self.layout, self.setting.profile.under(self.layout))
        check_assignment(assignment, job.model, self.layout, batch)
        llm = job.model.llm_index
        return deal(assignment.modules[llm], self.layout.modules[llm].dp, self.counts, self.num_microbatches)

    def each_s(self, batch: SampleShapes) -> tuple[FloatArray, FloatArray]:
        """Estimated forward seconds of each sample alone, in encoders and LLM ``[samples]``."""
        placed = self.layout.modules[self.setting.job.model.llm_index]
        return self.setting.profile.estimates.samples(batch, placed.tp, placed.cp, placed.expert_groups)

    def ranks_s(self, dealt: Dealt, batch: SampleShapes) -> FloatArray:
        """Estimated forward seconds of each rank ``[ranks]``."""
        each = self.each_s(batch)
        return np.array([seconds_of(rows, *each, self.padding) for rows in dealt])

    def gain(self, batches: Sequence[SampleShapes]) -> float:
        """Estimated speedup over arrival order, where ranks wait for the slowest once an iteration."""
        ranks = self.layout.modules[self.setting.job.model.llm_index].dp
        # Microbatch after microbatch, as accelerate deals them out.
        order = np.arange(len(batches[0])).reshape(self.num_microbatches, ranks, -1)
        arrival: Any = order.swapaxes(0, 1).tolist()
        before_s = after_s = 0.0
        for batch in batches:
            before_s += self.ranks_s(arrival, batch).max()
            after_s += self.ranks_s(self.deal(self.setting.strategy.assigner, batch), batch).max()
        return before_s / after_s

    def warn(self, batches: Sequence[SampleShapes]) -> None:
        """Warn if a data-parallel loop gains nothing by the strategy, judged by some batches."""
        if self.layout.is_one_stage and not self.pads_best and (gain := self.gain(batches)) < LEAST_GAIN:
            name = self.setting.strategy.name
            best = "" if name == BEST and self.padding == NONE else ". strategy=None chooses the best for such a loop"
            warnings.warn(
                f"strategy={name}: its estimated speedup over arrival order is {gain:.2f}x in this data-parallel loop "
                f"with padding={self.padding}{best}",
                stacklevel=4,
            )


def plan_batches(
    shapes: SampleShapes | str | Path,
    layout: Layout | str,
    counts: str,
    world_size: int,
    overrides: Sequence[str],
    config_dir: str | None,
    *,
    strategy: str | None,
    padding: str,
    **chosen: Any,
) -> BatchPlan:
    """Lay out the model as configured; arguments and errors are those of ``BalancedBatchSampler``."""
    for text in overrides:
        key = text.partition("=")[0]
        require(key not in OWN_KEYS, "overrides", text, f"without {key}, which an argument sets")
    if isinstance(layout, str) and layout not in (DATA_PARALLEL, PLANNED):
        raise unknown_choice("layout", layout, (DATA_PARALLEL, PLANNED))
    if counts not in COUNTS:
        raise unknown_choice("counts", counts, COUNTS)
    if padding not in PADDINGS:
        raise unknown_choice("padding", padding, PADDINGS)
    pads_best = strategy is None and padding == LONGEST
    fits = not pads_best or (counts == FIXED and layout == DATA_PARALLEL)
    require(fits, "counts, layout", f"{counts}, {layout}", f"{FIXED}, {DATA_PARALLEL} with padding and no strategy")
    chosen["strategy"] = strategy or BEST
    usual = {"layout.dp": world_size}
    if layout == DATA_PARALLEL:
        usual |= {"layout.tp": 1, "layout.cp": 1, "layout.pp": 1}
    given = {text.partition("=")[0] for text in overrides}
    own = [f"{key}={value}" for key, value in {**chosen, **usual}.items() if key not in given]
    setting, content = _setting(shapes, [*own, *overrides], config_dir)
    listed = setting.source
    job = setting.job
    whole = world_size * job.microbatch_size
    allowed = f"a multiple of world_size={world_size} x microbatch_size={job.microbatch_size}"
    require(job.global_batch % whole == 0, "global_batch", job.global_batch, allowed)
    assert isinstance(listed, ListedShapes)
    job.model.check_shapes(listed.shapes)
    setting.strategy.check_generators(job.model)
    if not isinstance(layout, Layout):
        layout = setting.plan() if layout == PLANNED else one_stage(job, world_size)
    check_layout(layout, job.model, job.cluster)
    setting = replace(setting, strategy=setting.strategy.under(layout))
    _check_widths(setting, layout, listed.shapes.take(np.arange(min(job.global_batch, len(listed.shapes)))))
    dp = layout.modules[job.model.llm_index].dp
    require(dp == world_size, "world_size", world_size, f"{dp}, the number of LLM replicas of the layout")
    decides = f"{content}\n{layout_to_json(layout)}\n{counts}" + (f"\n{padding}" if pads_best else "")
    name = sha256(decides.encode()).hexdigest()
    rows = np.arange(len(listed.shapes)) if listed.rows is None else listed.rows
    if np.any(rows < 0):
        raise UserError(
            f"shapes={shapes}: lists a part of the data set, whose rows are not known. Scan all of it (max_rows=null)"
        )
    return BatchPlan(setting, layout, listed.shapes, rows, counts, job.global_batch // whole, name, padding, pads_best)


def one_stage(job: Job, world_size: int) -> Layout:
    """The layout of a loop without pipelining: every data-parallel rank holds the whole model, if split by TP x CP."""
    degrees = Degrees(job.request.tp or 1, job.request.cp or 1, 1, world_size)
    require(job.request.pp in (None, 1), "layout.pp", job.request.pp, "1 with layout=data_parallel")
    again = job.request.recompute or ()
    layers = [(len(module.layers),) for module in job.model.modules]
    return place_chain(job, degrees, layers, [module.name in again for module in job.model.modules], leading=False)


def _check_widths(setting: RunContext, layout: Layout, batch: SampleShapes) -> None:
    """Refuse groups of several widths, and assigners that need them: those with ``handles_widths`` try one batch."""
    grouped = next((placed.module for placed in layout.modules if placed.widths), None)
    if grouped:
        raise IncompatibleError(
            f"layout.{grouped}.widths: must be empty, because the sampler's ranks are groups of one width. Use "
            "layout=data_parallel or another strategy"
        )
    if getattr(setting.strategy.assigner, "handles_widths", False):
        setting.strategy.assigner.assign(batch, layout, setting.profile.under(layout))


def fingerprint(shapes: SampleShapes) -> str:
    """Hash of the sizes of all samples."""
    digest = sha256(repr(shapes.modalities).encode())
    for name in ("text_tokens", "item_offsets", "item_modality", "item_encoder_tokens", "item_llm_tokens"):
        column = np.ascontiguousarray(getattr(shapes, name), np.int64)
        digest.update(len(column).to_bytes(8, "little") + column.tobytes())
    return digest.hexdigest()


def _setting(
    shapes: SampleShapes | str | Path, overrides: Sequence[str], config_dir: str | None
) -> tuple[RunContext, str]:
    """Return the objects of the configuration, and the part that decides assignments as text."""
    listed = isinstance(shapes, SampleShapes)
    if not listed and not isinstance(shapes, str | Path):
        kinds = "SampleShapes (entrain_bench.shapes_of makes them of arrays) or the path of a shape trace"
        raise UserError(f"shapes={type(shapes).__name__}: must be {kinds}")
    source = ListedShapes("sampler", shapes) if isinstance(shapes, SampleShapes) else None
    quoted = str(shapes).replace("\\", "\\\\").replace("'", "\\'")
    trace = () if listed else ("workload=trace", f"workload.path='{quoted}'")
    config = compose(*trace, *overrides, config_dir=config_dir)
    kept = {key: value for key, value in config.content().items() if key not in ("workload", "harness", "iterations")}
    return prepare(config, source), json.dumps(kept, sort_keys=True, default=list)


def place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and number of ranks, as given or from ``torch.distributed``."""
    if rank is None or world_size is None:
        if not (dist.is_available() and dist.is_initialized()):
            missing = "rank" if rank is None else "world_size"
            raise UserError(f"{missing}=None: must be given, because torch.distributed is not initialized")
        rank = dist.get_rank() if rank is None else rank
        world_size = dist.get_world_size() if world_size is None else world_size
    require(0 <= rank < world_size, "rank", rank, f"0..{world_size - 1}, one of world_size")
    return rank, world_size
