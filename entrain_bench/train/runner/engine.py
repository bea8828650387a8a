"""A rank's stages of a user's model, and their passes in the order of a program; gradients are summed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.measuring import Clock
from entrain_bench.train.messages.rank_plan import (
    Message,
    RankPlan,
    Step,
    block_of,
    copy_ranks,
    places_of,
    plan_rank,
)
from entrain_bench.train.messages.transfers import Channels, Transfers, cut_rows, gather_rows
from entrain_bench.train.runner.families import Family, family_of
from entrain_bench.train.runner.gradients import Gradients, local_part
from entrain_bench.train.runner.parallel import shard_weights, split_weights
from entrain_bench.train.runner.samples import Item, Sample, TokenBatch
from entrain_bench.train.runner.stages import Share, Stage, Stages


@dataclass(slots=True)
class _Graph:
    """Autograd state that a forward keeps for its backward; ``output`` is None if nothing learns."""

    leaf: Tensor | None
    output: GradientEdge | None
    shape: torch.Size
    dtype: torch.dtype


class Engine:
    """This rank's part of a model, and its passes in the order of programs of one layout; collective over all ranks."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        layout: Layout,
        framework: FrameworkOptions,
        family: Family | None,
        device: torch.device,
    ) -> None:
        """Leave this rank the weights of its stages only; ``model`` has its initial weights on every rank.

        ``UserError`` if ``spec`` describes another model, ``IncompatibleError`` for an unsupported layout.
        """
        self.spec = spec
        self.layout = layout
        self.framework = framework
        self.device = device
        self.rank = dist.get_rank()
        self.dtype = model.dtype
        self._stages = Stages(family or family_of(model))
        self._check(model)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        everyone = list(range(dist.get_world_size()))
        self._channels = Channels(lambda: dist.new_group(everyone), self.device)
        self.stages: dict[tuple[int, int], Stage] = {}
        self._gradients = Gradients(self._groups, device)
        self._keeps_weights = any(
            placed.scatters and (placed.keeps_weights or not placed.sharded) for placed in self.layout.modules
        )
        self._widths: dict[tuple[int, int], int] = {}
        self._open_groups()
        self._build(model)

    def _check(self, model: PreTrainedModel) -> None:
        for module in self.spec.modules:
            found = len(self._stages.blocks[module.is_encoder]) + 2
            if found != len(module.layers):
                raise UserError(
                    f"model: {module.name} has {len(module.layers)} layers in the configuration, but {found} in "
                    f"{type(model).__name__}. Use model=hf:FOLDER with the model's own config.json"
                )
        if len(self.spec.encoders) != 1:
            raise IncompatibleError("model: ProgramRunner needs one encoder. Use harness=simulate")
        for placed in self.layout.modules:
            unsupported = {
                "offload": placed.offload,
                "sharding=hybrid": placed.nodes > 1,
                "ep": placed.ep > 1,
                "tp with sharded weights": placed.tp > 1 and placed.scatters,
            }
            for what in (what for what, is_so in unsupported.items() if is_so):
                raise IncompatibleError(f"layout: ProgramRunner does not support {what} ({placed.module})")

    def _open_groups(self) -> None:
        """Open a group for each set of ranks that sums gradients or shares work, in one order on all ranks."""
        wanted: dict[tuple[int, ...], None] = {}
        for placed in self.layout.modules:
            for stage in range(placed.pp):
                for copies in copy_ranks(placed):
                    for block in copies[:, stage].tolist():
                        wanted |= {tuple(block[index :: placed.tp]): None for index in range(placed.tp)}
                        wanted |= {tuple(block[i : i + placed.tp]): None for i in range(0, len(block), placed.tp)}
                wanted |= dict.fromkeys(_holders(placed, stage))
        llm = self.layout.modules[self.spec.llm_index]
        wanted |= dict.fromkeys(_holders(llm, 0, llm.pp - 1))
        for ranks in wanted:
            if len(ranks) > 1:
                self._groups[ranks] = dist.new_group(list(ranks))

    def _build(self, model: PreTrainedModel) -> None:
        placed_modules = self.layout.modules
        for index, (placed, module) in enumerate(zip(placed_modules, self.spec.modules, strict=True)):
            for number in range(placed.pp):
                block = max(sum(placed.layers_per_stage[:number]) - 1, 0)
                columns = 1 + len(self._stages.carried(block, is_encoder=module.is_encoder))
                self._widths[index, number] = columns * module.config.hidden_size
        mine = sorted({(place.module, place.stage) for place in places_of(self.layout, self.rank)})
        for index, number in mine:
            placed, module = placed_modules[index], self.spec.modules[index]
            first = sum(placed.layers_per_stage[:number])
            layers = range(first, first + placed.layers_per_stage[number])
            stage = self._stages.stage(layers, is_encoder=module.is_encoder)
            stage.recomputes = placed.recompute
            self.stages[index, number] = stage
            for layer in layers:
                if module.layers[layer].learns:
                    continue
                for name in self._stages.names(range(layer, layer + 1), is_encoder=module.is_encoder):
                    model.get_parameter(name).requires_grad_(False)
        self._stages.keep([*self.stages.values()])
        self._stages.model.to(self.device)
        if any(tp * cp > placed.tp for placed in placed_modules for tp, cp in placed.degrees):
            self._stages.share_sequences()
        for (index, number), stage in self.stages.items():
            self._distribute(placed_modules[index], number, stage)

    def _distribute(self, placed: ModuleLayout, number: int, stage: Stage) -> None:
        """Note which ranks sum each gradient; split or shard weights."""
        holders = next(ranks for ranks in _holders(placed, number) if self.rank in ranks)
        gradients = self._gradients
        gradients.sums |= dict.fromkeys(stage.names, holders)
        if placed.tp > 1 and stage.is_encoder:
            gradients.copied |= dict.fromkeys(stage.names, placed.tp)
        elif placed.tp > 1:
            block = next(
                block for block in placed.ranks[:, number].reshape(-1, placed.tp).tolist() if self.rank in block
            )
            ranks = tuple(block)
            names = split_weights(self.family, stage, self._groups[ranks], self.device.type)
            gradients.partial |= dict.fromkeys(names, ranks)
            gradients.copied |= {
                name: placed.tp for name, parameter in stage.named_parameters() if not isinstance(parameter, DTensor)
            }
        if placed.scatters:
            group = self._groups.get(holders)
            if group is not None:
                regathers = not self._keeps_weights
                gradients.sharded += shard_weights(self.family, stage, group, self.device.type, regathers=regathers)
        tied = self._stages.tied
        if tied in stage.names:
            gradients.sums[tied] = next(ranks for ranks in _holders(placed, 0, placed.pp - 1) if self.rank in ranks)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """This rank's learning parameters, by the model's names."""
        names = dict.fromkeys(name for stage in self.stages.values() for name in stage.names)
        named = ((name, self._stages.model.get_parameter(name)) for name in names)
        return ((name, parameter) for name, parameter in named if parameter.requires_grad)

    def parameters(self) -> list[dict[str, list[Parameter]]]:
        """Groups of learning parameters for a torch optimizer: whole ones, and parts of some that others share."""
        groups: dict[bool, list[Parameter]] = {}
        for _, parameter in self.named_parameters():
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        return [{"params": groups[kind]} for kind in sorted(groups)]

    def clip_grad_norm_(self, limit: float) -> float:
        """Scale gradients to a norm of at most ``limit`` over the whole model; returns the norm before."""
        norm = self._gradients.norm(dict(self.named_parameters()))
        if norm > limit:
            for _, parameter in self.named_parameters():
                local_part(parameter.grad).mul_(limit / norm)
        return norm

    def share_of(self, step: Step) -> Share | None:
        """The ranks that compute a chunk together with this one, each a part of the tokens; None for no others."""
        placed = self.layout.modules[step.place.module]
        if step.place.replica < 0:
            return None
        block = block_of(self.layout, step.place.module, step.place.replica, step.place.stage)
        ranks = tuple(block[step.place.position % placed.tp :: placed.tp])
        return Share(self._groups[ranks], ranks.index(self.rank), len(ranks)) if len(ranks) > 1 else None

    @property
    def family(self) -> Family:
        """The names of the model's parts."""
        return self._stages.family

    def run(
        self, program: Program, content: Callable[[int], Sample], num_labelled: int, clock: Clock | None = None
    ) -> list[tuple[int, Tensor]]:
        """Run this rank's passes; returns action and loss of its last passes of the LLM.

        ``content`` reads a sample by its identity. Losses are divided by the batch's labeled tokens, and gradients are
        those of their sum over all ranks.
        """
        for part in self._gradients.sharded if self._keeps_weights else ():
            # Now, on all ranks: some may have no pass at first.
            part.unshard()
        losses = _Passes(self, program, content, num_labelled, clock).run()
        for part in self._gradients.sharded:
            part.reshard()
        self._gradients.add_up(dict(self.named_parameters()))
        return losses


class _Passes:
    """One iteration of a rank."""

    def __init__(
        self,
        runner: Engine,
        program: Program,
        content: Callable[[int], Sample],
        num_labelled: int,
        clock: Clock | None,
    ) -> None:
        self.runner, self.program, self.content = runner, program, content
        self.num_labelled, self.clock = num_labelled, clock
        framework = runner.framework
        plan = plan_rank(program, runner.rank, framework)
        runner._channels.open(plan.channels)
        self.plan = self._sized(plan)
        self.transfers = Transfers(self.plan, runner._channels, runner.dtype, runner.device, framework)
        self.graphs: dict[tuple[int, int, int], _Graph] = {}
        self.empty: dict[tuple[int, int, int], _Graph] = {}
        self.losses: list[tuple[int, Tensor]] = []

    def _sized(self, plan: RankPlan) -> RankPlan:
        """The plan with messages of whole rows, as wide as stages hand them on."""

        def sized(message: Message) -> Message:
            program = self.program
            ends = (message.source, message.target)
            module, other = (int(program.module[end]) for end in ends)
            if module != other:
                return replace(message, width=message.width * (1 + self.runner.family.depth))
            stage = max(int(program.stage[end]) for end in ends)
            members = program.chunks[module].units(int(program.chunk[message.target]))
            rows = int(program.model.modules[module].lengths(program.shapes, members).sum())
            return replace(message, num_rows=rows, width=self.runner._widths[module, stage])

        steps = tuple(
            replace(step, receives=tuple(map(sized, step.receives)), sends=tuple(map(sized, step.sends)))
            for step in plan.steps
        )
        return replace(plan, steps=steps, arrivals=tuple(map(sized, plan.arrivals)))

    def run(self) -> list[tuple[int, Tensor]]:
        """Run all passes; returns this rank's losses."""
        for step in self.plan.steps:
            self.transfers.post_receives(int(self.plan.order[step.action]))
            if step.is_empty:
                self._take_part(step)
            elif step.kind is Pass.FORWARD:
                self._forward(step)
            elif step.kind is Pass.BACKWARD:
                self._backward(step)
            # Gradients of weights are those of the first pass, too, and summed when all passes have ended.
        self.transfers.finish()
        return self.losses

    def _forward(self, step: Step) -> None:
        received = {message.key: self.transfers.receive(message) for message in step.receives}
        members = self.program.chunks[step.place.module].units(step.chunk).tolist()
        leaf = None
        if step.place.stage:
            leaf = received[step.receives[0].key].requires_grad_()
        elif not self._is_encoder(step):
            shapes = self.program.shapes
            rows = int((shapes.llm_tokens - shapes.text_tokens)[members].sum())
            leaf = gather_rows(step, received, lambda: self._blank(rows)).requires_grad_() if rows else None
        output = self._output(step, leaf, members, self.runner.share_of(step))
        self.graphs[_key(step)] = self._graph(leaf, output)
        if self._is_loss(step):
            # Ranks of a tensor parallel group have the same loss.
            if step.place.position % self.runner.layout.modules[step.place.module].tp == 0:
                self.losses.append((step.action, output.detach()))
        else:
            rows_out = output.detach()
            self.transfers.send(step, lambda message: cut_rows(rows_out, message))

    def _backward(self, step: Step) -> None:
        received = {message.key: self.transfers.receive(message) for message in step.receives}
        graph = self.graphs.pop(_key(step))
        if graph.output is None:
            return
        share = self.runner.share_of(step)
        if self._is_loss(step):
            gradient = torch.ones(graph.shape, dtype=graph.dtype, device=self.runner.device)
        else:
            blank = torch.zeros(graph.shape, dtype=graph.dtype, device=self.runner.device)
            gradient = gather_rows(step, received, lambda: blank)
            gradient = share.only_own(gradient) if share else gradient
        with self._timed(step):
            torch.autograd.backward([graph.output], [gradient])
        if graph.leaf is not None:
            given = torch.zeros_like(graph.leaf) if graph.leaf.grad is None else graph.leaf.grad
            if share:
                dist.all_reduce(given, group=share.group)
            self.transfers.send(step, lambda message: cut_rows(given, message))

    def _take_part(self, step: Step) -> None:
        """A pass of other replicas, whose collectives need this rank: of one unit, whose gradients are zero."""
        chunks = self.program.chunks[step.place.module]
        key = step.place.module, int(chunks.microbatch[step.chunk]), int(chunks.part[step.chunk])
        if step.kind not in (Pass.FORWARD, Pass.BACKWARD):
            return
        if key not in self.empty:
            members = chunks.units(step.chunk)[:1].tolist()
            leaf = None
            shapes = self.program.shapes
            if not self._is_encoder(step) and (rows := int((shapes.llm_tokens - shapes.text_tokens)[members].sum())):
                leaf = self._blank(rows).requires_grad_()
            self.empty[key] = self._graph(leaf, self._output(step, leaf, members, None))
        if step.kind is Pass.BACKWARD:
            graph = self.empty.pop(key)
            if graph.output is not None:
                zeros = torch.zeros(graph.shape, dtype=graph.dtype, device=self.runner.device)
                torch.autograd.backward([graph.output], [zeros])

    def _timed(self, step: Step) -> AbstractContextManager[None]:
        return self.clock.action(step.action) if self.clock and not step.is_empty else nullcontext()

    def _output(self, step: Step, leaf: Tensor | None, members: Sequence[int], share: Share | None) -> Tensor:
        stage = self.runner.stages[step.place.module, step.place.stage]
        batch = self._batch(stage, members, share)
        with self._timed(step):
            output: Tensor = stage(leaf, batch, share)
            return output / self.num_labelled if self._is_loss(step) else output

    def _batch(self, stage: Stage, members: Sequence[int], share: Share | None) -> TokenBatch | list[Item]:
        shapes, content = self.program.shapes, self.content
        if not stage.is_encoder:
            samples = [content(int(shapes.sample_ids[sample])) for sample in members]
            return TokenBatch.of(samples, share.count if share else 1, self.runner.device)
        items = []
        for item in members:
            sample = int(shapes.item_sample[item])
            items.append(content(int(shapes.sample_ids[sample])).items[item - int(shapes.item_offsets[sample])])
        return items

    def _graph(self, leaf: Tensor | None, output: Tensor) -> _Graph:
        edge = get_gradient_edge(output) if output.requires_grad else None
        return _Graph(leaf, edge, output.shape, output.dtype)

    def _blank(self, rows: int) -> Tensor:
        width = self.program.model.llm.config.hidden_size * (1 + self.runner.family.depth)
        return torch.zeros(rows, width, dtype=self.runner.dtype, device=self.runner.device)

    def _is_encoder(self, step: Step) -> bool:
        return self.program.model.modules[step.place.module].is_encoder

    def _is_loss(self, step: Step) -> bool:
        return not self._is_encoder(step) and step.place.stage == self.runner.layout.modules[step.place.module].pp - 1


def _holders(placed: ModuleLayout, *stages: int) -> list[tuple[int, ...]]:
    """Ranks that hold the same part of the weights of stages, in sets."""
    parts = [placed.ranks[:, stage].reshape(-1, placed.tp) for stage in stages]
    return [tuple(sorted({int(rank) for part in parts for rank in part[:, index]})) for index in range(placed.tp)]


def _key(step: Step) -> tuple[int, int, int]:
    return step.place.module, step.place.stage, step.chunk
