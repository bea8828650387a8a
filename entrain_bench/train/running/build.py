"""Build what a rank holds under a layout: its stages, their optimizers, its process groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Job
from entrain_bench.train.device import dtype_on
from entrain_bench.train.modules import build_stage
from entrain_bench.train.modules.kernels import find_kernels
from entrain_bench.train.running.content import Content, MadeUp
from entrain_bench.train.running.groups import GroupMaker, make_groups
from entrain_bench.train.running.loader import make_loader
from entrain_bench.train.running.runtime import Runtime
from entrain_bench.train.running.sharded import ShardedStage, shard_stage
from entrain_bench.train.running.step import OptimizerSettings, TrainedStage, train_stage
from entrain_bench.train.settings import PER_CHANNEL, TrainSettings
from entrain_bench.train.weights.naming import default_roots
from entrain_bench.train.weights.reading import Checkpoint, check_tensors, close_files, load_weights


def build_runtime(
    job: Job,
    layout: Layout,
    settings: TrainSettings,
    device: torch.device,
    seed: int,
    control: dist.ProcessGroup,
    maker: GroupMaker | None = None,
    content: Content | None = None,
) -> Runtime:
    """The runtime of this rank; collective over all ranks.

    Weights follow from seed, module and layer alone, so every layout starts from the same model. Content is made up of
    the seed unless given; ``maker`` is for runtimes that share process groups.

    Raises:
        IncompatibleError: for a layout that only the simulator runs, or heads that the kernel asked for cannot take.
        UserError: for a kernel that is asked for and not there, and for published weights that are not the model's.
    """
    for module, given in zip(job.model.modules, layout.modules, strict=True):
        for tp, cp in given.degrees:
            job.framework.check_executable(module, cp, "train")
            if module.is_encoder and given.tp not in (1, tp):
                raise IncompatibleError(
                    f"layout.{given.module}.widths: harness=train cannot slice an encoder's weights split over TP "
                    f"{given.tp} for groups of TP {tp}. Use harness=simulate, or groups of one TP"
                )
        if given.offload:
            raise IncompatibleError(
                f"layout.{given.module}.offload: harness=train cannot offload weights. Use harness=simulate"
            )
    model = job.model
    dtype = dtype_on(device, settings.dtype)
    maker = maker or GroupMaker(control, settings.timeout_s, device, apart=settings.p2p_groups == PER_CHANNEL)
    groups = make_groups(job, layout, maker)
    kernels = find_kernels(settings.kernels, model.modules, dtype, device)
    rest = settings.weight_decay, settings.epsilon, settings.clip_grad
    adam = OptimizerSettings(settings.learning_rate, (settings.betas[0], settings.betas[1]), *rest, job.framework)
    checkpoint = Checkpoint.open(Path(settings.weights)) if settings.weights else None
    roots = check_tensors(checkpoint, model) if checkpoint else default_roots(model)
    build = partial(build_stage, model, dtype=dtype, seed=seed, device=device, kernels=kernels)
    stages: dict[tuple[int, int], TrainedStage | ShardedStage] = {}
    for index, number in sorted(groups.stages):
        module = model.modules[index]
        placed = layout.modules[index]
        own = groups.stages[index, number]
        first = sum(placed.layers_per_stage[:number])
        layers = range(first, first + placed.layers_per_stage[number])
        stage = build(module, layers, own, recompute=placed.recompute, logit_chunk_tokens=job.framework.logit_chunk)
        if checkpoint:
            load_weights(checkpoint, model, stage, roots)
        widths = groups.widths[index, number]
        stages[index, number] = (
            shard_stage(stage, own, adam, widths)
            if placed.sharded
            else train_stage(stage, own, groups.alone, adam, widths)
        )
    close_files()
    content = content or MadeUp(seed, model.llm.config.vocab_size)
    loader = make_loader(settings, device, content)
    return Runtime(stages, groups, adam, dtype, device, content, loader, roots, kernels)
