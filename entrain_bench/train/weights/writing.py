"""Stages written as a published checkpoint: one safetensors file a stage, and an index of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from entrain_bench.base.errors import ExecutionError
from entrain_bench.base.files import write_atomically
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.modules import NamedParameter, Stage, StageGroups, named_parameters
from entrain_bench.train.modules.positions import sinusoids
from entrain_bench.train.weights.checkpoint import INDEX
from entrain_bench.train.weights.naming import Stored, stored_tensors
from entrain_bench.train.weights.reading import Roots, full_name

WHISPER_POSITIONS = 1500  # 30 s (arXiv:2212.04356, section 2.2)


def save_weights(
    folder: Path,
    model: ModelSpec,
    layout: Layout,
    stages: Mapping[tuple[int, int], Stage],
    groups: Mapping[tuple[int, int], StageGroups],
    roots: Roots,
) -> None:
    """Write all stages into a folder; collective over all ranks.

    Files of the same names are replaced, others stay. Stages have whole weights.

    Raises:
        ExecutionError: if the folder cannot be written.
    """
    numbers = {
        (index, stage): number
        for number, (index, stage) in enumerate(
            (index, stage) for index, placed in enumerate(layout.modules) for stage in range(placed.pp)
        )
    }
    total, size, files = len(numbers), 0, dict[str, str]()
    for place in sorted(numbers):
        own = _tensors(model, stages[place], groups[place], roots) if place in stages else {}
        name = f"model-{numbers[place] + 1:05d}-of-{total:05d}.safetensors"
        if own:
            _write(folder, name, own)
        described = [{key: value.nbytes for key, value in own.items()}]
        every: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, described[0])
        sizes = {key: value for each in every for key, value in each.items()}
        size += sum(sizes.values())
        files |= dict.fromkeys(sorted(sizes), name)
    if dist.get_rank() == 0:
        index = {"metadata": {"total_size": size}, "weight_map": files}
        write_atomically(folder / INDEX, json.dumps(index, indent=2).encode())


def _write(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{name}"
        save_file(tensors, beside, metadata={"format": "pt"})
        beside.chmod(0o644)  # for others to read, as the index is; safetensors makes files for their owner alone
        beside.replace(folder / name)
    except OSError as error:
        raise ExecutionError(f"harness.save_weights={folder}: cannot be written ({error.strerror})") from error


def _tensors(model: ModelSpec, stage: Stage, groups: StageGroups, roots: Roots) -> dict[str, Tensor]:
    """The stored tensors of a stage on the one rank that writes them; nothing on others, which take part."""
    found: dict[str, Tensor] = {}
    stored, module = stored_tensors(model, stage.module), stage.module
    second = stage.held.start > 0
    for named in named_parameters(stage):
        key = named.key.removeprefix(f"{module.name}.")
        if second and key == "0.words.weight":
            continue  # the other copy of a tied embedding is the first stage's
        value = named.parameter.detach()
        # Every data parallel rank takes part where weights are sharded; else the first has all it takes.
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if groups.dp_cp.rank():
            continue
        full = _whole(named, value, groups)
        if groups.tp.rank() == 0:
            found |= _unpacked(module, stored[key], full.cpu(), roots)
    if module.config.checkpoint == "whisper_encoder" and not second and groups.dp_cp.rank() == groups.tp.rank() == 0:
        table = sinusoids(torch.arange(WHISPER_POSITIONS), module.config.hidden_size)
        found[full_name(module, "body:embed_positions.weight", roots)] = table.to(stage.config.params_dtype)
    return found


def _whole(named: NamedParameter, value: Tensor, groups: StageGroups) -> Tensor:
    if named.dim < 0 or named.tp == 1:
        return value
    shards = [torch.empty_like(value) for _ in range(named.tp)]
    dist.all_gather(shards, value.contiguous(), group=groups.tp)
    return named.assemble(shards)


def _unpacked(module: ModuleSpec, stored: Stored, full: Tensor, roots: Roots) -> dict[str, Tensor]:
    """A parameter as the tensors that it is made of."""
    if stored.kernel:
        taps = stored.kernel[-1]
        rows = full.view(len(full), taps, -1).transpose(1, 2) if stored.taps_first else full
        full = rows.reshape(len(full), *stored.kernel)
    found = {name: full.new_empty(stored.shape_of(name)) for name in stored.names}
    at = 0
    for part in stored.parts:
        count = part.stop - part.start
        if part.name:
            found[part.name][part.start : part.stop] = full[at : at + count]
        at += count
    return {full_name(module, name, roots): value for name, value in found.items()}
