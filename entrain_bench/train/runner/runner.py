"""Trains a user's model by the programs of any strategy; data and optimizer are the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from entrain_bench.base.errors import UserError
from entrain_bench.config.schema import RunConfig
from entrain_bench.program import Program
from entrain_bench.program.layout import check_layout
from entrain_bench.program.validate import check_program
from entrain_bench.run.experiment import Feed, prepare, shared_job
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.measuring import Clock
from entrain_bench.train.messages.control import planning_group
from entrain_bench.train.runner.families import Family, family_of
from entrain_bench.train.runner.samples import HubData, Sample
from entrain_bench.train.runner.stages import Stages
from entrain_bench.train.runner.trained import HubStage, hub_runtime
from entrain_bench.train.running.groups import GroupMaker
from entrain_bench.train.running.learning import OptimizerSettings, clip_gradients, global_norm
from entrain_bench.train.settings import refuse_generators

TIMEOUT_S = 1800.0


class Samples(Protocol):
    """Samples of a training stream, the same on all ranks."""

    def bind(self, family: Family) -> None:
        """Take the names of the model's parts."""

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """The sizes of a batch; collective."""

    def sample(self, identity: int) -> Sample:
        """The content of a sample of a batch, by ``SampleShapes.sample_ids``."""

    def num_labelled(self, shapes: SampleShapes) -> int:
        """Labeled tokens of a batch."""


class ProgramRunner:
    """This rank's part of a training run; collective over all ranks."""

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        samples: Samples,
        *,
        family: Family | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Plan, and leave this rank the weights of its stages only.

        ``config`` is a run's (``entrain_bench.compose``), ``model`` has its initial weights on every rank.
        ``UserError`` for a model that the configuration does not describe, ``IncompatibleError`` for an unsupported
        layout.
        """
        self.job = shared_job(config).job
        self.samples, self.seed = samples, config.seed
        spec, cluster = self.job.model, self.job.cluster
        refuse_generators(spec, "ProgramRunner")
        if cluster.num_ranks != dist.get_world_size():
            raise UserError(
                f"cluster={cluster.name}: has {cluster.num_ranks} GPUs, but {dist.get_world_size()} ranks run"
            )
        self._planning = planning_group(TIMEOUT_S)
        # One rank plans and makes programs; all would find the same.
        setting = None if dist.get_rank() else prepare(config)
        layout = self._planning.of_first_rank(lambda: setting and setting.plan())
        check_layout(layout, spec, cluster)
        self._feed = Feed(setting, layout, self.seed) if setting else None
        self.layout = layout
        self.device = device or torch.device("cpu")
        self._stages = Stages(family or family_of(model))
        samples.bind(self._stages.family)
        self.control = self._planning.group
        maker = GroupMaker(self.control, TIMEOUT_S, self.device)
        settings = OptimizerSettings(framework=self.job.framework)
        self._runtime = hub_runtime(self._stages, spec, layout, settings, self._data_of, maker, self.device)
        self._clock = Clock(self.device)

    def _data_of(self, shapes: SampleShapes) -> HubData:
        samples = self.samples
        return HubData(
            shapes, lambda own, index: samples.sample(int(own.sample_ids[index])), samples.num_labelled(shapes)
        )

    @property
    def stages(self) -> Mapping[tuple[int, int], HubStage]:
        """This rank's stages, by module and stage."""
        return self._runtime.stages

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """This rank's learning parameters, by the model's names."""
        return ((name, each) for stage in self.stages.values() for name, each in stage.named.items())

    def parameters(self) -> list[dict[str, list[Parameter]]]:
        """Groups of learning parameters for a torch optimizer: whole ones, and parts of some that others share."""
        groups: dict[bool, list[Parameter]] = {}
        for _, parameter in self.named_parameters():
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        return [{"params": groups[kind]} for kind in sorted(groups)]

    def clip_grad_norm_(self, limit: float) -> float:
        """Scale gradients to a norm of at most ``limit`` over the whole model; returns the norm before."""
        norm = global_norm(self.stages, self.device)
        clip_gradients((parameter for _, parameter in self.named_parameters()), limit, norm)
        return norm

    def step(self, iteration: int) -> float:
        """Run forwards and backwards of an iteration; gradients are those of the returned loss, the same on all ranks.

        The loss is the mean over the labeled tokens of the global batch.
        """
        shapes = self.samples.batch(iteration, self.job.global_batch, self.seed)
        self.job.model.check_shapes(shapes)
        program = self._planning.of_first_rank(lambda: self._feed and _program(self._feed, shapes))
        seen = self._runtime.run(self._runtime.prepare(program), self._clock)
        total = torch.tensor(sum(loss for _, loss in seen.losses), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)


def _program(feed: Feed, shapes: SampleShapes) -> Program:
    program, _ = feed.program(shapes)
    check_program(program)
    return program
