"""A stage's gradients are sent off once, by its last weight pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from entrain_bench.train.measuring import Clock
from entrain_bench.train.messages.rank_plan import Step
from entrain_bench.train.running import stages as step_module
from entrain_bench.train.running.runtime import _Iteration
from support.train.ranks import run_ranks
from support.train.runs import CPU, DISJOINT, build_here, configuration, program_of


def _sent(_: int, config: str) -> tuple[bool, list[list[str]]]:
    """Whether stages have several buckets; in each iteration, when they were sent off."""
    small = partial(step_module.DistributedDataParallelConfig, bucket_size=20_000)
    with patch.object(step_module, "DistributedDataParallelConfig", small):
        setting, runtime = build_here(config)
    groups = sum(len(trained.buffers.bucket_groups) for trained in runtime.stages.values())
    sent: Counter[tuple[str, int]] = Counter()
    under_way: list[str] = []

    def begin(self: _Iteration, step: Step, run: Callable[..., None] = _Iteration.begin) -> None:
        under_way[:] = ["before an action"]
        run(self, step)

    def execute(self: _Iteration, step: Step, *given: object, run: Callable[..., None] = _Iteration.execute) -> None:
        under_way[:] = [f"{step.kind.name} closes" if step.closes else step.kind.name]
        run(self, step, *given)

    def start(
        self: _ParamAndGradBucketGroup,
        *given: object,
        run: Callable[..., None] = _ParamAndGradBucketGroup.start_grad_sync,
        **options: object,
    ) -> None:
        sent[under_way[0], id(self)] += self.grad_reduce_handle is None  # else it does nothing
        run(self, *given, **options)

    found = []
    with (
        patch.object(_Iteration, "begin", begin),
        patch.object(_Iteration, "execute", execute),
        patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start),
    ):
        for iteration in range(2):
            sent.clear()
            program = program_of(setting, iteration)
            assert all(map(program.splits_backward, range(2)))
            runtime.run(runtime.prepare(program), Clock(CPU))
            once = [when for (when, _), count in sent.items() if count == 1]
            assert len(once) == sum(sent.values()) == groups
            found.append(sorted(set(once)))
    return groups > len(runtime.stages), found


@pytest.mark.wide
def test_a_stage_sends_every_bucket_once_in_its_last_weight_pass_or_behind_that_of_another_replica() -> None:
    ranks = run_ranks(_sent, 4, configuration(*DISJOINT, "strategy/scheduler=zb_h1"))
    assert any(several for several, _ in ranks)
    for iterations in zip(*(found for _, found in ranks), strict=True):
        assert set(map(tuple, iterations)) == {("WEIGHT closes",), ("before an action",)}
