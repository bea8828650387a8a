"""Runs programs on gloo ranks and compares gradients, weights and losses with a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.planning import partition_layers
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.config.schema import RunConfig
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.run.experiment import Feed, prepare
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.loop import WorkFeed, plan
from entrain_bench.train.measuring import Clock, total_loss
from entrain_bench.train.messages.control import PlanningGroup, gather_values, planning_group
from entrain_bench.train.modules import split
from entrain_bench.train.modules import stage as stage_module
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.stage import NamedParameter, build_stage, named_parameters
from entrain_bench.train.running import runtime as runtime_module
from entrain_bench.train.running.data import MadeUp, SampleData
from entrain_bench.train.running.groups import GroupMaker
from entrain_bench.train.running.runtime import Runtime, Work, build_runtime
from entrain_bench.train.running.stages import ShardedStage, TrainedStage
from entrain_bench_strategies.dip import DipPlanner, colocate
from support.train.faults import OtherInputs, drop_sample, repeat_weights, reverse_rows, skip_weights
from support.train.four_ranks import split_backwards
from support.train.ranks import TIMEOUT_S, run_ranks
from support.train.runs import CPU, batch, config_from_json, features_of

NUM_STEPS = 3
PLANNING_S = 240.0  # a busy machine takes more than a minute to import strategies and plan
RANKS = 4
# Gradients and weights in units of their tolerance, losses and norms relative.
LIMITS = {"gradient": 1.0, "weight": 1.0, "loss": 1e-5, "norm": 1e-4}
# A configuration and a change of its program (``changed``).
type Case = tuple[str, str]


def reference_of(config: str, folder: Path, num_steps: int = NUM_STEPS) -> Path:
    """What one process trains, in a file of the folder."""
    path = folder / "reference.npz"
    run_ranks(train_reference, 1, config, path, num_steps)
    return path


def errors(cases: Sequence[Case], reference: Path) -> list[dict[str, float] | str]:
    """The worst errors of each case on any rank, in units of their limits; or why it cannot run."""
    found: list[dict[str, float] | str] = []
    for results in zip(*run_ranks(compare, RANKS, cases, reference, stay=False), strict=True):
        if isinstance(results[0], str):
            found.append(results[0])
        else:
            found.append({name: max(own[name] for own in results) / limit for name, limit in LIMITS.items()})
    return found


def check(cases: Sequence[Case], reference: Path) -> int:
    """Assert parity of all cases that run; returns how many do."""
    ran = [(case, own) for case, own in zip(cases, errors(cases, reference), strict=True) if isinstance(own, dict)]
    for case, own in ran:
        assert max(own.values()) <= 1, (own, case)
    return len(ran)


def train_reference(_: int, config: str, path: Path, num_steps: int = NUM_STEPS) -> None:
    """One process, sample by sample, whole modules and torch's own AdamW; leaves what parity needs at ``path``."""
    prepare_platform()
    setting = prepare(config_from_json(config))
    settings, model = setting.executor, setting.job.model
    alone = StageGroups(dist.group.WORLD, dist.group.WORLD, dist.group.WORLD)
    stages = {module.name: build_stage(model, module, range(len(module.layers)), alone) for module in model.modules}
    parameters = {named.key: named.parameter for stage in stages.values() for named in named_parameters(stage)}
    learning = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
    adam = torch.optim.AdamW(learning.values(), lr=settings.learning_rate, eps=settings.epsilon, weight_decay=0.0)
    content = MadeUp(0, model.llm.config.vocab_size)
    losses, norms, gradients = [], [], {}
    for iteration in range(num_steps):
        data = SampleData(batch(setting, iteration), content)
        adam.zero_grad()
        loss = sum(sample_loss(data, stages, model, sample) for sample in range(len(data.shapes)))
        loss = loss / data.num_loss_tokens
        loss.backward()
        if not iteration:
            gradients = {f"gradient {key}": p.grad.numpy().copy() for key, p in learning.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(learning.values(), settings.clip_grad)))
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
        projected.append(stages[module.name](features_of(data, module, items), data.encoder_pack(items)))
    pack = data.llm_pack(np.array([sample]))
    return stages[model.llm.name](torch.cat(projected) if projected else None, pack)


class Recorder:
    """Keeps summed gradients by key, before clipping changes them; a ``scale`` plants a fault."""

    kept: ClassVar[dict[str, tuple[NamedParameter, torch.Tensor]]] = {}
    scale: ClassVar[float] = 1.0

    @classmethod
    def after(cls, sync: Callable[..., None]) -> Callable[..., None]:
        def run(trained: TrainedStage | ShardedStage, *given: object) -> None:
            sync(trained, *given)
            for named in named_parameters(trained.stage):
                parameter = named.parameter
                if parameter.requires_grad:
                    sharded = isinstance(trained, ShardedStage)
                    grad = whole_tensor(parameter.grad) if sharded else parameter.main_grad.mul_(cls.scale)
                    cls.kept[named.key] = named, grad.clone()

        return run


@dataclass(frozen=True, slots=True)
class VirtualPlanner(DipPlanner):
    """Two stages of every module on every rank, of the first degrees that meet the request."""

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:  # noqa: ARG002
        job = profile.job
        degrees = next(job.degrees())
        layers = [partition_layers(np.ones(len(module.layers)), 2 * degrees.pp) for module in job.model.modules]
        return colocate(job, degrees, layers, [False] * len(layers))


@dataclass(frozen=True, slots=True)
class UnevenAssigner:
    """A sample a microbatch; all replicas but the last have one."""

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        others = layout.modules[-1].dp - 1
        sample = np.arange(len(shapes))
        microbatch = np.maximum(sample - others, 0)
        return same_microbatches(profile.job.model, shapes, np.minimum(sample, others), microbatch, microbatch)


def compare(_: int, cases: list[tuple[str, str]], reference: Path) -> list[dict[str, float] | str]:
    """Train every configuration like the reference, with a change (``changed``); see ``compare_one``.

    A reason stands for parts that do not fit. With a fault only the first step runs.
    """
    prepare_platform()
    found: list[dict[str, float] | str] = []
    # Cases share groups: each has three threads, until the process ends.
    maker, planning = GroupMaker(dist.group.WORLD, TIMEOUT_S, CPU), planning_group(PLANNING_S)
    for config, change in cases:
        try:
            with changed(change):
                steps = 1 if change in FAULTS else None
                found.append(compare_one(config_from_json(config), reference, maker, planning, steps))
        except IncompatibleError as error:
            found.append(str(error))
    return found


def compare_one(
    config: RunConfig, reference: Path, maker: GroupMaker, planning: PlanningGroup, most_steps: int | None = None
) -> dict[str, float]:
    """Worst relative errors of losses and norms, and worst errors of gradients and weights in units of tolerance."""
    setting = prepare(config)
    control = maker.control
    layout, _ = plan(setting, planning)
    runtime = build_runtime(layout, setting.executor, CPU, 0, control, maker)
    # A distributed optimizer leaves each rank a shard of the summed gradients only; weights tell of the rest.
    whole = not setting.job.framework.distributed_optimizer or layout.modules[0].scatters
    with np.load(reference) as arrays:
        wanted = dict(arrays)
    worst = {"gradient": 0.0, "weight": 0.0, "loss": 0.0, "norm": 0.0}
    feed = WorkFeed(Feed(setting, layout, 0), planning, runtime.prepare)
    num_steps = most_steps or len(wanted["losses"])
    for iteration in range(num_steps):
        work, *_ = feed.take(iteration, last=iteration + 1 == num_steps)
        Recorder.kept.clear()
        result = runtime.run(work, Clock(CPU))
        loss = total_loss(gather_values(result.losses, control))
        worst["loss"] = max(worst["loss"], abs(loss / float(wanted["losses"][iteration]) - 1.0))
        worst["norm"] = max(worst["norm"], abs(result.grad_norm / float(wanted["norms"][iteration]) - 1.0))
        for named, value in Recorder.kept.values() if not iteration and whole else ():
            worst["gradient"] = max(worst["gradient"], excess(value, named, wanted[f"gradient {named.key}"]))
    for trained in runtime.stages.values():
        trained.gather_weights()
        for named in named_parameters(trained.stage):
            value = whole_tensor(named.parameter.detach())
            worst["weight"] = max(worst["weight"], excess(value, named, wanted[f"weight {named.key}"]))
    return worst


@contextmanager
def changed(change: str) -> Iterator[None]:
    """Record gradients; make the runtime wrong (``FAULTS``), or have it run backwards in two passes (``SPLIT``)."""
    with ExitStack() as stack:
        for kind in (TrainedStage, ShardedStage):
            stack.enter_context(patch.object(kind, "sync_gradients", Recorder.after(kind.sync_gradients)))
        for target, name, value in FAULTS[change]() if change in FAULTS else ():
            stack.enter_context(patch.object(target, name, value))
        if change == SPLIT:
            stack.enter_context(patch.object(Runtime, "prepare", prepare_split))
        yield


SPLIT = "split"
FAULTS: dict[str, Callable[[], list[tuple[object, str, object]]]] = {
    "reversed_rows": lambda: [(runtime_module, "plan_rank", reverse_rows)],
    "doubled_scale": lambda: [(Recorder, "scale", 2.0)],
    "dropped_sample": lambda: [(SampleData, "llm_pack", drop_sample)],
    "skipped_weights": lambda: [(TrainedStage, "backward_weights", skip_weights)],
    "repeated_weights": lambda: [(TrainedStage, "backward_weights", repeat_weights)],
    "other_inputs": lambda: [(split, "_gradient_of_product", OtherInputs())],
    # Ranks of a group each count what all use whole, or take the vocabulary in their order.
    "counted_twice": lambda: [(stage_module._CountedOnce, "apply", lambda value, _: value)],
    "other_slices": lambda: [(StageGroups, "renumbered", lambda _, ids, __: ids)],
}


def prepare_split(
    runtime: Runtime, program: Program, _: object, original: Callable[..., Work] = Runtime.prepare
) -> Work:
    return original(runtime, split_backwards(program))


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """A parameter or gradient put together where FSDP has sharded it; collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def excess(value, named, full) -> float:
    """Largest error in units of the tolerance: rtol 1e-4, atol 1e-6."""
    wanted = named.shard(torch.from_numpy(full))
    return float(((value - wanted).abs() / (1e-6 + 1e-4 * wanted.abs())).max())
