"""Programs trained on ranks of this machine, several times each, in turns; imported on the ranks that measure."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.lab.fidelity.programs import FidelityProgram
from entrain_bench.lab.measuring import write_json
from entrain_bench.run.experiment import prepare
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.launching import TIMEOUT_S
from entrain_bench.train.measuring import Clock, merge_timeline
from entrain_bench.train.messages.control import gather_values
from entrain_bench.train.messages.rank_plan import believed_order
from entrain_bench.train.running.runtime import GroupMaker, Runtime, build_runtime
from entrain_bench.train.settings import TrainSettings

WARM_UPS = 2
CPU = torch.device("cpu")


@dataclass(slots=True)
class TwoClocks(Clock):
    """Besides when actions ran, the seconds of the processor that each took."""

    cpu_s: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Take this moment as zero."""
        self.cpu_s.clear()
        Clock.start(self)

    @contextmanager
    def action(self, action: int) -> Iterator[None]:
        """Time what runs inside as one action."""
        before = thread_time()
        with Clock.action(self, action):
            yield
        self.cpu_s.append(thread_time() - before)


class Kept:
    """Bytes that autograd keeps between forward and backward, those of parameters left out; now and at the most."""

    def __init__(self, runtime: Runtime) -> None:
        parameters = [p for trained in runtime.stages.values() for p in trained.stage.parameters()]
        self.known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.held = Counter[int]()
        self.now = 0
        self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor | list[Tensor]:
        """Count a tensor's storage until what this returns is gone."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        size = storage.nbytes()
        if place in self.known:
            return tensor
        if not self.held[place]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self.held[place] += 1
        holder = _Holder(tensor)
        weakref.finalize(holder, self._release, place, size)
        return holder  # type: ignore[return-value]

    def _release(self, place: int, size: int) -> None:
        self.held[place] -= 1
        if not self.held[place]:
            self.now -= size


@dataclass(eq=False)
class _Holder:
    tensor: Tensor


def _unpack(held: Any) -> Tensor:
    tensor: Tensor = held.tensor if isinstance(held, _Holder) else held
    return tensor


def train_programs(
    programs: Sequence[FidelityProgram], half: str, repeats: int, folder: Path, control: dist.ProcessGroup
) -> None:
    """Train programs of one group and leave what was measured in ``<folder>/<key>.<half>.json``; collective, over gloo.

    They run in turn, so background load affects all of them equally.
    """
    prepare_platform()
    torch.set_num_threads(1)
    maker = GroupMaker(control, TIMEOUT_S, CPU)
    runs = [_Run(each, maker) for each in programs]
    for repetition in range(WARM_UPS + repeats):
        for run in runs if repetition % 2 else runs[::-1]:
            run.once(keep=repetition >= WARM_UPS)
    for run in runs:
        run.write(folder, half)


class _Run:
    """A program on this rank."""

    def __init__(self, one: FidelityProgram, maker: GroupMaker) -> None:
        self.one = one
        self.maker = maker
        self.setting = prepare(one.config)
        self.runtime = self._build("float32")
        self.clock = TwoClocks(CPU)
        self.rows = list[list[list[float]]]()
        self.work = self.runtime.prepare(one.program, believed_order(one.program, self.setting.profile))
        # Made once: they would take the core from the passes that are measured.
        self.inputs = list(self.work.inputs)

    def once(self, keep: bool) -> None:
        """One iteration."""
        self.runtime.run(replace(self.work, inputs=iter(self.inputs)), self.clock)
        if keep:
            self.rows.append(np.column_stack([self.clock.rows(), self.clock.cpu_s]).tolist())

    def write(self, folder: Path, half: str) -> None:
        """Leave when actions ran and their processor time, and the largest memory of a rank in bfloat16; collective."""
        before = _live_bytes()
        runtime = self._build("bfloat16")
        kept = Kept(runtime)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, _unpack):
            runtime.run(runtime.prepare(self.one.program), Clock(CPU))
        # Memory that lives through iterations, and that of autograd.
        own_bytes = float(kept.peak + _live_bytes() - before)
        del runtime, kept
        everyone = gather_values({"rows": self.rows, "bytes": own_bytes}, self.maker.control)
        if dist.get_rank():
            return
        program = self.one.program
        peaks = [own["bytes"] for own in everyone]
        values: dict[str, Any] = {"start_s": [], "end_s": [], "cpu_s": [], "peak_bytes": max(peaks)}
        for repetition in range(len(self.rows)):
            # A rank that no module is placed on has no rows.
            rows = [np.array(own["rows"][repetition]).reshape(-1, 4) for own in everyone]
            timeline = merge_timeline(program, rows, peaks)
            cpu_s = np.zeros(program.num_actions)
            for own in rows:
                np.maximum.at(cpu_s, own[:, 0].astype(np.int64), own[:, 3])
            for name, column in (("start_s", timeline.start_s), ("end_s", timeline.end_s), ("cpu_s", cpu_s)):
                values[name].append(column.tolist())
        write_json(folder / f"{self.one.key}.{half}.json", values, None)

    def _build(self, dtype: str) -> Runtime:
        settings = self.setting.executor
        assert isinstance(settings, TrainSettings)
        own = replace(settings, dtype=dtype)
        return build_runtime(self.one.program.layout, own, CPU, self.one.seed, self.maker.control, self.maker)


def _live_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
