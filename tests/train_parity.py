"""Runs programs on gloo ranks and compares gradients, weights and losses with a single process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.compose import compose_cells
from entrain_bench.experiment import Setting, prepare
from entrain_bench.layout import Layout
from entrain_bench.shapes import SampleShapes
from entrain_bench.train.build import build_runtime
from entrain_bench.train.clock import Clock
from entrain_bench.train.control import gather_json
from entrain_bench.train.data import SampleData
from entrain_bench.train.launch import config_from_json, config_to_json
from entrain_bench.train.losses import total_loss
from entrain_bench.train.modules import NamedParameter, StageGroups, build_stage, named_parameters
from entrain_bench.train.platform import prepare_platform
from entrain_bench.train.step import TrainedStage

NUM_STEPS = 3
CPU = torch.device("cpu")
# Small samples of different sizes. Where a gradient is zero but for rounding, Adam would divide noise by noise: a large
# epsilon keeps such parameters still.
SETTING = (
    "cluster=tiny",
    "harness=train",
    "harness.device=cpu",
    "harness.epsilon=1e-3",
    "harness.clip_grad=0.5",
    "global_batch=8",
    "microbatch_size=2",
    "layout.tp=null",
    "layout.dp=null",
    "distributed_optimizer=false",
    "workload=synthetic",
    "workload.text.median=20",
    "workload.modalities.image.llm_tokens.median=8",
    "workload.modalities.image.llm_tokens.max=40",
    "workload.modalities.image.probability=0.8",
)
WITH_AUDIO = (
    *SETTING,
    "model=tiny_av",
    "workload=synthetic_av",
)


def configuration(*overrides: str) -> str:
    """A run's configuration as text for the ranks."""
    return config_to_json(compose_cells([*SETTING, "model=tiny", *overrides])[0].config)


def batch(setting: Setting, iteration: int) -> SampleShapes:
    return setting.source.batch(iteration, setting.job.global_batch, 0)


def train_reference(_: int, config: str, path: Path) -> None:
    """One process, sample by sample, whole modules and torch's own AdamW; leaves what parity needs at ``path``."""
    prepare_platform()
    setting = prepare(config_from_json(config))
    harness, model = setting.executor, setting.job.model
    alone = StageGroups(dist.group.WORLD, dist.group.WORLD, dist.group.WORLD)
    stages = {
        module.name: build_stage(
            model, module, range(len(module.layers)), alone, dtype=torch.float32, seed=0, device=CPU, recompute=False
        )
        for module in model.modules
    }
    parameters = {named.key: named.parameter for stage in stages.values() for named in named_parameters(stage)}
    adam = torch.optim.AdamW(parameters.values(), lr=harness.learning_rate, eps=harness.epsilon, weight_decay=0.0)
    losses, norms, gradients = [], [], {}
    for iteration in range(NUM_STEPS):
        data = SampleData(batch(setting, iteration), 0, model.llm.config.vocab_size, CPU)
        adam.zero_grad()
        loss = sum(sample_loss(data, stages, model, sample) for sample in range(len(data.shapes)))
        loss = loss / data.num_loss_tokens
        loss.backward()
        if not iteration:
            gradients = {f"gradient {key}": p.grad.numpy().copy() for key, p in parameters.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), harness.clip_grad)))
        adam.step()
        losses.append(float(loss.detach()))
    weights = {f"weight {key}": parameter.detach().numpy() for key, parameter in parameters.items()}
    np.savez(path, losses=losses, norms=norms, **gradients, **weights)


def sample_loss(data: SampleData, stages: dict[str, torch.nn.Module], model: object, sample: int) -> torch.Tensor:
    """Summed loss of one sample, its items encoded one by one."""
    shapes, projected = data.shapes, []
    for item in range(int(shapes.item_offsets[sample]), int(shapes.item_offsets[sample + 1])):
        name = shapes.modalities[int(shapes.item_modality[item])]
        module = next(m for m in model.encoders if name in m.config.modalities)
        items = np.array([item])
        projected.append(stages[module.name](data.features(module, items), data.encoder_pack(items)))
    pack = data.llm_pack(np.array([sample]))
    return stages[model.llm.name](torch.cat(projected) if projected else None, pack)


class RecordingStage(TrainedStage):
    """Keeps the summed gradients, before clipping changes them."""

    kept: ClassVar[dict[str, tuple[NamedParameter, torch.Tensor]]] = {}

    def sync_gradients(self, tied: dist.ProcessGroup | None) -> None:
        super().sync_gradients(tied)
        for named in named_parameters(self.stage):
            self.kept[named.key] = named, named.parameter.main_grad.clone()


def compare(_: int, config: str, layout: Layout | None, reference: Path) -> dict[str, float]:
    """Train like the reference; returns the worst excess over tolerance of gradients, weights, losses and norms."""
    prepare_platform()
    setting = prepare(config_from_json(config))
    control = dist.group.WORLD
    layout = layout or setting.strategy.plan(setting.profile)
    runtime = build_runtime(setting.job, layout, setting.executor, CPU, 0, control)
    runtime.stages = {
        place: RecordingStage(t.stage, t.buffers, t.optimizer, t.groups) for place, t in runtime.stages.items()
    }
    RecordingStage.kept.clear()
    # A distributed optimizer leaves each rank a shard of the summed gradients only; weights tell of the rest.
    whole = not setting.job.distributed_optimizer
    with np.load(reference) as arrays:
        wanted = dict(arrays)
    worst = {"gradient": 0.0, "weight": 0.0, "loss": 0.0, "norm": 0.0}
    for iteration in range(NUM_STEPS):
        program = setting.strategy.compose(batch(setting, iteration), layout, setting.profile)
        result = runtime.run(program, Clock(CPU))
        seen = gather_json([(row.action, float(row.loss)) for row in result.losses], control)
        worst["loss"] = max(worst["loss"], abs(total_loss(program, seen) / float(wanted["losses"][iteration]) - 1.0))
        worst["norm"] = max(worst["norm"], abs(result.grad_norm / float(wanted["norms"][iteration]) - 1.0))
        for named, value in RecordingStage.kept.values() if not iteration and whole else ():
            worst["gradient"] = max(worst["gradient"], excess(value, named, wanted[f"gradient {named.key}"]))
    for trained in runtime.stages.values():
        for named in named_parameters(trained.stage):
            value = named.parameter.detach()
            worst["weight"] = max(worst["weight"], excess(value, named, wanted[f"weight {named.key}"]))
    return worst


def excess(value, named, full) -> float:
    """Largest error in units of the tolerance: rtol 1e-4, atol 1e-6."""
    wanted = named.shard(torch.from_numpy(full))
    return float(((value - wanted).abs() / (1e-6 + 1e-4 * wanted.abs())).max())
