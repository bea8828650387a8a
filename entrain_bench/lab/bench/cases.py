"""The cases by name, each with its target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

from entrain_bench.config.tree import choices
from entrain_bench.lab.bench import everyday
from entrain_bench.lab.bench.measures import (
    against_megatron,
    against_torch,
    assignment,
    assignment_within_limit,
    boundary_against_bridge,
    bucket_filling,
    every_part,
    simulated_iteration,
)

# 2,048 nodes of 8 H100: DP 1024 x 16 stages, 64 microbatches of 4 a replica.
LARGE = (
    "cluster=h100x64",
    "cluster.num_nodes=2048",
    "model=qwen25vl_llama3_8b",
    "layout.tp=1",
    "layout.pp=16",
    "layout.dp=1024",
    "global_batch=262144",
)
# The same GPUs, 131,072 samples over 1,024 replicas.
WIDEST = (*LARGE[:3], "layout.tp=2", "layout.dp=1024", "workload=coco", "global_batch=131072")
# One long pipeline for the comparison with torch: 16 stages, 512 microbatches.
PIPELINE = (
    "strategy=megatron",
    "layout.tp=2",
    "cluster=a40x64",
    "cluster.num_nodes=8",
    "layout.dp=1",
    "global_batch=2048",
)
# 16 samples a bucket, 4 buckets a microbatch index: 128 buckets for 2,048 samples.
BUCKETS = ("strategy=dflop", "strategy/planner=megatron", "microbatch_size=16")
LPT = "entrain_bench.balancing.filling.lpt_with_exchange"
SOLVER_LIMIT = "strategy.assigner.solver_seconds"
# So much that only the limit in seconds ends a solve.
SOLVER_WORK = "strategy.assigner.solver_work_per_sample=1e9"
GLOBAL_BATCHES = (512, 2048, 8192)
ASSIGNMENT_TARGETS = {("entrain", 512): "assign_s <= 0.020", ("entrain", 4096): "assign_s <= 0.200"}
# Two ranks of this machine, an LLM in two stages, text of one length: what megatron-core's own schedule can do.
TRAINED = (
    "strategy=megatron",
    "harness=train",
    "harness.num_ranks=2",
    "harness.device=cpu",
    "cluster=tiny",
    "cluster.gpus_per_node=2",
    "cluster.tiers=[{name: pcie, num_ranks: 2, bandwidth_bytes_per_s: 24e9, latency_s: 5.7e-6}]",
    "model=tiny",
    "~model.modules.vision",
    "workload=uniform",
    "~workload.modalities.image",
    "layout.tp=1",
    "layout.dp=1",
    "layout.pp=2",
    "global_batch=16",
    "microbatch_size=2",
)
# Large enough for products to take nearly all of the time.
WIDE = (
    "model.modules.llm.hidden_size=384",
    "model.modules.llm.head_dim=48",
    "model.modules.llm.ffn_hidden_size=1024",
)

# Cells that take next to no time.
TINY = (
    "strategy=megatron",
    "model=tiny",
    "cluster=tiny",
    "global_batch=16",
    "microbatch_size=2",
    "layout.tp=1",
    "layout.dp=2",
    "iterations=1",
)

type Case = tuple[str, Callable[[], dict[str, float]]]


CASES: dict[str, Case] = {
    "quick": ("from_nothing_s <= 60", partial(everyday.figures, ["quick"])),
    "figures": ("from_nothing_s <= 900, nothing_to_do_s <= 30", everyday.figures),
    "sweep_200_cells": ("first_result_s <= 5, overhead_s <= 0.050", partial(everyday.sweep, 200, TINY)),
    "memory_1000_cells": ("growth <= 0.02", partial(everyday.memory, 1000, TINY)),
    **{
        f"iteration_64_gpus_{name}": ("iteration_s <= 0.010", partial(simulated_iteration, [f"strategy={name}"]))
        for name in ("megatron", "entrain")
    },
    **{
        f"iteration_16384_gpus_{name}": (
            "iteration_s <= 2, peak_rss_gb <= 4",
            partial(simulated_iteration, [f"strategy={name}", *LARGE], repeats=5),
        )
        for name in ("megatron", "entrain")
    },
    **{
        f"all_16384_gpus_{name}": ("assign_s <= 0.5", partial(every_part, [f"strategy={name}", *WIDEST], repeats=3))
        for name in choices("strategy")
    },
    **{
        f"assignment_{name}_{size}": (
            ASSIGNMENT_TARGETS.get((name, size), "assign_s < iteration_time_s"),
            partial(assignment, [f"strategy={name}", f"global_batch={size}"]),
        )
        for name, size in sorted({*product(choices("strategy"), GLOBAL_BATCHES), *ASSIGNMENT_TARGETS})
    },
    **{
        f"lpt_{workload}": (
            "fill_s <= 0.100, worst_gap <= 0.01",
            partial(bucket_filling, [*BUCKETS, "global_batch=2048", f"workload={workload}"], LPT),
        )
        for workload in ("opencqa_ocr", "synthetic")
    },
    **{
        f"solver_{size}_limit_{limit_s}_s": (
            "share <= 1.1",
            partial(assignment_within_limit, [*BUCKETS, f"global_batch={size}", SOLVER_WORK], SOLVER_LIMIT, limit_s),
        )
        for size in (512, 2048)
        for limit_s in (0.2, 2.0)
    },
    **{
        f"training_against_megatron_{size}": (
            "ratio <= 1.05, loss_difference <= 1e-5",
            partial(against_megatron, overrides),
        )
        for size, overrides in (("small", TRAINED), ("wide", [*TRAINED, *WIDE]))
    },
    **{
        f"boundary_against_bridge_{name}": (
            "ratio <= 1.05, different_tensors = 0",
            partial(boundary_against_bridge, *replicas),
        )
        for name, replicas in (("dp1_dp1", (1, 1)), ("dp2_dp1", (2, 1)), ("dp1_dp2", (1, 2)))
    },
    "place_actions_against_torch": ("ratio >= 20", partial(against_torch, PIPELINE)),
}
