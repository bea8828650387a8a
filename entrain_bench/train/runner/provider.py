"""Runtimes whose stages are those of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.runner.samples import HubData
from entrain_bench.train.runner.stages import Stages
from entrain_bench.train.runner.trained import HubStage, check_model, hub_stages, with_whole_rows
from entrain_bench.train.running.groups import GroupMaker, make_groups
from entrain_bench.train.running.learning import OptimizerSettings
from entrain_bench.train.running.runtime import Runtime


def hub_runtime(
    stages: Stages,
    spec: ModelSpec,
    layout: Layout,
    settings: OptimizerSettings,
    data_of: Callable[[SampleShapes], HubData],
    maker: GroupMaker,
    device: torch.device,
) -> Runtime[HubStage]:
    """The runtime of this rank, which keeps no other weights of the model, without optimizers; collective.

    ``UserError`` if ``spec`` describes another model, ``IncompatibleError`` for an unsupported layout.
    """
    check_model(stages, spec, layout)
    groups = make_groups(spec, settings.framework, layout, maker, slices=False)
    made = hub_stages(stages, spec, layout, groups, device)
    sized = partial(with_whole_rows, stages=stages)
    return Runtime(made, groups, settings, stages.model.dtype, device, data_of, sized)
