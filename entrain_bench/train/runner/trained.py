"""Learning stages of a Hugging Face model: gradients summed over ranks that hold a parameter, then torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from entrain_bench.base.errors import IncompatibleError, UserError, require
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.messages.rank_plan import Message, RankPlan
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.stage import passes_gradients
from entrain_bench.train.runner.parallel import shard_weights, split_weights
from entrain_bench.train.runner.samples import HubData, ItemBatch, TokenBatch
from entrain_bench.train.runner.stages import Share, Stage, Stages
from entrain_bench.train.running.groups import GroupMaker, Groups, make_groups
from entrain_bench.train.running.learning import LearningStage, OptimizerSettings, adam_of, clip_gradients, local_part
from entrain_bench.train.running.runtime import Runtime
from entrain_bench.train.running.states import read_into

VALUE = ".value"  # end of a parameter's name in a checkpoint
BUCKET_NUMBERS = 2**25  # numbers that are summed at once


@dataclass(frozen=True, slots=True)
class HubStage(LearningStage):
    """A stage with the parameters that it sums and steps: those that no earlier stage of this rank has.

    ``widths`` as in ``Groups``. Of ``partial`` parameters each TP rank has a part of the gradient; ``pair`` joins the
    copies of a ``tied`` embedding. FSDP2 sums those of ``sharded`` modules, whose gathered weights stay if it ``keeps``
    them. Without an ``optimizer`` the user's own steps.
    """

    stage: Stage
    groups: StageGroups
    widths: Mapping[int, StageGroups]
    named: Mapping[str, Parameter]
    partial: frozenset[str] = frozenset()
    sharded: Sequence[FSDPModule] = ()
    keeps: bool = False
    tied: str | None = None
    pair: dist.ProcessGroup | None = None
    optimizer: Optimizer | None = None
    masters: Mapping[str, Tensor] = field(default_factory=dict)  # weights in float32 where a model has others

    def _share(self, degree: int) -> Share | None:
        cp = self.at(degree).cp
        return Share(cp, cp.rank(), cp.size()) if cp.size() > 1 else None

    def forward(self, leaf: Tensor | None, pack: TokenBatch | ItemBatch, degree: int = 0) -> Tensor:
        """The stage's output for a chunk."""
        output: Tensor = self.stage(leaf, pack, self._share(degree))
        return output

    @property
    def meets(self) -> bool:
        """Whether replicas go through passes together."""
        return bool(self.sharded)

    def backward(
        self,
        output: GradientEdge,
        gradient: Tensor,
        leaf: Tensor | None,
        degree: int = 0,
        *,
        last: bool = False,  # noqa: ARG002
        closes: bool = False,  # noqa: ARG002
    ) -> Tensor | None:
        """Add to the gradients; returns that of ``leaf``. Ranks of a share each begin with other rows."""
        share = self._share(degree)
        if share and gradient.dim():
            gradient = share.only_own(gradient)
        torch.autograd.backward([output], [gradient])
        if leaf is None:
            return None
        given = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if share:
            dist.all_reduce(given, group=share.group)
        return given

    def empty_pass(self, remade: int, example: Callable[[], TokenBatch | ItemBatch]) -> Iterator[None]:  # noqa: ARG002
        """A pass of another replica's first unit, whose gradients are zero."""
        pack = example()
        leaf = None
        if isinstance(pack, TokenBatch) and (rows := sum(item.llm_tokens for item in pack.items)):
            leaf = self.stage.blank(rows).requires_grad_(self.stage.passes_gradients)
        output = self.stage(leaf, pack, None)
        yield
        if output.requires_grad:
            torch.autograd.backward([get_gradient_edge(output)], [torch.zeros_like(output)])
        yield

    def zero_grad(self) -> None:
        """Forget the last iteration's gradients; gather weights that stay, for ranks may have no first forward."""
        for parameter in self.named.values():
            parameter.grad = None
        for part in self.sharded if self.keeps else ():
            part.unshard()

    def sync_gradients(self) -> None:
        """Sum gradients over TP ranks with a part each, over replicas, and over the copies of a tied embedding."""
        for part in self.sharded if self.keeps else ():
            part.reshard()
        for parameter in self.named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: local_part(parameter.grad) for name, parameter in self.named.items()}  # type: ignore[arg-type]
        _sum([gradients[name] for name in gradients if name in self.partial], self.groups.tp)
        summed = self._summed_by_fsdp()
        _sum([gradients[name] for name, p in self.named.items() if p not in summed], self.groups.dp_cp)
        if self.pair is not None and self.tied in gradients:
            _sum([gradients[self.tied]], self.pair)

    def gradient_square(self) -> Tensor:
        """This rank's share of the sum of squares of the stage's gradients, float64."""
        summed = self._summed_by_fsdp()
        square = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        for name, parameter in self.named.items():
            assert parameter.grad is not None
            copies = 1 if parameter in summed else self._copies(name, parameter)
            square += local_part(parameter.grad).double().square().sum() / copies
        return square

    def _copies(self, name: str, parameter: Parameter) -> int:
        """Ranks with the same gradient."""
        paired = 2 if self.pair is not None and name == self.tied else 1
        return self.groups.dp_cp.size() * paired * (1 if isinstance(parameter, DTensor) else self.groups.tp.size())

    def _summed_by_fsdp(self) -> set[Parameter]:
        return {parameter for part in self.sharded for parameter in part.parameters()}  # type: ignore[attr-defined]

    def step(self, clip_grad: float, total_norm: float) -> None:
        """Clip by the norm over all modules, and step; leave both to the user if the optimizer is the user's."""
        if self.optimizer is None:
            return
        clip_gradients(self.named.values(), clip_grad, total_norm)
        for name, master in self.masters.items():
            master.grad = self.named[name].grad.to(master.dtype)  # type: ignore[union-attr]
        self.optimizer.step()
        self._use_masters()

    def state(self) -> dict[str, Tensor]:
        """The tensors that this rank writes: parameters and the optimizer's states by the model's names."""
        state: dict[str, Tensor] = {}
        summed = self._summed_by_fsdp()
        is_copy = self.pair is not None and not self.stage.is_first
        for name, parameter in self.named.items():
            first = self.groups.dp_cp.rank() == 0 and (isinstance(parameter, DTensor) or self.groups.tp.rank() == 0)
            if parameter in summed or (first and not (is_copy and name == self.tied)):
                state |= self._tensors(name)
        return state

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that do not learn and that this rank writes."""
        if self.groups.dp_cp.rank() or self.groups.tp.rank():
            return {}
        return {name: p.detach() for name, p in self.stage.named_parameters() if not p.requires_grad}

    def load(self, path: Path) -> None:
        """Read the stage from a checkpoint."""
        state: dict[str, Tensor] = {}
        for name in self.named:
            state |= self._tensors(name)
        read_into(state, path)
        self._use_masters()

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """A parameter and its states, to be read or written in place."""
        assert self.optimizer is not None
        if not self.optimizer.state:
            make_states(self.optimizer)
        value = self.masters.get(name, self.named[name])
        states = {key: one for key, one in self.optimizer.state[value].items() if isinstance(one, Tensor)}
        kept = {key: one if one.dim() else one.view(1) for key, one in states.items()}
        return {f"{name}{VALUE}": value.detach()} | {f"{name}.{key}": one for key, one in kept.items()}

    @torch.no_grad()
    def _use_masters(self) -> None:
        for name, master in self.masters.items():
            self.named[name].copy_(master)


def make_states(optimizer: Optimizer) -> None:
    """Have an optimizer make its states by a step of zero, which changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros(()) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def _sum(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group in place, many in a message."""
    if group.size() == 1:
        return
    bucket: list[Tensor] = []
    for index, gradient in enumerate(gradients):
        bucket.append(gradient)
        if index + 1 == len(gradients) or sum(each.numel() for each in bucket) >= BUCKET_NUMBERS:
            flat = torch.cat([each.reshape(-1) for each in bucket])
            dist.all_reduce(flat, group=group)
            for each, summed in zip(
                bucket, torch.split_with_sizes(flat, [each.numel() for each in bucket]), strict=True
            ):
                each.copy_(summed.view_as(each))
            bucket = []


def check_model(stages: Stages, spec: ModelSpec, layout: Layout) -> None:
    """Raise ``UserError`` if ``spec`` describes another model, ``IncompatibleError`` for an unsupported layout."""
    for module in spec.modules:
        found = len(stages.blocks[module.is_encoder]) + 2
        if found != len(module.layers):
            raise UserError(
                f"model: {module.name} has {len(module.layers)} layers in the configuration, but {found} in "
                f"{type(stages.model).__name__}. Use model=hf:FOLDER with the model's own config.json"
            )
    text, hidden = stages.family.config.get_text_config(), spec.llm.config.hidden_size
    require(text.hidden_size == hidden, "harness.weights: hidden_size", text.hidden_size, f"{hidden}, as the model's")
    if len(spec.encoders) != 1:
        raise IncompatibleError("model: a Hugging Face model trains with one encoder. Use harness=simulate")
    for placed in layout.modules:
        unsupported = {
            "offload": placed.offload,
            "sharding=hybrid": placed.nodes > 1,
            "ep": placed.ep > 1,
            "tp with sharded weights": placed.tp > 1 and placed.scatters,
        }
        for what in (what for what, is_so in unsupported.items() if is_so):
            raise IncompatibleError(
                f"layout: training a Hugging Face model does not support {what} ({placed.module}). Use harness=simulate"
            )


def hub_stages(
    stages: Stages,
    spec: ModelSpec,
    layout: Layout,
    groups: Groups,
    device: torch.device,
) -> dict[tuple[int, int], HubStage]:
    """This rank's stages, without optimizers; it keeps no other weights. Collective."""
    held: dict[tuple[int, int], Stage] = {}
    for index, number in sorted(groups.stages):
        placed = layout.modules[index]
        module = spec.modules[index]
        first = sum(placed.layers_per_stage[:number])
        layers = range(first, first + placed.layers_per_stage[number])
        stage = stages.stage(layers, is_encoder=module.is_encoder)
        stage.recomputes = placed.recompute
        stage.passes_gradients = passes_gradients(module, layers)
        held[index, number] = stage
        for layer in layers:
            if not module.layers[layer].learns:
                for name in stages.names(range(layer, layer + 1), is_encoder=module.is_encoder):
                    stages.model.get_parameter(name).requires_grad_(False)
    stages.keep([*held.values()])
    stages.model.to(device)
    if any(tp * cp > placed.tp for placed in layout.modules for tp, cp in placed.degrees):
        stages.share_sequences()
    made: dict[tuple[int, int], HubStage] = {}
    known: set[str] = set()
    for (index, number), stage in held.items():
        placed = layout.modules[index]
        own = groups.stages[index, number]
        partial: list[str] = []
        sharded: list[FSDPModule] = []
        if placed.tp > 1 and not stage.is_encoder:
            partial = split_weights(stages.family, stage, own.tp, device.type)
        if placed.scatters and own.dp_cp.size() > 1:
            regathers = not placed.keeps_weights
            sharded = shard_weights(stages.family, stage, own.dp_cp, device.type, regathers=regathers)
        named = {name: p for name, p in stage.named_parameters() if p.requires_grad and name not in known}
        known |= named.keys()
        pair = groups.tied.get(index) if stages.tied in named else None
        one = HubStage(stage, own, groups.widths.get((index, number), {}), named, frozenset(partial), sharded)
        made[index, number] = replace(one, keeps=placed.keeps_weights, tied=stages.tied, pair=pair)
    return made


def with_optimizer(trained: HubStage, settings: OptimizerSettings) -> HubStage:
    """The stage with AdamW, on weights in float32."""
    half = {name: parameter for name, parameter in trained.named.items() if parameter.dtype is not torch.float32}
    masters = {name: parameter.detach().float().requires_grad_() for name, parameter in half.items()}
    parameters = [masters.get(name, parameter) for name, parameter in trained.named.items()]
    return replace(trained, masters=masters, optimizer=adam_of(parameters, settings))


def with_whole_rows(program: Program, plan: RankPlan, stages: Stages) -> RankPlan:
    """The plan with messages of all rows of a chunk, as wide as stages hand them on."""

    def sized(message: Message) -> Message:
        ends = (message.source, message.target)
        module, other = (int(program.module[end]) for end in ends)
        if module != other:
            return replace(message, width=message.width * (1 + stages.family.depth))
        spec = program.model.modules[module]
        placed = program.layout.modules[module]
        later = max(int(program.stage[end]) for end in ends)
        block = max(sum(placed.layers_per_stage[:later]) - 1, 0)
        columns = 1 + len(stages.carried(block, is_encoder=spec.is_encoder))
        members = program.chunks[module].units(int(program.chunk[message.target]))
        rows = int(spec.lengths(program.shapes, members).sum())
        return replace(message, num_rows=rows, width=columns * spec.config.hidden_size)

    steps = tuple(
        replace(step, receives=tuple(map(sized, step.receives)), sends=tuple(map(sized, step.sends)))
        for step in plan.steps
    )
    return replace(plan, steps=steps, arrivals=tuple(map(sized, plan.arrivals)))


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
