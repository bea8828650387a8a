"""A stage whose weights are sharded over data and context parallel ranks: torch's FSDP2, layer by layer.

Every pass is a collective: a replica without a chunk in a pass runs an empty one (``empty_pass``), which adds nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Parameter

from entrain_bench.specs.framework import BF16
from entrain_bench.train.modules import Pack, Stage, StageGroups, input_width, merge_tokens
from entrain_bench.train.modules.slices import slice_layers, slice_stages
from entrain_bench.train.running.step import OptimizerSettings, Part, TrainedStage

# What megatron-core notes at parameters; sharded ones are other objects.
NOTES = ("partition_dim", "partition_stride", "sequence_parallel", "tensor_model_parallel")
# megatron-core's, in ``clip_grad_by_total_norm_fp32``.
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class ShardedStage:
    """A stage under FSDP2 and its optimizer, which steps this rank's parts; ``widths`` as in ``Groups``."""

    stage: Stage
    optimizer: torch.optim.AdamW
    groups: StageGroups
    widths: Mapping[int, StageGroups] = field(default_factory=dict)

    def forward(self, leaf: Tensor | None, pack: Pack, degree: int = 0) -> Tensor:
        """The stage's output for a chunk, in groups of the given entry of ``ModuleLayout.degrees``."""
        output: Tensor = self.stage(leaf, pack, self.widths.get(degree, self.groups))
        return output

    def computing(self, degree: int) -> Stage:  # noqa: ARG002
        """The stage that runs chunks of any width."""
        return self.stage

    def backward(self, output: GradientEdge, gradient: Tensor, *, last: bool, closes: bool = False) -> None:  # noqa: ARG002
        """Add to the gradients, which every backward scatters."""
        torch.autograd.backward([output], [gradient])

    def empty_pass(self) -> Iterator[None]:
        """A forward, then a backward that no sample is in; to be advanced once for each."""
        device = next(self.stage.parameters()).device
        module = self.stage.module
        if module.is_encoder:
            tokens = merge_tokens(module)
            pack = Pack((tokens,), (1,))
            leaf = torch.zeros(tokens, input_width(module), device=device)
        else:
            nothing = torch.tensor([-1])
            pack = Pack((1,), (), torch.zeros(1, dtype=torch.int64), nothing)
            # No projected tokens, but a backward as in other replicas if encoders learn.
            wants_gradient = self.stage.passes_gradients
            leaf = torch.zeros(0, module.config.hidden_size, device=device, requires_grad=wants_gradient)
        output = self.forward(leaf, pack)
        yield
        if output.requires_grad:
            torch.autograd.backward([output], [torch.zeros_like(output)])
        yield

    def gather_weights(self) -> None:
        """Nothing to do: passes gather what they need."""

    def zero_grad(self) -> None:
        """Forget the last iteration's gradients."""
        self.optimizer.zero_grad()

    def sync_gradients(self, tied: dist.ProcessGroup | None, first_copy: Parameter | None = None) -> None:
        """Sum gradients that saw a part of the tokens over tensor parallel ranks; a stage has both tied embeddings."""
        assert tied is None
        assert first_copy is None
        for parameter in self.stage.parameters() if self.groups.splits_tokens else ():
            if parameter.grad is not None and getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(local_part(parameter.grad), group=self.groups.tp)

    def cuts_states(self, parameter: Parameter) -> bool:  # noqa: ARG002
        """Whether replicas hold a part of a parameter's optimizer states each: always."""
        return True

    def gradient_square(self) -> Tensor:
        """This rank's share of the sum of squares of the stage's gradients, float64."""
        first = self.groups.tp.rank() == 0
        parts = [
            torch.linalg.vector_norm(local_part(parameter.grad).double()) ** 2
            for parameter in self.stage.parameters()
            if parameter.grad is not None and (first or getattr(parameter, "tensor_model_parallel", False))
        ]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)

    def step(self, clip_grad: float, total_norm: float) -> None:
        """Clip by the norm over all modules, and step."""
        factor = clip_grad / (total_norm + NORM_EPSILON)
        if clip_grad and factor < 1:
            for parameter in self.stage.parameters():
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(factor)
        self.optimizer.step()

    def part_of(self, parameter: Parameter) -> Part | None:
        """This rank's part of a parameter, of which all ranks have equally many rows, the last ones fewer or none."""
        assert isinstance(parameter, DTensor)
        local = parameter.to_local().data
        _, (start, *_) = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        if not local.numel():
            return None
        place = start * (parameter.numel() // len(parameter))
        return Part(local, place, parameter.data, self.optimizer.state[parameter] if parameter.requires_grad else None)


def shard_stage(
    stage: Stage, groups: StageGroups, settings: OptimizerSettings, widths: Mapping[int, StageGroups] | None = None
) -> ShardedStage:
    """Shard a stage layer by layer; collective over its replicas. A tied embedding stays with the root."""
    notes: dict[str, dict[str, Any]] = {
        name: {note: getattr(parameter, note) for note in NOTES if hasattr(parameter, note)}
        for name, parameter in stage.named_parameters()
    }
    half = next(stage.parameters()).dtype is torch.bfloat16
    stage.float()
    # Outputs of stages and heads are views that nobody changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = DeviceMesh.from_group(groups.dp_cp, next(stage.parameters()).device.type)
    reduced = torch.bfloat16 if half and settings.framework.grad_dtype == BF16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=reduced)
    alone = [layer for name, layer in stage.layers.items() if stage.tied_embedding() is None or name != "0"]
    for layer in alone:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(stage, mesh=mesh, mp_policy=policy)
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # gloo, too, can add; the other way to a factor is NCCL's alone.
            part.set_force_sum_reduction_for_comms(True)
    for name, parameter in stage.named_parameters():
        for note, value in notes[name].items():
            setattr(parameter, note, value)
    learning = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    # megatron-core decays matrices only.
    matrices = [parameter for parameter in learning if parameter.dim() > 1]
    rest = [parameter for parameter in learning if parameter.dim() <= 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
    )
    slice_layers(stage, slice_stages(stage, widths or {}))
    return ShardedStage(stage, adam, groups, widths or {})


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(
    stages: Mapping[tuple[int, int], TrainedStage | ShardedStage],
    group: dist.ProcessGroup,
    device: torch.device,
    other: torch.Tensor | float = 0.0,
) -> float:
    """Norm of all modules' gradients, with a square ``other``, which nan makes nan on all ranks; collective."""
    square = torch.zeros((), dtype=torch.float64, device=device) + other
    for trained in stages.values():
        square += trained.gradient_square().to(device)
    dist.all_reduce(square, group=group)
    return float(square.sqrt())
