"""The next iteration's program, made ready on every rank while another runs; and what its strategy has seen by then."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch.distributed as dist

from entrain_bench.run.experiment import Feed, prepare
from entrain_bench.train.messages.control import PlanningGroup
from entrain_bench.train.running import loop as feed_module
from entrain_bench.train.running.loop import WorkFeed
from support.train.ranks import PRELOADED, run_ranks
from support.train.runs import DISJOINT, config_from_json, configuration

TIMEOUT_S = 60.0


@contextmanager
def feeding(*programs: Any) -> Iterator[WorkFeed]:
    """A feed whose programs are bytes, or what making them raises or does."""
    # Only rank 0 knows the order.
    plain = {
        "check_program": Mock(),
        "believed_order": lambda program, _: np.arange(len(program)) if dist.get_rank() == 0 else None,
    }
    made = iter(programs)

    def make(*_: Any) -> bytes:
        program = next(made)
        return program() if callable(program) else program

    with patch.multiple(feed_module, **plain):
        setting: Any = Mock(strategy=Mock(program=make))
        planning = PlanningGroup(dist.group.WORLD, 60.0)
        yield WorkFeed(Feed(setting, Mock(), 0), planning, lambda program, order: (program, order.tolist()))


def fail() -> bytes:
    raise ValueError("planted")


def _works(_: int) -> list[Any]:
    with feeding(b"first", b"second", fail) as feed:
        taken = [feed.take(iteration, last=False) for iteration in range(2)]
        assert all(exposed_s > 0 for *_, exposed_s in taken)
        try:
            feed.take(2, last=True)
        except Exception as error:
            return [*(work for work, *_ in taken), type(error).__name__]
    return []


def test_every_rank_prepares_the_program_of_rank_0_which_hears_why_there_is_none() -> None:
    first, second = run_ranks(_works, 2, stay=False)
    assert first == [(b"first", [*range(5)]), (b"second", [*range(6)]), "ValueError"]
    # Nothing comes from rank 0 any more: its connection is gone.
    assert second == [*first[:2], "RuntimeError"]


def _ends(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    with feeding(b"first", Event().wait) as feed:
        feed.take(0, last=False)
        if rank:
            sys.exit(3)
        Event().wait()


def test_a_rank_that_fails_ends_while_its_thread_waits_for_a_program(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [context.Process(target=_ends, args=(rank, tmp_path / "store"), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        ranks[1].join(TIMEOUT_S / 2)
        assert ranks[1].exitcode == 3
        assert ranks[0].is_alive()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


class Spy:
    """A strategy that notes what programs it made after which observations."""

    def __init__(self, real: Any, seen: tuple[str, ...], log: list[tuple[str, ...]]) -> None:
        self.real, self.seen, self.log = real, seen, log

    def observe(self, timeline: str, _: object) -> Spy:
        return Spy(self.real, (*self.seen, timeline), self.log)

    def program(self, *args: Any) -> Any:
        self.log.append(self.seen)
        return self.real.program(*args)


def test_a_strategy_observes_what_the_simulator_would_show_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        setting = prepare(config_from_json(configuration(*DISJOINT)))
        layout = setting.strategy.plan(setting.profile)
        log: list[tuple[str, ...]] = []
        spied: Any = replace(setting, strategy=Spy(setting.strategy, (), log))
        feed = WorkFeed(Feed(spied, layout, 0), PlanningGroup(dist.group.WORLD, 60.0), Mock())
        for iteration in range(5):
            feed.take(iteration, last=iteration == 4)
            observed: Any = f"t{iteration}"
            feed.observe(observed)
    finally:
        dist.destroy_process_group()
    assert log == [(), (), ("t0",), ("t0", "t1"), ("t0", "t1", "t2")]
