"""Runs in a test: small settings, their text for ranks, and the loop without a launcher."""

from __future__ import annotations

import json
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.config.schema import ASIDE, RunConfig
from entrain_bench.program import Program
from entrain_bench.records.metrics import RunResult
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare, unwatched
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train import loop
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.running.data import SampleData
from entrain_bench.train.running.runtime import Runtime, build_runtime
from entrain_bench.train.settings import TrainSettings

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
AUDIO = (
    "+workload.modalities.audio={llm_tokens: {kind: lognormal, median: 8, sigma: 0.5, min: 4, max: 30}, "
    "items_per_sample: 1, probability: 0.6, encoder_tokens_per_llm_token: null}"
)
DISJOINT = ("model=tiny", "strategy=megatron", "layout.tp=1", "layout.pp=2", "layout.dp=2")
ONE_RANK = (
    "model=tiny",
    "strategy=hetero_colocated",
    "harness.num_ranks=1",
    "cluster.gpus_per_node=1",
    "cluster.tiers=[{name: network, bandwidth_bytes_per_s: 6.0e9, latency_s: 14.0e-6}]",
)


def config_to_json(config: RunConfig) -> str:
    """A run's configuration for ranks."""
    return json.dumps(config.content() | {name: getattr(config, name) for name in ASIDE})


def config_from_json(text: str) -> RunConfig:
    """The configuration that ``config_to_json`` wrote."""
    return RunConfig.from_values(json.loads(text))


def configuration(*overrides: str) -> str:
    """A run's configuration as text for the ranks; a workload among the overrides takes the place of the small one."""
    own = any(text.startswith("workload=") for text in overrides)
    given = [text for text in SETTING if not (own and text.startswith("workload"))]
    return config_to_json(compose_cells([*given, *overrides])[0].config)


def batch(setting: RunContext, iteration: int) -> SampleShapes:
    return setting.source.batch(iteration, setting.job.global_batch, 0)


def build_here(config: str) -> tuple[RunContext, Runtime]:
    """A run's context and this rank's runtime under its planner's layout; to be called on all ranks."""
    prepare_platform()
    setting = prepare(config_from_json(config))
    assert isinstance(setting.executor, TrainSettings)
    layout = setting.strategy.plan(setting.profile)
    return setting, build_runtime(layout, setting.executor, CPU, 0, dist.group.WORLD)


def program_of(setting: RunContext, iteration: int = 0) -> Program:
    """The program of an iteration under the planner's layout."""
    layout = setting.strategy.plan(setting.profile)
    return setting.strategy.program(batch(setting, iteration), layout, setting.profile)


def run_here(config: str, control: dist.ProcessGroup | None = None) -> RunResult | None:
    """The outcome of a run on rank 0, None on others; to be called on all ranks, without a launcher."""
    with patch.object(loop, "process_group", lambda *_: nullcontext(control or dist.group.WORLD)):
        return loop.train(config_from_json(config), unwatched)


def train_here(config: str) -> list[dict[str, float]]:
    """The metrics of every iteration, on rank 0; as ``run_here``."""
    outcome = run_here(config)
    return [dict(row) for row in outcome.iterations] if outcome else []


def features_of(data: SampleData, module: ModuleSpec, items: np.ndarray) -> torch.Tensor:
    """Input of an encoder for some items ``[tokens, input width]``, in stage order."""
    found = data.inputs(module, 0, items).features_on(CPU)
    assert found is not None
    return found
