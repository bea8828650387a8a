"""Learning stages: gradients summed over data and context parallel ranks, then an Adam step.

``TrainedStage`` has megatron-core's fp32 buckets, optimizer and clipping; ``ShardedStage`` torch's FSDP2. There every
pass is a collective, and a replica without a chunk runs an empty one. Losses are divided by the batch's predicted
tokens before backward, so gradients are summed, never averaged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Parameter

from entrain_bench.specs.framework import BF16, FP32
from entrain_bench.train.modules.packing import Pack, StageGroups
from entrain_bench.train.modules.split import WeightPass
from entrain_bench.train.modules.stage import SlicedStage, Stage, slice_stages
from entrain_bench.train.running.learning import OptimizerSettings, adam_of, clip_gradients, local_part
from entrain_bench.train.running.states import OwnStage, Part

# Attributes that megatron-core sets on parameters; sharded ones are other objects.
NOTES = ("partition_dim", "partition_stride", "sequence_parallel", "tensor_model_parallel")


@dataclass(frozen=True, slots=True)
class TrainedStage(OwnStage):
    """A stage with its gradient buffers and its optimizer; ``widths`` as in ``Groups``, ``sliced`` by wider TP.

    Copies of a tied embedding are on ranks ``tied``, or the ``first_copy`` is on this one.
    """

    stage: Stage
    buffers: DistributedDataParallel
    optimizer: MegatronOptimizer
    groups: StageGroups
    widths: Mapping[int, StageGroups] = field(default_factory=dict)
    sliced: Mapping[int, SlicedStage] = field(default_factory=dict)
    tied: dist.ProcessGroup | None = None
    first_copy: Parameter | None = None

    @property
    def buckets(self) -> list[Any]:
        """megatron-core's buckets of gradients; experts that are divided among ranks have their own."""
        return [*self.buffers.bucket_groups, *self.buffers.expert_parallel_bucket_groups]

    def forward(self, leaf: torch.Tensor | None, pack: Pack, degree: int = 0) -> torch.Tensor:
        """The stage's output for a chunk."""
        groups = self.at(degree)
        stage = self.buffers
        if sliced := self.sliced.get(groups.tp.size()):
            self.gather_weights()
            stage = sliced.take()
        output: torch.Tensor = stage(leaf, pack, groups)
        return output

    @property
    def meets(self) -> bool:
        """Whether replicas go through passes together, because they share experts."""
        return self.groups.experts is not None

    def backward(
        self,
        output: GradientEdge,
        gradient: torch.Tensor,
        leaf: torch.Tensor | None,
        degree: int = 0,  # noqa: ARG002
        *,
        last: bool = False,
        closes: bool = False,
    ) -> torch.Tensor | None:
        """Add to the stage's gradients; returns that of ``leaf``."""
        with self._sending(last=last, closes=closes):
            torch.autograd.backward([output], [gradient])
        return None if leaf is None else leaf.grad

    def backward_inputs(
        self, output: GradientEdge, gradient: torch.Tensor, leaf: torch.Tensor | None, degree: int
    ) -> tuple[torch.Tensor | None, WeightPass]:
        """The first pass of a split backward."""
        sliced = self.sliced.get(self.at(degree).tp.size())
        return (sliced.stage if sliced else self.stage).backward_inputs(output, gradient, leaf)

    def backward_weights(self, left: WeightPass, *, last: bool, closes: bool = False) -> None:
        """Add the deferred gradients of a split backward to the stage's gradients."""
        with self._sending(last=last, closes=closes):
            left.run()

    @contextmanager
    def _sending(self, *, last: bool, closes: bool) -> Iterator[None]:
        """Send gradients after the last pass; in the first iteration, which records buckets, after any last pass."""
        sends = last and (closes or all(group.is_first_batch for group in self.buckets))
        with nullcontext() if sends else self.buffers.no_sync():
            yield
        if closes:
            self.start_sums()

    def start_sums(self) -> None:
        """Begin the remaining sums of gradients over replicas."""
        self.gather_weights()
        for group in self.buckets if self.buffers.ddp_config.overlap_grad_reduce else ():
            if group.grad_reduce_handle is None:
                group.start_grad_sync()

    def start_gather(self) -> None:
        """Begin to gather weights that the optimizer step left sharded."""
        for group in self.buckets if self.buffers.ddp_config.overlap_param_gather else ():
            if not group.param_gather_dispatched:
                group.start_param_sync()

    def gather_weights(self) -> None:
        """Gather weights that the optimizer step left sharded; collective over replicas."""
        self.start_gather()
        for group in self.buckets:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def zero_grad(self) -> None:
        """Forget the last iteration's gradients."""
        self.buffers.zero_grad_buffer()
        self.optimizer.zero_grad()
        for sliced in self.sliced.values():
            sliced.forget()

    def sync_gradients(self) -> None:
        """Sum gradients over replicas, over tensor parallel ranks with parts of the tokens, and over tied copies."""
        self.start_sums()
        self.buffers.finish_grad_sync()
        if self.groups.tp.size() > 1:
            for parameter in self.stage.parameters():
                if parameter.requires_grad and getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.main_grad, group=self.groups.tp)  # type: ignore[attr-defined]
        embedding = self.stage.tied_embedding()
        if embedding is None or not embedding.requires_grad:
            return
        if self.tied is not None:
            dist.all_reduce(embedding.main_grad, group=self.tied)  # type: ignore[attr-defined]
        if self.first_copy is not None:
            self.first_copy.main_grad += embedding.main_grad  # type: ignore[attr-defined]
            embedding.main_grad.copy_(self.first_copy.main_grad)  # type: ignore[attr-defined]

    def part_of(self, parameter: Parameter) -> Part | None:
        """Return the part of a parameter that this rank's optimizer updates; None if there is none."""
        if not parameter.requires_grad:
            return Part(parameter.data, 0, parameter, None)
        # megatron-core chains optimizers of different kinds of parameters: those of divided experts are the last.
        first, *rest = self.optimizer.chained_optimizers
        outer = first if getattr(parameter, "allreduce", True) else rest[0]
        inner = outer.optimizer
        if not self.buffers.ddp_config.use_distributed_optimizer:
            main = getattr(parameter, "main_param", parameter)
            return Part(main.data, 0, main, inner.state[main])
        if outer.is_stub_optimizer or parameter not in outer.model_param_group_index_map:
            return None
        group, order = outer.model_param_group_index_map[parameter]
        shard = inner.param_groups[group]["params"][order]
        start = outer._get_model_param_range_map(parameter)["param"].start
        return Part(shard.data, start, shard, inner.state[shard])

    def cuts_states(self, parameter: Parameter) -> bool:
        """Whether replicas hold a part of a parameter's optimizer states each."""
        return parameter.requires_grad and bool(self.buffers.ddp_config.use_distributed_optimizer)

    def gradient_square(self) -> torch.Tensor:
        """This rank's share of the sum of squares of the stage's gradients, float64."""
        self.optimizer.prepare_grads()
        parts = []
        for optimizer, sharing in zip(self.optimizer.chained_optimizers, self.groups.sharing, strict=False):
            # Without sharded optimizer states all ranks that share hold the same gradients.
            copies = 1 if self.buffers.ddp_config.use_distributed_optimizer else sharing.size()
            grads = [grad.double() for grad in optimizer.get_grads_for_grad_norm() if grad.numel()]
            parts += [torch.linalg.vector_norm(grad) ** 2 / copies for grad in grads]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)

    def step(self, clip_grad: float, total_norm: float) -> None:
        """Clip by the norm over all modules, and step."""
        if clip_grad and (parameters := self.optimizer.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, clip_grad, total_norm)
        self.optimizer.step_with_ready_grads()


def train_stage(
    stage: Stage,
    groups: StageGroups,
    alone: dist.ProcessGroup,
    settings: OptimizerSettings,
    widths: Mapping[int, StageGroups] | None = None,
    tied: dist.ProcessGroup | None = None,
    first_copy: Parameter | None = None,
) -> TrainedStage:
    """Wrap a stage; collective over its replicas. Dimensions that stages do not have are of this rank ``alone``."""
    collection = ProcessGroupCollection()
    for name in ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt"):
        setattr(collection, name, groups.dp_cp)
    for name in ("pp", "mp", "tp_ep_pp"):
        setattr(collection, name, alone)
    collection.ep = groups.experts.ep if groups.experts else alone
    for name in ("expt_dp", "intra_expt_dp"):
        setattr(collection, name, groups.experts.same if groups.experts else alone)
    collection.tp = collection.expt_tp = groups.tp
    distributed = settings.framework.distributed_optimizer and groups.dp_cp.size() > 1
    overlap = settings.framework.overlap_grad_reduce and groups.dp_cp.size() > 1
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.framework.grad_dtype == FP32,
        overlap_grad_reduce=overlap,
        overlap_param_gather=distributed and settings.framework.overlap_param_gather,
        # All buckets' gathers begin together (``start_gather``); a bucket's end does not begin the next one's.
        align_param_gather=True,
        use_distributed_optimizer=distributed,
    )
    # Sum over replicas; megatron-core would take the mean.
    stage.config.calculate_per_token_loss = True
    # megatron-core does so for the later stages of a pipeline, whose synchronization is not on the critical path.
    buffers = DistributedDataParallel(
        stage.config, config, stage, disable_bucketing=stage.held.start > 0, pg_collection=collection
    )
    half = next(stage.parameters()).dtype is torch.bfloat16
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.epsilon,
            clip_grad=0.0,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
            use_distributed_optimizer=distributed,
            overlap_param_gather=config.overlap_param_gather,
        ),
        [buffers],
        use_gloo_process_groups=False,
        pg_collection=collection,
    )
    # Only the distributed optimizer takes the group from the collection; others would ask megatron's global state.
    for part in (optimizer, *optimizer.chained_optimizers):
        part.tp_group = groups.tp
    sliced = slice_stages(stage, widths or {})
    return TrainedStage(stage, buffers, optimizer, groups, widths or {}, sliced, tied, first_copy)


@dataclass(frozen=True, slots=True)
class ShardedStage(OwnStage):
    """A stage under FSDP2 and its optimizer, which steps this rank's parts; ``widths`` as in ``Groups``.

    If it ``keeps`` gathered weights, they stay until the end of the iteration.
    """

    stage: Stage
    optimizer: torch.optim.AdamW
    groups: StageGroups
    widths: Mapping[int, StageGroups] = field(default_factory=dict)
    keeps: bool = False

    def forward(self, leaf: Tensor | None, pack: Pack, degree: int = 0) -> Tensor:
        """The stage's output for a chunk."""
        output: Tensor = self.stage(leaf, pack, self.at(degree))
        return output

    @property
    def meets(self) -> bool:
        """Whether replicas go through passes together: always."""
        return True

    def zero_grad(self) -> None:
        """Forget the last iteration's gradients; gather weights that it keeps, for ranks may have no first forward."""
        self.optimizer.zero_grad()
        for part in self.stage.modules() if self.keeps else ():
            if isinstance(part, FSDPModule):
                part.unshard()

    def sync_gradients(self) -> None:
        """Drop weights; sum gradients that saw a part of the tokens over TP ranks. A stage has both tied embeddings."""
        for part in self.stage.modules() if self.keeps else ():
            if isinstance(part, FSDPModule):
                part.reshard()
        for parameter in self.stage.parameters() if self.groups.tp.size() > 1 else ():
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
        clip_gradients(self.stage.parameters(), clip_grad, total_norm)
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
    stage: Stage,
    groups: StageGroups,
    settings: OptimizerSettings,
    widths: Mapping[int, StageGroups] | None = None,
    *,
    keeps: bool = False,
) -> ShardedStage:
    """Shard a stage layer by layer; collective over its replicas. A tied embedding stays with the root.

    Layers drop gathered weights after each pass, or the stage ``keeps`` them.
    """
    notes: dict[str, dict[str, Any]] = {
        name: {note: getattr(parameter, note) for note in NOTES if hasattr(parameter, note)}
        for name, parameter in stage.named_parameters()
    }
    half = next(stage.parameters()).dtype is torch.bfloat16
    stage.float()
    # Outputs of stages and heads are views that no code changes in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    mesh = DeviceMesh.from_group(groups.dp_cp, next(stage.parameters()).device.type)
    reduced = torch.bfloat16 if half and settings.framework.grad_dtype == BF16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=reduced)
    if groups.experts:
        # Each rank has experts of its own, which it shards over the ranks that hold the same ones.
        same = DeviceMesh.from_group(groups.experts.same, next(stage.parameters()).device.type)
        as_given = replace(policy, cast_forward_inputs=False)
        for part in [part for part in stage.modules() if isinstance(part, SequentialMLP)]:
            fully_shard(part, mesh=same, mp_policy=as_given, reshard_after_forward=not keeps)
    alone = [layer for name, layer in stage.layers.items() if stage.tied_embedding() is None or name != "0"]
    for layer in alone:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False if keeps else None)
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_reshard_after_backward(not keeps, recurse=False)
            # gloo, too, can add; the other way to a factor is NCCL's alone.
            part.set_force_sum_reduction_for_comms(True)
    for name, parameter in stage.named_parameters():
        for note, value in notes[name].items():
            setattr(parameter, note, value)
    adam = adam_of(stage.parameters(), settings)
    return ShardedStage(stage, adam, groups, widths or {}, keeps)
