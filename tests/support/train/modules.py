"""Small modules, their inputs, and what a module cut into stages gives; used by the tests of stages."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from entrain_bench.config.compose import compose
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.packing import Pack, StageGroups, in_stage_order
from entrain_bench.train.modules.stage import NamedParameter, Stage, build_stage, named_parameters
from support.builders import TOKENS

CPU = torch.device("cpu")
# Items with fewer tokens than their outputs merge, with more, and with as many.
ITEMS = Pack((23, 8, 5, 40), (6, 2, 2, 9))
SAMPLES = (9, 30, 14)
Grads = dict[str, Tensor]


@contextmanager
def groups_of_one(backend: str) -> Iterator[StageGroups]:
    """The groups of a stage while there is a process group of one rank."""
    prepare_platform()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    yield StageGroups(group, group, group)
    dist.destroy_process_group()


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def module_config(name: str, llm_width: int = 128, **changes: Any) -> dict[str, Any]:
    """The values of a module's file, beside an LLM of that width."""
    place = "llm" if "llm" in name or "llama" in name else "vision"
    width = [] if place == "llm" else [f"model.modules.llm.hidden_size={llm_width}"]
    return compose("model=tiny", f"model/module@model.modules.{place}={name}", *width).model["modules"][place] | changes


def small_model(**llm_changes: Any) -> ModelSpec:
    """The tiny modules with two blocks each (three in vision, the second with full attention)."""
    modules = {
        "vision": module_config("tiny_vision", num_layers=3, window_tokens=16, full_attention_layers=[1]),
        "audio": module_config("tiny_audio", num_layers=2),
        "llm": module_config("tiny_llm", num_layers=2, vocab_size=96, **llm_changes),
    }
    return ModelSpec.from_config({"name": "small", "modules": modules, "tokens": TOKENS})


def stage_of(
    model: ModelSpec, module: ModuleSpec, groups: StageGroups, layers: range | None = None, **options: Any
) -> Stage:
    given = {"dtype": torch.float32, "seed": 0, "device": CPU, "recompute": False} | options
    held = range(len(module.layers)) if layers is None else layers
    stage = build_stage(model, module, held, groups, **given)
    for named in named_parameters(stage):
        with torch.no_grad():
            named.parameter.copy_(named.shard(values_of(named)))
    return stage


def values_of(named: NamedParameter) -> Tensor:
    """Values that exercise every parameter, norms and biases included."""
    rng = np.random.default_rng(zlib.crc32(named.key.encode()))
    offset = 1.0 if named.key.endswith("norm.weight") else 0.0
    return torch.from_numpy(rng.normal(offset, 0.1, named.full_shape).astype(np.float32))


def batch_of(module: ModuleSpec, short: bool = False) -> tuple[Tensor, Pack]:
    """Input and pack of a first stage; a short one has five tokens."""
    rng = np.random.default_rng(5)
    if module.is_encoder:
        pack = Pack((3, 2), (1, 1)) if short else ITEMS
        return normal(rng, sum(pack.lengths), input_width(module)), pack
    lengths = (3, 2) if short else SAMPLES
    ids = rng.integers(module.config.vocab_size, size=sum(lengths))
    ids[[0, 3] if short else [0, 1, 2, 15, 16, 40]] = -1
    labels = np.where(rng.random(len(ids)) < 0.7, rng.integers(module.config.vocab_size, size=len(ids)), -1)
    projected = normal(rng, int((ids < 0).sum()), module.config.hidden_size)
    return projected, Pack(lengths, (), torch.from_numpy(ids), torch.from_numpy(labels))


def run_module(
    model: ModelSpec,
    module: ModuleSpec,
    groups: StageGroups,
    cuts: Sequence[int] = (),
    short: bool = False,
    splits_backward: bool = False,
    **options: Any,
) -> Grads:
    """Output, gradient of the input and full gradients of a module cut into stages, put together over all ranks."""
    ends = [0, *cuts, len(module.layers)]
    stages = [stage_of(model, module, groups, range(lo, hi), **options) for lo, hi in pairwise(ends)]
    first, pack = batch_of(module, short)
    pack = replace(pack, splits_backward=splits_backward)
    return run_stages(stages, first.to(options.get("device", CPU)), pack)


def pass_through(
    stages: Sequence[Stage], first: Tensor | None, pack: Pack, gradient_of: Callable[[Tensor], Tensor] = torch.ones_like
) -> Tensor:
    """Forward and backward, in one pass or two, of consecutive stages; inputs keep their gradients. Returns the output.

    With a split backward the weight passes of all stages come after their backwards.
    """
    runs = []
    leaf = first
    for stage in stages:
        output = stage(leaf, pack)
        runs.append((stage, leaf if leaf is not None and leaf.requires_grad else None, output))
        leaf = output.detach().requires_grad_()
    gradient = gradient_of(output)
    left = []
    for stage, leaf, sent in reversed(runs):
        if pack.splits_backward:
            given, weights = stage.backward_inputs(get_gradient_edge(sent), gradient, leaf)
            left.append(weights)
            if leaf is not None:
                leaf.grad = given
        else:
            sent.backward(gradient)
        gradient = None if leaf is None else leaf.grad
    for weights in left:
        weights.run()
    return output.detach()


def run_stages(stages: Sequence[Stage], first: Tensor | None, pack: Pack, gradient: Tensor | None = None) -> Grads:
    """Output, gradient of the input (of an LLM) and full gradients of consecutive stages, over all ranks.

    Args:
        stages: a whole module.
        first: its input; an encoder's in the order of the pack.
        pack: its sequences.
        gradient: of the output; by default ones, or fixed random numbers for an encoder.
    """
    module, groups = stages[0].module, stages[0].groups
    if module.is_encoder:
        first = in_stage_order(module, pack, first)
    elif first is not None:
        first = first.detach().requires_grad_()

    def given(output: Tensor) -> Tensor:
        if gradient is None and module.is_encoder:
            return normal(np.random.default_rng(6), *output.shape).to(output.device)
        return torch.ones_like(output) if gradient is None else gradient

    output = pass_through(stages, first, pack, given).clone()
    result = {"output": output}
    if not module.is_encoder:
        dist.all_reduce(output, group=groups.cp)
        if first is not None:
            result["input"] = first.grad
    for stage in stages:
        for named in named_parameters(stage):
            grad = named.parameter.grad
            assert grad is not None, named.key
            dist.all_reduce(grad, group=groups.dp_cp)
            # Tensor parallel ranks may have different tokens.
            if groups.splits_tokens and getattr(named.parameter, "sequence_parallel", False):
                dist.all_reduce(grad, group=groups.tp)
            shards = [torch.empty_like(grad) for _ in range(named.tp)]
            dist.all_gather(shards, grad, group=groups.tp)
            full = assembled(named, shards)
            result[named.key] = result[named.key] + full if named.key in result else full
    return result


def assembled(named: NamedParameter, shards: Sequence[Tensor]) -> Tensor:
    """The full tensor, from the shards of all tensor parallel ranks in order."""
    if named.dim < 0:
        return shards[0]
    pieces = [shard.chunk(named.stride, named.dim) for shard in shards]
    return torch.cat([piece for row in zip(*pieces, strict=True) for piece in row], named.dim)


def relative_errors(actual: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of each tensor's error over its norm."""
    assert actual.keys() == exact.keys()
    norm = torch.linalg.vector_norm
    return {key: float(norm(actual[key].float().cpu() - value) / norm(value)) for key, value in exact.items()}


def differences(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """Tensors that are further apart than ``tolerance`` of the largest expected entry."""
    assert actual.keys() == expected.keys()
    near = {key: (actual[key] - value).abs().max() <= tolerance * value.abs().max() for key, value in expected.items()}
    return [key for key, is_near in near.items() if not is_near]
