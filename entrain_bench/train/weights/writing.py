"""Stages written as a published checkpoint: one safetensors file a stage, and an index of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from entrain_bench.base.errors import ExecutionError
from entrain_bench.base.files import write_atomically
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.modules import Stage, StageGroups, named_parameters
from entrain_bench.train.modules.positions import sinusoids
from entrain_bench.train.weights.naming import Roots, Rows, Stored, full_name, stored_tensors
from entrain_bench.train.weights.reading import INDEX

WHISPER_POSITIONS = 1500  # 30 s (arXiv:2212.04356, section 2.2)
# Positions that checkpoints store and that are no parameter of a stage.
_SINUSOIDS = "0.sinusoids"


def save_weights(
    folder: Path,
    model: ModelSpec,
    layout: Layout,
    stages: Mapping[tuple[int, int], Stage],
    groups: Mapping[tuple[int, int], StageGroups],
    roots: Roots,
) -> None:
    """Write all stages into a folder, the index last; collective over all ranks.

    Files of the same names are replaced, others stay. Stages have whole weights.

    Raises:
        ExecutionError: if the folder cannot be written.
    """
    places = [(index, stage) for index, placed in enumerate(layout.modules) for stage in range(placed.pp)]
    files: dict[str, str] = {}
    num_weights = 0
    for number, (index, stage) in enumerate(places, start=1):
        module = model.modules[index]
        layers_per_stage = layout.modules[index].layers_per_stage
        stored = stored_tensors(model, module, roots)
        first = sum(layers_per_stage[:stage])
        if module.config.checkpoint == "whisper_encoder":
            positions = full_name(module, "body:embed_positions.weight", roots)
            stored[_SINUSOIDS] = Stored((Rows(positions, 0, WHISPER_POSITIONS),), module.config.hidden_size)
        # Both copies of a tied embedding belong to the first stage.
        layers = range(first, first + layers_per_stage[stage])
        stored = {key: each for key, each in stored.items() if int(key.partition(".")[0]) in layers}
        name = f"model-{number:05d}-of-{len(places):05d}.safetensors"
        if (index, stage) in stages:
            _write_stage(folder / name, stages[index, stage], groups[index, stage], stored)
        shapes = {name: shape for each in stored.values() for name, shape in each.shapes.items()}
        files |= dict.fromkeys(sorted(shapes), name)
        num_weights += sum(map(prod, shapes.values()))
    dist.barrier()
    if places[0] in stages and _is_first(groups[places[0]]):
        size = num_weights * stages[places[0]].config.params_dtype.itemsize
        content = {"metadata": {"total_size": size}, "weight_map": files}
        write_atomically(folder / INDEX, json.dumps(content, indent=2).encode())


def _is_first(groups: StageGroups) -> bool:
    """Whether this rank writes the stage."""
    return groups.dp_cp.rank() == groups.tp.rank() == 0


def _write_stage(path: Path, stage: Stage, groups: StageGroups, stored: Mapping[str, Stored]) -> None:
    """Write a stage's tensors on the first rank of it; collective over the ranks that hold it."""
    tensors: dict[str, Tensor] = {}
    for named in named_parameters(stage):
        key = named.key.removeprefix(f"{stage.module.name}.")
        if key not in stored:
            continue
        value = named.parameter.detach()
        # All data parallel ranks take part if weights are sharded; otherwise the first has them all.
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if groups.dp_cp.rank():
            continue
        if named.dim >= 0 and named.tp > 1:
            shards = [torch.empty_like(value) for _ in range(named.tp)]
            dist.all_gather(shards, value.contiguous(), group=groups.tp)
            value = named.assemble(shards)
        if groups.tp.rank() == 0:
            tensors |= _unpacked(stored[key], value.cpu())
    if not _is_first(groups):
        return
    if _SINUSOIDS in stored:
        table = sinusoids(torch.arange(WHISPER_POSITIONS), stage.module.config.hidden_size)
        tensors |= _unpacked(stored[_SINUSOIDS], table.to(stage.config.params_dtype))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}")
        save_file(tensors, beside, metadata={"format": "pt"})
        beside.chmod(0o644)  # for others to read, as the index is; safetensors makes files for their owner alone
        beside.replace(path)
    except OSError as error:
        raise ExecutionError(f"harness.save_weights={path.parent}: cannot be written ({error.strerror})") from error


def _unpacked(stored: Stored, full: Tensor) -> dict[str, Tensor]:
    """A parameter as the tensors that it is made of."""
    if stored.kernel:
        rows = full.view(len(full), stored.kernel[-1], -1).transpose(1, 2) if stored.taps_first else full
        full = rows.reshape(len(full), *stored.kernel)
    tensors = {name: full.new_empty(shape) for name, shape in stored.shapes.items()}
    for part, rows in zip(
        stored.parts, torch.split(full, [part.stop - part.start for part in stored.parts]), strict=True
    ):
        if part.name:
            tensors[part.name][part.start : part.stop] = rows
    return tensors
