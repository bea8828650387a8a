"""Stages take as long trained as emulated or profiled, in one process that alternates between them.

Collectives return at once in both: what they cost a core besides is their own, and not a stage's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from time import thread_time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from entrain_bench.costs.profiled.file import write_profile
from entrain_bench.costs.profiled.timed_points import DeviceProfile
from entrain_bench.lab.fidelity.programs import COMMON, IMAGE, first_program
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train.emulate.bench import Bench
from entrain_bench.train.emulate.emulator import lane_orders, stage_shapes
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.messages.positions import believed_order
from entrain_bench.train.platform import rank_of_many
from entrain_bench.train.profiling import sampling
from entrain_bench.train.profiling.recorder import ProfileRecorder
from entrain_bench.train.profiling.settings import ProfileSettings
from entrain_bench.train.running.build import build_runtime
from entrain_bench.train.running.groups import GroupMaker

# TP, CP and PP of each layout.
LAYOUTS = {"pp2": (1, 1, 2), "tp2": (2, 1, 1), "cp2": (1, 2, 1), "cp4": (1, 4, 1), "tp2_cp2": (2, 2, 1)}
# Shares of text of about 5% and 100%.
TEXT = {
    "5%": ("workload.text.median=8", f"{IMAGE}.llm_tokens.median=150", f"{IMAGE}.llm_tokens.sigma=0.3"),
    "100%": ("workload.text.median=200", f"{IMAGE}.probability=0"),
}
HEADS = ("all", "labelled")
# So that it matters which tokens a head has logits of.
WIDE_HEAD = ("model.modules.llm.vocab_size=8192",)
WARM_UPS, PAIRS, CPU = 2, 15, torch.device("cpu")
# Of the numbers of tokens that are profiled by default, those around what the stages run.
TOKENS = (64, 256, 1024, 4096)


class Trained:
    """The first rank of a program in training."""

    def __init__(self, layout: str, text: str, head: str) -> None:
        tp, cp, pp = LAYOUTS[layout]
        degrees = f"layout.tp={tp}", f"layout.cp={cp}", f"layout.pp={pp}", "layout.dp=1", f"head_tokens={head}"
        ranks = f"cluster.gpus_per_node={tp * cp * pp}", f"harness.num_ranks={tp * cp * pp}", "global_batch=8"
        self.overrides = [*COMMON, *TEXT[text], *degrees, *ranks, *WIDE_HEAD, "strategy=megatron", "seed=0"]
        (cell,) = compose_cells(self.overrides)
        self.setting, self.program = first_program(cell.config)
        self.order = lane_orders(self.program)[0]
        actions = self.order.actions.tolist()
        self.stages = {int(self.program.module[action]): int(self.program.stage[action]) for action in actions}

    def build(self) -> None:
        """Build the rank's stages; inside ``rank_of_many``."""
        world = dist.group.WORLD
        settings, maker = replace(self.setting.executor, dtype="float32"), GroupMaker(world, 60.0, CPU)
        self.runtime = build_runtime(self.setting.job, self.program.layout, settings, CPU, 0, world, maker)
        self.work = self.runtime.prepare(self.program, believed_order(self.program, self.setting.profile))
        self.inputs = [*self.work.inputs]

    def once(self) -> dict[int, float]:
        """Train an iteration; seconds of each action."""
        clock = Clock(CPU, thread_time)
        self.runtime.run(replace(self.work, inputs=iter(self.inputs)), clock)
        return {int(action): end - start for action, start, end, *_ in clock.rows()}

    def passes(self) -> Iterator[tuple[str, int, list[int]]]:
        """Module, stage and passes of every stage."""
        for module, stage in self.stages.items():
            own = [action for action in self.order.actions.tolist() if self.program.module[action] == module]
            yield self.program.model.modules[module].name, stage, own


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "text", "head"), [*product(LAYOUTS, TEXT, HEADS)])
def test_every_stage_takes_as_long_trained_as_emulated(layout: str, text: str, head: str) -> None:
    trained, pairs = Trained(layout, text, head), []
    program, order = trained.program, trained.order
    bench = Bench("cpu", "float32", 0, 1, trained.setting.job.framework)
    shapes = map(stage_shapes, program.model.modules, program.layout.modules)
    held = [own[trained.stages[index]] for index, own in enumerate(shapes) if index in trained.stages]
    with rank_of_many(np.prod(LAYOUTS[layout])):
        trained.build()
        emulated = bench.build(program.model, held)
        for _ in range(WARM_UPS + PAIRS):
            trained_s, own_s = trained.once(), bench.time_order(emulated, program, order)[0]
            pairs.append((dict(zip(order.actions.tolist(), own_s.tolist(), strict=True)), trained_s))
    for name, stage, own in trained.passes():
        # Of neighbours in time, for the speed of a machine changes.
        ratios = [sum(map(one.get, own)) / sum(map(other.get, own)) for one, other in pairs[WARM_UPS:]]
        assert 0.9 <= np.median(ratios) <= 1.1, f"{name}, stage {stage}: emulated/trained {np.median(ratios):.3f}"


@pytest.fixture
def kept_heap() -> None:
    """Freed memory stays here, as on the ranks of ``make fidelity``: new pages cost as much as products."""
    libc, mmap_max, trim_threshold = ctypes.CDLL(None), -4, -1
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("kept_heap")
@pytest.mark.parametrize(("layout", "head"), [*product(LAYOUTS, HEADS)])
def test_every_stage_takes_as_long_trained_as_by_a_profile(
    layout: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pack of the profile has an iteration of training before it."""
    # Whatever else the machine does.
    monkeypatch.setattr(sampling, "Clock", partial(Clock, timer=thread_time))
    monkeypatch.setattr(sampling, "WARM_UPS", 1)
    runs, (tp, cp, pp) = [Trained(layout, text, head) for text in TEXT], LAYOUTS[layout]
    settings = ProfileSettings(
        TOKENS,
        tp=tuple({tp, pp}),  # of PP only to have as many ranks
        cp=tuple({1, cp}),
        ranks=(),
        head_tokens=head,
        min_repetitions=3,
        max_repetitions=9,
        precision=0.05,
    )
    path = tmp_path / "profile.json"
    recorder = ProfileRecorder.begin(runs[0].program.model, settings, path, CPU)
    # Points of the profile before each iteration, and its run and seconds.
    marks: list[tuple[int, int, dict[int, float]]] = []

    def advance(_: str) -> None:
        if not marks:
            for run in runs:
                run.build()
                run.once()
        turn = len(marks) % len(runs)
        marks.append((len(recorder.profile.stages), turn, runs[turn].once()))

    recorder.run(advance)
    trained_s = [median_of([took_s for _, own, took_s in marks if own == turn]) for turn in range(len(runs))]
    write_profile(path, at_usual_speed(recorder.profile, marks, trained_s))
    wrong = []
    for text, run, took_s in zip(TEXT, runs, trained_s, strict=True):
        (cell,) = compose_cells([*run.overrides, "cluster/device=profiled", f"cluster.device.path={path}"])
        prices = prepare(cell.config).truth.price(run.program)
        profiled_s = prices.duration_s - prices.comm_s
        for name, stage, own in run.passes():
            ratio = profiled_s[own].sum() / sum(map(took_s.get, own))
            where = f"{text} text, {name}, stage {stage}: profiled/trained {ratio:.3f}"
            print(layout, head, where)
            if not 0.9 <= ratio <= 1.1:
                wrong.append(where)
    assert not wrong


def median_of(iterations: list[dict[int, float]]) -> dict[int, float]:
    """Seconds of each action."""
    return {action: float(np.median([took_s[action] for took_s in iterations])) for action in iterations[0]}


def at_usual_speed(
    profile: DeviceProfile, marks: list[tuple[int, int, dict[int, float]]], usual_s: list[dict[int, float]]
) -> DeviceProfile:
    """The profile with points over how slow the iterations before and after them were: a machine's speed changes."""
    slowness = [sum(took_s.values()) / sum(usual_s[turn].values()) for _, turn, took_s in marks]
    firsts = [first for first, *_ in marks]
    scaled = list(profile.stages[: firsts[0]])
    for place, (first, end) in enumerate(pairwise([*firsts, len(profile.stages)])):
        factor = 1 / np.mean(slowness[place : place + 2])
        for point in profile.stages[first:end]:
            times = {name: getattr(point, name) for name in ("forward_s", "backward_s", "remade_s")}
            scaled.append(replace(point, **{name: tuple(factor * s for s in own) for name, own in times.items()}))
    return replace(profile, stages=tuple(scaled))
