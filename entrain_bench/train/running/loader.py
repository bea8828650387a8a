"""Inputs of a rank's next forwards: made when they are needed, or before that, by a thread or by other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch

from entrain_bench.base.arrays import IntArray
from entrain_bench.config.schema import RunConfig
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.modules import Pack
from entrain_bench.train.producing.producer import LOAD_AHEAD, MakersOf
from entrain_bench.train.producing.reader import Reader
from entrain_bench.train.running.content import content_of
from entrain_bench.train.running.data import Inputs, SampleData
from entrain_bench.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class MakeInputs:
    """Makes the inputs of a chunk; arguments of ``SampleData.inputs``."""

    data: SampleData
    module: ModuleSpec
    stage: int
    members: IntArray
    remade: int = 0
    splits_backward: bool = False

    def __call__(self) -> Inputs:
        """The inputs."""
        return self.data.inputs(
            self.module, self.stage, self.members, self.remade, splits_backward=self.splits_backward
        )


class InlineLoader:
    """Makes inputs when they are taken; ``pins``: in memory that a GPU can copy from by itself."""

    def __init__(self, device: torch.device) -> None:
        self.pins = device.type == "cuda"

    def load(self, makers: Sequence[MakeInputs]) -> Iterator[Inputs]:
        """Yield the inputs that the makers return, in order."""
        return (maker() for maker in makers)


class ThreadLoader:
    """Makes inputs one after the other in one thread, a bounded number ahead of who takes them."""

    def __init__(self, device: torch.device, ahead: int = LOAD_AHEAD) -> None:
        self.pins = device.type == "cuda"
        # A thread computes on the first GPU until it chooses; pinning memory would leave a context there.
        choose = partial(torch.cuda.set_device, device) if self.pins else None
        self._pool = ThreadPoolExecutor(1, "load", choose)
        self._ahead = ahead
        self._lock = Lock()
        self._waiting: deque[Callable[[], Inputs]] = deque()
        self._begun: deque[Future[Inputs]] = deque()

    def load(self, makers: Sequence[Callable[[], Inputs]]) -> Iterator[Inputs]:
        """Yield the inputs that the makers return, in order; makers begin as soon as earlier calls leave room."""
        with self._lock:
            self._waiting.extend(makers)
            self._begin()
        return (self._take() for _ in range(len(makers)))

    def _take(self) -> Inputs:
        with self._lock:
            future = self._begun.popleft()
            self._begin()
        return future.result()

    def _begin(self) -> None:
        while self._waiting and len(self._begun) < self._ahead:
            self._begun.append(self._pool.submit(self._waiting.popleft()))


class ProducerLoader:
    """Has producers make inputs; where ranks compute on a GPU, a thread copies them to pinned memory."""

    pins = False

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self._reader = reader
        self._pinning = ThreadLoader(device) if device.type == "cuda" else None

    def load(self, makers: Sequence[MakeInputs]) -> Iterator[Inputs]:
        """Yield the inputs that the makers return, in order."""
        if not makers:
            return iter(())
        shapes = makers[0].data.shapes
        names = None if shapes.sample_names is None else shapes.sample_names.tolist()
        asked = [(m.module.name, m.stage, m.members, m.remade, m.splits_backward) for m in makers]
        taken = map(_inputs_of, self._reader.load({"shapes": _fields(shapes) | {"sample_names": names}}, asked))
        if self._pinning is None:
            return taken
        return self._pinning.load([partial(_take_pinned, taken)] * len(makers))


# Where inputs come from, in order; those of earlier calls of ``load`` must be taken first.
type Loader = InlineLoader | ThreadLoader | ProducerLoader


def makers_of_run(config: RunConfig) -> MakersOf:
    """Return the function by which a producer answers requests of ``ProducerLoader``."""
    setting = prepare(config)
    assert isinstance(setting.executor, TrainSettings)
    content = content_of(setting.executor, setting.workload, setting.job.model, config.seed)
    modules = {module.name: module for module in setting.job.model.modules}

    def makers_of(said: Any) -> list[Callable[[], dict[str, Any]]]:
        columns = said["shapes"]
        names = None if columns["sample_names"] is None else np.array(columns["sample_names"])
        shapes = SampleShapes(**{**columns, "modalities": tuple(columns["modalities"]), "sample_names": names})
        data = SampleData(shapes, content)
        return [partial(_made, MakeInputs(data, modules[name], *rest)) for name, *rest in said["asked"]]

    return makers_of


def _made(make: MakeInputs) -> dict[str, Any]:
    inputs = make()
    return {**_fields(inputs), "pack": _fields(inputs.pack)}


def _fields(part: Inputs | Pack | SampleShapes) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for f in fields(part) if f.init}


def _inputs_of(made: dict[str, Any]) -> Inputs:
    """The inputs that a producer made, with their tensors in its memory."""
    pack = Pack(**{name: _own_kind(value) for name, value in made["pack"].items()})
    return Inputs(pack, _own_kind(made["features"]), _own_kind(made["row_keys"]))


def _own_kind(value: Any) -> Any:
    """A tensor or tuple of what ``wire`` made an array or a list."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return tuple(map(_own_kind, value)) if isinstance(value, list) else value


def _take_pinned(taken: Iterator[Inputs]) -> Inputs:
    inputs = next(taken)
    return inputs if inputs.features is None else replace(inputs, features=inputs.features.pin_memory())
