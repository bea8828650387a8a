"""Learning parameters of a stage: gradients in fp32 buckets, summed over data and context parallel ranks, an Adam step.

Buffers, reduction, optimizer and clipping are megatron-core's. Losses are divided by the batch's predicted tokens
before backward, so gradients are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from entrain_bench.specs.framework import FP32, FrameworkOptions
from entrain_bench.train.modules import Pack, Stage, StageGroups
from entrain_bench.train.modules.slices import SlicedStage, slice_stages
from entrain_bench.train.modules.split import WeightPass


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Adam's settings; ``clip_grad`` is a limit of the norm over all modules, 0 for none."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    epsilon: float = 1e-8
    clip_grad: float = 1.0
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a parameter that a rank's optimizer updates and knows by ``owner``.

    ``value`` is consecutive numbers, in fp32 if it learns, from ``start`` of this rank's shard.
    """

    value: torch.Tensor
    start: int
    owner: torch.Tensor
    states: dict[str, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class TrainedStage:
    """A stage with its gradient buffers and its optimizer; ``widths`` as in ``Groups``, ``sliced`` by wider TP."""

    stage: Stage
    buffers: DistributedDataParallel
    optimizer: MegatronOptimizer
    groups: StageGroups
    widths: Mapping[int, StageGroups] = field(default_factory=dict)
    sliced: Mapping[int, SlicedStage] = field(default_factory=dict)

    def forward(self, leaf: torch.Tensor | None, pack: Pack, degree: int = 0) -> torch.Tensor:
        """The stage's output for a chunk, in groups of the given entry of ``ModuleLayout.degrees``."""
        groups = self.widths.get(degree, self.groups)
        stage = self.buffers
        if sliced := self.sliced.get(groups.tp.size()):
            self.gather_weights()
            stage = sliced.take()
        output: torch.Tensor = stage(leaf, pack, groups)
        return output

    def computing(self, degree: int) -> Stage:
        """The stage that runs chunks of the given entry of ``ModuleLayout.degrees``."""
        sliced = self.sliced.get(self.widths.get(degree, self.groups).tp.size())
        return sliced.stage if sliced else self.stage

    def backward(self, output: GradientEdge, gradient: torch.Tensor, *, last: bool, closes: bool = False) -> None:
        """Add to the stage's gradients; ``last`` and ``closes`` as ``ends_gradients`` and ``closes`` of ``Step``."""
        with self._sending(last=last, closes=closes):
            torch.autograd.backward([output], [gradient])

    def backward_weights(self, left: WeightPass, *, last: bool, closes: bool = False) -> None:
        """Add to the stage's gradients what a split backward has left."""
        with self._sending(last=last, closes=closes):
            left.run()

    @contextmanager
    def _sending(self, *, last: bool, closes: bool) -> Iterator[None]:
        """In a rank's first iteration megatron-core only learns which gradients a bucket waits for: any last pass."""
        sends = last and (closes or all(group.is_first_batch for group in self.buffers.bucket_groups))
        with nullcontext() if sends else self.buffers.no_sync():
            yield
        if closes:
            self.start_sums()

    def start_sums(self) -> None:
        """Begin to sum gradients over replicas, those of which it has not begun."""
        self.gather_weights()
        for group in self.buffers.bucket_groups if self.buffers.ddp_config.overlap_grad_reduce else ():
            if group.grad_reduce_handle is None:
                group.start_grad_sync()

    def start_gather(self) -> None:
        """Begin to have whole weights where an optimizer step left each rank a part."""
        for group in self.buffers.bucket_groups if self.buffers.ddp_config.overlap_param_gather else ():
            if not group.param_gather_dispatched:
                group.start_param_sync()

    def gather_weights(self) -> None:
        """Have whole weights where an optimizer step left each rank a part; collective over replicas."""
        self.start_gather()
        for group in self.buffers.bucket_groups:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def zero_grad(self) -> None:
        """Forget the last iteration's gradients."""
        self.buffers.zero_grad_buffer()
        self.optimizer.zero_grad()
        for sliced in self.sliced.values():
            sliced.forget()

    def sync_gradients(self, tied: dist.ProcessGroup | None, first_copy: Parameter | None = None) -> None:
        """Sum gradients over replicas, those of parameters that saw a part of the tokens over tensor parallel ranks.

        Then those of a tied embedding over its copies: on ranks ``tied``, or ``first_copy`` on this one.
        """
        self.start_sums()
        self.buffers.finish_grad_sync()
        if self.groups.splits_tokens:
            for parameter in self.stage.parameters():
                if parameter.requires_grad and getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.main_grad, group=self.groups.tp)  # type: ignore[attr-defined]
        embedding = self.stage.tied_embedding()
        if embedding is None or not embedding.requires_grad:
            return
        if tied is not None:
            dist.all_reduce(embedding.main_grad, group=tied)  # type: ignore[attr-defined]
        if first_copy is not None:
            first_copy.main_grad += embedding.main_grad  # type: ignore[attr-defined]
            embedding.main_grad.copy_(first_copy.main_grad)  # type: ignore[attr-defined]

    def part_of(self, parameter: Parameter) -> Part | None:
        """Return the part of a parameter that this rank's optimizer updates; None if there is none."""
        if not parameter.requires_grad:
            return Part(parameter.data, 0, parameter, None)
        # megatron-core chains optimizers of different kinds of parameters; these are of one.
        (own,) = self.optimizer.chained_optimizers
        inner = own.optimizer
        if not self.buffers.ddp_config.use_distributed_optimizer:
            main = getattr(parameter, "main_param", parameter)
            return Part(main.data, 0, main, inner.state[main])
        if own.is_stub_optimizer or parameter not in own.model_param_group_index_map:
            return None
        group, order = own.model_param_group_index_map[parameter]
        shard = inner.param_groups[group]["params"][order]
        start = own._get_model_param_range_map(parameter)["param"].start
        return Part(shard.data, start, shard, inner.state[shard])

    def cuts_states(self, parameter: Parameter) -> bool:
        """Whether replicas hold a part of a parameter's optimizer states each."""
        return parameter.requires_grad and bool(self.buffers.ddp_config.use_distributed_optimizer)

    def gradient_square(self) -> torch.Tensor:
        """This rank's share of the sum of squares of the stage's gradients, float64."""
        self.optimizer.prepare_grads()
        grads = self.optimizer.get_grads_for_grad_norm()
        parts = [torch.linalg.vector_norm(grad.double()) ** 2 for grad in grads if grad.numel()]
        # Without sharded optimizer states every replica holds the same gradients.
        copies = 1 if self.buffers.ddp_config.use_distributed_optimizer else self.groups.dp_cp.size()
        return torch.stack(parts).sum() / copies if parts else torch.zeros((), dtype=torch.float64)

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
) -> TrainedStage:
    """Wrap a stage; collective over its replicas. Dimensions that stages do not have are of this rank ``alone``."""
    collection = ProcessGroupCollection()
    for name in ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt"):
        setattr(collection, name, groups.dp_cp)
    for name in ("pp", "mp", "ep", "expt_dp", "intra_expt_dp", "tp_ep_pp"):
        setattr(collection, name, alone)
    collection.tp = groups.tp
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
    # As megatron-core does for the later stages of a pipeline, whose synchronisation is not on the critical path.
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
    optimizer.tp_group = groups.tp
    return TrainedStage(stage, buffers, optimizer, groups, widths or {}, slice_stages(stage, widths or {}))
