"""The boundary between an encoder and an LLM: our messages and megatron-core's bridge communicators."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.mimo.comm.colocated_communicator import ColocatedBridgeCommunicator
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from torch import Tensor

from entrain_bench.balancing.schedules import chain_program, stages_behind, three_phase_program
from entrain_bench.base.arrays import IntArray
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.messages.channels import Channels
from entrain_bench.train.messages.rank_plan import RankPlan, Step, items_of_samples, plan_rank
from entrain_bench.train.messages.transfers import Transfers, cut_rows, gather_rows

BRIDGE_MODULES = (
    "megatron.core.pipeline_parallel.bridge_communicator",
    "megatron.core.models.mimo.comm.colocated_communicator",
)
CPU = torch.device("cpu")

# What a rank hands over or gets, by pass and microbatch ``[rows, hidden size]``: the encoder's output and the LLM's
# input in forward, the gradient of either in backward.
type Tensors = dict[tuple[Pass, int], Tensor]


def even_program(model: ModelSpec, layout: Layout, shapes: SampleShapes, num_microbatches: int) -> Program:
    """A program that bridges can carry: a replica's microbatch goes to, or comes from, that of consecutive replicas.

    Args:
        model: with one encoder.
        layout: of an encoder and an LLM in one stage each; the number of replicas of one divides the other's.
        shapes: samples in the order of microbatches, then of replicas, as many for each.
        num_microbatches: of every replica.
    """
    encoder, llm = layout.modules
    most = max(encoder.dp, llm.dp)
    slot = np.arange(len(shapes)) * num_microbatches * most // len(shapes)
    microbatch, share = np.divmod(slot, most)
    owner = shapes.item_sample
    assignment = Assignment(
        (
            ModuleAssignment((share * encoder.dp // most)[owner], microbatch[owner]),
            ModuleAssignment(share * llm.dp // most, microbatch),
        )
    )
    if np.intersect1d(encoder.ranks, llm.ranks).size:
        return three_phase_program(model, shapes, layout, assignment)
    return chain_program(model, shapes, layout, assignment, stages_behind(layout))


def handed_rows(program: Program, plan: RankPlan) -> dict[tuple[Pass, int], IntArray]:
    """Rows of every item in what the rank hands over, by pass and microbatch ``[items]``."""
    rows = {}
    for step in plan.steps:
        is_encoder = program.model.modules[step.place.module].is_encoder
        if step.kind is (Pass.FORWARD if is_encoder else Pass.BACKWARD):
            members = np.array(program.view(step.action).members)
            items = members if is_encoder else items_of_samples(program, members)
            rows[_key(program, step)] = program.shapes.item_llm_tokens[items]
    return rows


def _key(program: Program, step: Step) -> tuple[Pass, int]:
    return step.kind, program.view(step.action).microbatch


class Messages:
    """The boundary by the messages of the training runtime, on this rank; making one is collective.

    Attributes:
        plan: the rank's actions.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.plan = plan_rank(program, dist.get_rank())
        self.channels = Channels(dist.new_group, CPU)
        self.channels.open(self.plan.channels)

    def exchange(self, handed: Tensors) -> Tensors:
        """What this rank gets when every rank hands over what it has to."""
        settings = FrameworkOptions(p2p="overlapped")
        transfers = Transfers(self.plan, self.channels, torch.float32, CPU, settings)
        got: Tensors = {}
        for step in self.plan.steps:
            transfers.post_receives(int(self.plan.order[step.action]))
            if step.receives:
                received = {message.key: transfers.receive(message) for message in step.receives}
                num_rows = sum(message.num_rows for message in step.receives)
                blank = partial(torch.zeros, num_rows, step.receives[0].width)
                got[_key(self.program, step)] = gather_rows(step, received, blank)
            if step.sends:
                transfers.send(step, partial(cut_rows, handed[_key(self.program, step)]))
        transfers.finish()
        return got


class Bridge:
    """The boundary between disjoint ranks by ``BridgeCommunicator``, in the order of megatron-core's 1F1B."""

    def __init__(self, layout: Layout) -> None:
        encoder, llm = layout.modules
        self.bridge = BridgeCommunicator(grid_of(encoder), grid_of(llm), comm_dtype=torch.float32, tensor_ndim=2)
        self.sends = dist.get_rank() in encoder.ranks

    def exchange(self, handed: Tensors) -> Tensors:
        """What this rank gets when every rank hands over what it has to."""
        kind, other = (Pass.FORWARD, Pass.BACKWARD) if self.sends else (Pass.BACKWARD, Pass.FORWARD)
        microbatches = sorted(microbatch for _, microbatch in handed)
        first, *rest = (handed[kind, microbatch] for microbatch in microbatches)
        if self.sends:
            self.bridge.send_forward(first)
            got = [*map(self.bridge.send_forward_recv_backward, rest), self.bridge.recv_backward()]
        else:
            got = [self.bridge.recv_forward(), *map(self.bridge.send_backward_recv_forward, [first, *rest][:-1])]
            self.bridge.send_backward([first, *rest][-1])
        return {(other, microbatch): tensor for microbatch, tensor in zip(microbatches, got, strict=True)}


class ColocatedBridge:
    """The boundary between two layouts of the same ranks by ``ColocatedBridgeCommunicator``."""

    def __init__(self, layout: Layout) -> None:
        encoder, llm = layout.modules
        self.bridge = ColocatedBridgeCommunicator(grid_of(encoder), grid_of(llm), dim_mapping={"b": 0, "h": 1})

    def exchange(self, handed: Tensors) -> Tensors:
        """What this rank gets when every rank hands over what it has to."""
        got: Tensors = {}
        for microbatch in sorted(microbatch for kind, microbatch in handed if kind is Pass.FORWARD):
            output = handed[Pass.FORWARD, microbatch].detach().requires_grad_()
            arrived = self.bridge.communicate(output)
            arrived.backward(handed[Pass.BACKWARD, microbatch])
            assert output.grad is not None
            got[Pass.FORWARD, microbatch], got[Pass.BACKWARD, microbatch] = arrived.detach(), output.grad
        return got


def grid_of(module: ModuleLayout) -> HyperCommGrid:
    """The ranks of a module as megatron-core's grid, which holds consecutive ranks only.

    Raises:
        ValueError: for ranks that are no grid.
    """
    first = int(module.ranks.min())
    if not np.array_equal(module.ranks.ravel(), first + np.arange(module.ranks.size)):
        raise ValueError(f"{module.module}: no grid of consecutive ranks")
    return HyperCommGrid([module.tp, module.cp, module.pp, module.dp], ["tp", "cp", "pp", "dp"], rank_offset=first)
