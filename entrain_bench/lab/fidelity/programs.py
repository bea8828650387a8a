"""The programs that are trained and predicted: strategies, workloads, seeds, numbers of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from entrain_bench.config.schema import RunConfig
from entrain_bench.program import Program
from entrain_bench.program.layout import layout_to_json
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare

STRATEGIES = ("megatron", "entrain", "disttrain", "dflop", "dip")
# Besides, on four ranks: a group that splits weights and sequences.
SPLIT = {"megatron_tp2_cp2": ("strategy=megatron", "layout.tp=2", "layout.cp=2", "layout.dp=1")}
NUM_RANKS = (2, 4)
# A program is trained before and after it is emulated, for a machine's speed changes over minutes.
HALVES = ("before", "after")
SEEDS = (0, 1)
# Actions of some 5 to 50 ms, so that neither calls from Python nor turns of the scheduler decide; no transfer holds a
# rank, no synchronisation hides behind a pass: what training does.
COMMON = (
    "cluster=hostx2",
    "model=tiny",
    "model.modules.vision.num_layers=4",
    "model.modules.vision.full_attention_layers=[1,3]",
    "model.modules.llm.num_layers=4",
    "workload=synthetic",
    "global_batch=16",
    "microbatch_size=2",
    "layout.tp=1",
    "overlap_grad_reduce=false",
    "overlap_param_gather=false",
    "p2p=overlapped",
    "harness=train",
    "harness.device=cpu",
    "iterations=1",
)
# Two ranks are a pipeline, or the two modules; of four, planners choose.
DEGREES = {2: "layout.dp=1", 4: "layout.dp=null"}
IMAGE = "workload.modalities.image"
WORKLOADS = {
    "even": ("workload.text.median=60", f"{IMAGE}.llm_tokens.median=60", f"{IMAGE}.llm_tokens.sigma=0.3"),
    "uneven": ("workload.text.median=40", f"{IMAGE}.llm_tokens.median=60", f"{IMAGE}.llm_tokens.sigma=1.0"),
    "text": ("workload.text.median=150", f"{IMAGE}.llm_tokens.median=60", f"{IMAGE}.probability=0.5"),
}


@dataclass(frozen=True, slots=True)
class FidelityProgram:
    """A program of one strategy that is trained and predicted; ``workload`` is a name in ``WORKLOADS``."""

    num_ranks: int
    workload: str
    seed: int
    strategy: str
    config: RunConfig
    program: Program

    @property
    def key(self) -> str:
        """Name of its files; changes with what is run."""
        program = self.program
        columns = (program.lane_actions, program.dep_actions, *(chunks.members for chunks in program.chunks))
        digest = hashlib.sha256(b"".join([layout_to_json(program.layout).encode(), *columns])).hexdigest()[:8]
        return f"{self.num_ranks}_{self.workload}_{self.seed}_{self.strategy}_{digest}"


def first_program(config: RunConfig) -> tuple[RunContext, Program]:
    """Return a configuration's run context and its first batch's program; ``UserError`` if settings do not fit."""
    setting = prepare(config)
    layout = setting.plan()
    shapes = setting.source.batch(0, config.global_batch, config.seed)
    return setting, setting.strategy.program(shapes, layout, setting.profile)


def overrides_of(num_ranks: int, workload: str, seed: int, strategy: str) -> list[str]:
    """The overrides of the run of a program."""
    return [
        *COMMON,
        *WORKLOADS[workload],
        DEGREES[num_ranks],
        f"cluster.gpus_per_node={num_ranks}",
        f"harness.num_ranks={num_ranks}",
        f"seed={seed}",
        *SPLIT.get(strategy, (f"strategy={strategy}",)),
    ]


def all_programs(num_cores: int) -> Iterator[FidelityProgram]:
    """Yield every program with a core for each rank, those of a group one after the other."""
    ranks = [number for number in NUM_RANKS if number <= num_cores]
    for num_ranks, workload, seed, strategy in product(ranks, WORKLOADS, SEEDS, (*STRATEGIES, *SPLIT)):
        if strategy in SPLIT and (num_ranks, seed) != (NUM_RANKS[-1], SEEDS[0]):
            continue
        (cell,) = compose_cells(overrides_of(num_ranks, workload, seed, strategy))
        _, program = first_program(cell.config)
        # Training sends from block to block, whatever relay the layout asks for.
        program = replace(program, layout=replace(program.layout, single_rank_boundary=False))
        yield FidelityProgram(num_ranks, workload, seed, strategy, cell.config, program)
