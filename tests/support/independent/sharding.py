"""Weights and gradients sharded over the ranks of data and context parallelism, layer by layer inside passes.

What is shared out decides which collectives passes have (docs/strategies/fsdp.md, "Sharding"): with ZeRO-2 reductions
of gradients alone, with ZeRO-3 gathers of weights as well; where gathered weights stay, those of the first forwards.
Hybrid sharding gathers and scatters inside a node, then all-reduces shards of gradients over nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from entrain_bench.program import Pass
from support.independent.job import Action, Job
from support.independent.layers import BF16


@dataclass(frozen=True)
class Visit:
    """A pass comes to a layer.

    Attributes:
        compute: seconds there.
        gather: of its weights, before.
        scatter: of its gradients, after.
    """

    action: Action
    compute: float
    gather: float
    scatter: float


def exposed_s(job: Job) -> dict[Action, float]:
    """How much longer than its layers every pass of a sharded module takes: it stands until links are through.

    Ranks of a pass on several lanes wait for the one that comes from, or goes on to, the longest collectives.
    """
    longest: dict[Action, float] = defaultdict(float)
    traffic = {module: _traffic(job, module) for module in range(len(job.placed)) if job.shares_gradients(module)}
    hides = job.framework["overlap_param_gather"], job.framework["overlap_grad_reduce"]
    for order in job.orders:
        added: dict[Action, float] = defaultdict(float)
        for run in _runs(job, order):
            visits = [visit for action in run for visit in _visits(job, action, traffic[action.module])]
            if not visits:
                continue
            # At its ends nothing computes yet, or any more.
            added[visits[0].action] += visits[0].gather
            added[visits[-1].action] += visits[-1].scatter
            for before, visit, after in zip([None, *visits], visits, [*visits[1:], None], strict=False):
                asked = after.gather if after else 0.0, before.scatter if before else 0.0
                beside = sum(seconds for seconds, hidden in zip(asked, hides, strict=True) if hidden)
                # While links are busy, computation goes on at a lower rate; what is left of it runs alone.
                done = min(visit.compute, (1 - job.machine.slowing) * beside)
                added[visit.action] += sum(asked) - done
        for action, seconds in added.items():
            longest[action] = max(longest[action], seconds)
    return longest


def meetings(job: Job) -> list[list[Action]]:
    """Passes that begin together, for their collectives need several replicas: one of a microbatch on each of them.

    Those are the backwards, which scatter gradients, the forwards that gather weights, and passes whose experts meet.
    """
    groups: dict[tuple[object, ...], list[Action]] = defaultdict(list)
    for action in job.lanes:
        if job.gathers(action) if action.kind is Pass.FORWARD else job.shares_gradients(action.module):
            chunk = job.chunks[action.module][action.chunk]
            groups[action.module, action.kind, chunk.microbatch, chunk.part].append(action)
        elif job.placed[action.module].ep > job.placed[action.module].cp and action.kind is not Pass.WEIGHT:
            groups[action.kind, action.stage, *job.partners(action.module, action.chunk)].append(action)
    return [*groups.values()]


def _runs(job: Job, order: list[Action]) -> Iterator[list[Action]]:
    """A lane's passes of sharded modules, cut where another pass is between, and where a forward follows a backward.

    With a micro-step a backward of the root ends, which waits for its reduce-scatters.
    """
    run: list[Action] = []
    for action in order:
        sharded = job.shares_gradients(action.module)
        assert not sharded or action.kind is not Pass.WEIGHT
        if run and (not sharded or (run[-1].kind, action.kind) == (Pass.BACKWARD, Pass.FORWARD)):
            yield run
            run = []
        run += [action] if sharded else []
    yield run


def _traffic(job: Job, module: int) -> list[tuple[float, float]]:
    """Gather of weights and reduction of gradients of each layer."""
    ranks, nodes = job.sharing(module, 0), job.nodes(module)
    inside = ranks[: len(ranks) // nodes]
    across = ranks[:: len(inside)]

    def reduced_s(size: float) -> float:
        over_nodes = job.machine.reduce_s(size / len(inside), across, ring=True) if nodes > 1 else 0.0
        return job.machine.ring_s(size, inside) + over_nodes

    def divided_s(size: float) -> float:
        return job.machine.ring_s(size, inside[:: job.placed[module].ep]) if size else 0.0

    layers = zip(job.parameters(module, 0), job.learning(module, 0), job.divided(module, 0), strict=True)
    return [
        (
            (job.machine.ring_s(BF16 * (held - part), inside) if held else 0.0) + divided_s(BF16 * part),
            (reduced_s(job.gradient_bytes * (own - part)) + divided_s(job.gradient_bytes * part)) if own else 0.0,
        )
        for held, own, part in layers
    ]


def _visits(job: Job, action: Action, traffic: list[tuple[float, float]]) -> list[Visit]:
    """Layers of a pass in its order; a backward does not come to those before all that learns."""
    layers, seconds = job.layers[action.module], job.seconds(action)
    if action.kind is Pass.FORWARD:
        gathers = job.gathers(action)
        return [Visit(action, took, gathers * gather, 0.0) for took, (gather, _) in zip(seconds, traffic, strict=True)]
    again = job.placed[action.module].sharding in ("zero3", "hybrid")
    visits = [
        Visit(action, took, again * gather, scatter) for took, (gather, scatter) in zip(seconds, traffic, strict=True)
    ]
    if job.is_tied(action.module):
        # It is whole since the forward: the head is the same tensor.
        visits[0] = replace(visits[0], gather=0.0)
    return [visit for visit, layer in zip(visits, layers, strict=True) if layer.gradients][::-1]
