"""Weights sharded over the ranks of data and context parallelism, gathered and reduced layer by layer inside passes."""

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
    """How much longer than its layers every pass with sharded weights takes: it stands until links are through.

    Ranks of a pass on several lanes wait for the one that comes from, or goes on to, the longest collectives.
    """
    longest: dict[Action, float] = defaultdict(float)
    traffic = {module: _traffic(job, module) for module, placed in enumerate(job.placed) if placed.sharded}
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
    """Passes that begin together, for their collectives need several replicas: one of a microbatch on each of them."""
    groups: dict[tuple[object, ...], list[Action]] = defaultdict(list)
    for action in job.lanes:
        if job.placed[action.module].sharded:
            chunk = job.chunks[action.module][action.chunk]
            groups[action.module, action.kind, chunk.microbatch, chunk.part].append(action)
        elif job.placed[action.module].ep > job.placed[action.module].cp and action.kind is not Pass.WEIGHT:
            groups[action.kind, action.stage, *job.partners(action.module, action.chunk)].append(action)
    return [*groups.values()]


def _runs(job: Job, order: list[Action]) -> Iterator[list[Action]]:
    """A lane's passes with sharded weights, cut where another pass is between, and where a forward follows a backward.

    With a micro-step a backward of the root ends, which waits for its reduce-scatters.
    """
    run: list[Action] = []
    for action in order:
        sharded = job.placed[action.module].sharded
        assert not sharded or action.kind is not Pass.WEIGHT
        if run and (not sharded or (run[-1].kind, action.kind) == (Pass.BACKWARD, Pass.FORWARD)):
            yield run
            run = []
        run += [action] if sharded else []
    yield run


def _traffic(job: Job, module: int) -> list[tuple[float, float]]:
    """Gather and scatter of each layer."""
    ranks = job.sharing(module, 0)
    return [
        (
            job.machine.ring_s(BF16 * held, ranks) if held else 0.0,
            job.machine.ring_s(job.gradient_bytes * learns, ranks) if learns else 0.0,
        )
        for held, learns in zip(job.parameters(module, 0), job.learning(module, 0), strict=True)
    ]


def _visits(job: Job, action: Action, traffic: list[tuple[float, float]]) -> list[Visit]:
    """Layers of a pass in its order; a backward does not come to those before all that learns."""
    layers, seconds = job.layers[action.module], job.seconds(action)
    if action.kind is Pass.FORWARD:
        return [Visit(action, took, gather, 0.0) for took, (gather, _) in zip(seconds, traffic, strict=True)]
    visits = [Visit(action, took, *own) for took, own in zip(seconds, traffic, strict=True)]
    if job.is_tied(action.module):
        # It is whole since the forward: the head is the same tensor.
        visits[0] = replace(visits[0], gather=0.0)
    return [visit for visit, layer in zip(visits, layers, strict=True) if layer.gradients][::-1]
