"""Programs that two simulators execute, and how far their times are apart."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from entrain_bench.base.errors import UserError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.columns import covered_per_stage, recompute_chunks
from entrain_bench.program.layout import Layout, check_experts
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions, with_options
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import shapes_from_lists
from entrain_bench.specs.sharding import SHARDINGS
from support.builders import TOKENS, encoder_config, llm_config, tiny_cluster
from support.independent import simulate
from support.programs import random_layout, random_program, random_shards
from support.wide import own_dp

SMALL = ("model=tiny_av", "workload=synthetic_av", "cluster=a40x16", "global_batch=32", "microbatch_size=2")
SMALL += ("layout.tp=2", "layout.dp=2")
# What two orders of adding up may differ by, relative to the iteration.
AGREE = 1e-9
# Free degrees, at which samples take groups of several widths and braid recomputes by chunk.
FREE = ("layout.tp=null", "layout.cp=null", "layout.pp=null", "layout.dp=null")
GROUPS = ("workload=sroie", "cluster=a40x16", "global_batch=64", *FREE)
FRAMEWORKS = {
    "default": FrameworkOptions(),
    "overlapped transfers": FrameworkOptions(p2p="overlapped"),
    "weights gathered late": FrameworkOptions(align_param_gather=False),
    "nothing overlaps": FrameworkOptions(overlap_grad_reduce=False, overlap_param_gather=False),
    "all-reduce": FrameworkOptions(distributed_optimizer=False, p2p="overlapped"),
    "gradients after all": FrameworkOptions(overlap_grad_reduce=False, distributed_optimizer=False),
    "whole hidden states": FrameworkOptions(sequence_parallel=False),
    "whole hidden states in turn": FrameworkOptions(sequence_parallel=False, p2p="overlapped", tp_overlap=0.3),
    "products split": FrameworkOptions(tp_overlap=0.7),
    "encoders whole": FrameworkOptions(encoder_sp=False, encoder_cp=False),
    "gradients in bf16": FrameworkOptions(grad_dtype="bf16", overlap_grad_reduce=False),
    "eager loss on whole hidden states": FrameworkOptions(
        cross_entropy="eager", sequence_parallel=False, tp_overlap=0.5
    ),
    "fused loss": FrameworkOptions(cross_entropy="fused", grad_dtype="bf16"),
    "eager loss": FrameworkOptions(cross_entropy="eager"),
    "older kernels": FrameworkOptions(attention_kernel="flash1", p2p="overlapped"),
    "unfused attention": FrameworkOptions(attention_kernel="unfused", tp_overlap=0.5),
    "two instances": FrameworkOptions(encoder_optimizers=2, encoder_cp=False, p2p="overlapped"),
}


@dataclass(frozen=True)
class Case:
    """A program, its cluster, and the YAML that both come from."""

    program: Program
    cluster: ClusterSpec
    model_config: Mapping[str, Any]
    cluster_config: Mapping[str, Any]


@cache
def decided(strategy: str, *overrides: str) -> Case:
    """A strategy's program; planned once, for any program may be executed under any settings."""
    (cell,) = compose_cells([*overrides, *own_dp(strategy), f"strategy={strategy}"])
    setting = prepare(cell.config)
    layout = setting.strategy.plan(setting.profile)
    shapes = setting.source.batch(0, cell.config.global_batch, 0)
    program = setting.strategy.program(shapes, layout, setting.profile)
    return Case(program, setting.job.cluster, cell.config.model, cell.config.cluster)


def disagreement(case: Case, framework: FrameworkOptions, program: Program | None = None) -> float:
    """Largest difference between any times of the two simulators, relative to the iteration.

    Args:
        case: what both execute.
        framework: under which settings.
        program: what the first executes instead.
    """
    model = with_options(case.program.model, replace(framework, freeze=()))
    truth_of_case = CostTruth(model, case.cluster, framework)
    program = replace(program or case.program, model=model)
    timeline = Simulator(truth_of_case, 1e18).execute(program)
    theirs = simulate(case.model_config, case.cluster_config, asdict(framework), case.program)
    pairs = []
    for number in range(program.num_actions):
        ours = timeline.start_s[number], timeline.end_s[number]
        action = theirs.job.named(number)
        if action:
            pairs.append((timeline.comm_s[number], theirs.comm[action]))
            other = theirs.start[action], theirs.end[action]
        else:
            stage = int(program.stage[number]) + sum(m.pp for m in program.layout.modules[: program.module[number]])
            every = theirs.steps.sync if program.kind[number] == Pass.GRAD_SYNC else theirs.steps.optimizer
            other = every[stage]
        pairs += zip(ours, other, strict=True)
    ours_s, theirs_s = np.array(pairs).T
    return float(np.abs(ours_s - theirs_s).max() / theirs_s.max())


CONFIGS = {"vision": encoder_config(window_tokens=64, full_attention_layers=[1]), "audio": encoder_config(2, "audio")}
CONFIGS |= {"llm": llm_config(2, tied_embeddings=True), "out": encoder_config(role="generator", item_tokens=64)}
GENERATING = {"name": "handmade", "modules": CONFIGS, "tokens": TOKENS}


def random_case(
    rng: np.random.Generator,
    frozen: tuple[str, ...],
    config: Mapping[str, Any] = GENERATING,
    *,
    sharded: bool = False,
    experts: bool = False,
) -> Case:
    """Any degrees, placement and groups, with all else that layouts and programs may have.

    That is virtual stages, offload, shards, split backwards, recomputation by chunk and a single rank between modules.
    With ``sharded`` every module is in one stage, of any kind of sharding, on nodes of four ranks.
    """
    model, cluster = ModelSpec.from_config(config).with_frozen(frozen), tiny_cluster(8, 4 if sharded else 8)
    # Sizes at which all efficiencies fall.
    sizes = {"gemm_half_flops": 1e6, "attention_half_tokens": 500.0, "attention_half_head_dim": 40.0}
    sizes |= {"gemm_half_width": 50.0, "overlap_cost": rng.choice([0.0, 0.2, 1.0]), "host_launch_s": 2e-6}
    sizes |= {"elementwise_efficiency": 0.6}
    cluster = replace(cluster, device=replace(cluster.device, sustained_fraction=0.8, **sizes))
    tiers = [
        replace(tier, collective_efficiency=share, collective_start_s=3e-6)
        for tier, share in zip(cluster.tiers, (0.7, 0.9, 0.5), strict=True)
    ]
    cluster = replace(cluster, tiers=tuple(tiers))
    rows = []
    for _ in range(int(rng.integers(1, 8))):
        kinds = rng.choice(["image", "audio"], int(rng.integers(0, 3))).tolist()
        items = [(kind, int(rng.integers(1, 3000)), int(rng.integers(1, 300))) for kind in kinds]
        rows.append((int(rng.integers(1, 2000)), items))
    layout = random_shards(rng, model, SHARDINGS, cluster.gpus_per_node) if sharded else random_layout(rng, model)
    if experts:
        layout = with_random_ep(rng, layout, model)
    program = random_program(rng, layout, model, shapes_from_lists(["image", "audio"], rows))
    if rng.integers(2):
        remade = []
        for module, placed, rows_of_module in zip(model.modules, program.layout.modules, program.chunks, strict=True):
            most = covered_per_stage(module, placed.layers_per_stage) * (not placed.recompute)
            remade.append(rng.integers(0, 1 + most, (len(rows_of_module), placed.pp)))
        program = recompute_chunks(program, remade)
    return Case(program, cluster, config, asdict(cluster))


def with_random_ep(rng: np.random.Generator, layout: Layout, model: ModelSpec) -> Layout:
    """The layout with any degree of expert parallelism that the LLM can have."""
    index = model.llm_index
    own = layout.modules[index]
    fits = []
    for ep in (1, 2, 4, 8):
        with suppress(UserError):
            check_experts(replace(own, ep=ep), model.llm)
            fits.append(ep)
    modules = [*layout.modules]
    modules[index] = replace(own, ep=int(rng.choice(fits[1:] or fits or [1])))
    return replace(layout, modules=tuple(modules))
