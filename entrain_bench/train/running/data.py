"""Content of samples and inputs of chunks, as stages take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import isqrt, sqrt
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrain_bench.base.arrays import IntArray
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.device import to_device
from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.packing import Pack, Picture, in_stage_order, multimodal_positions


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a forward, on the CPU: ``pack`` as the provider of the stages takes it.

    Of the suite's own, an encoder's first stage has ``features [tokens, width]``. If ``splits_backward``, the gradients
    of weights have a pass of their own.
    """

    pack: Any
    features: Tensor | None = None
    splits_backward: bool = False

    def pin_memory(self) -> Inputs:
        """Return the inputs with features in pinned memory, which a GPU copies directly."""
        return self if self.features is None else replace(self, features=self.features.pin_memory())

    def features_on(self, device: torch.device) -> Tensor | None:
        """Return the features of an encoder's first stage on the computing device; None for other stages."""
        return None if self.features is None else to_device(self.features, device)


class Data(Protocol):
    """Data of one iteration's samples."""

    @property
    def num_loss_tokens(self) -> int:
        """Predicted tokens of the whole batch."""

    def inputs(
        self, module: ModuleSpec, stage: int, members: IntArray, remade: int = 0, splits_backward: bool = False
    ) -> Inputs:
        """Return a stage's inputs for a chunk of items (encoder) or samples (LLM); it recomputes ``remade`` blocks."""


@dataclass(frozen=True, slots=True)
class SampleData:
    """Data of one iteration's samples."""

    shapes: SampleShapes
    content: MadeUp

    @property
    def num_loss_tokens(self) -> int:
        """Predicted tokens of the whole batch: text tokens that have a token before them."""
        return int(self.shapes.labelled_tokens.sum())

    def inputs(
        self, module: ModuleSpec, stage: int, members: IntArray, remade: int = 0, splits_backward: bool = False
    ) -> Inputs:
        """Return a stage's inputs for a chunk of items (encoder) or samples (LLM); it recomputes ``remade`` blocks."""
        pack = self.encoder_pack(members) if module.is_encoder else self.llm_pack(members)
        if module.config.mrope_sections:
            pack = replace(pack, positions=self.positions(module, members))
        pack = replace(pack, remade=remade, splits_backward=splits_backward)
        if not module.is_encoder or stage:
            return Inputs(pack, splits_backward=splits_backward)
        size = int(self.shapes.item_encoder_tokens[members].sum()), input_width(module)
        features = torch.empty(size, dtype=torch.float32)
        self.content.features(module, self.shapes, members, features.numpy())
        ordered = in_stage_order(module, self.encoder_pack(members), features)
        return Inputs(pack, ordered, splits_backward)

    def encoder_pack(self, items: IntArray) -> Pack:
        """Lengths and grids of the given items."""
        shapes = self.shapes
        known = shapes.item_grids[items].tolist() if shapes.item_grids is not None else []
        return Pack(
            tuple(shapes.item_encoder_tokens[items].tolist()),
            tuple(shapes.item_llm_tokens[items].tolist()),
            grids=tuple((rows, columns) for rows, columns in known),
        )

    def llm_pack(self, samples: IntArray) -> Pack:
        """Tokens and labels of the given samples: the items' projected tokens, then the text, which is predicted."""
        shapes = self.shapes
        ids = []
        labels = []
        lengths = shapes.llm_tokens[samples]
        for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True):
            num_text = int(shapes.text_tokens[sample])
            row = np.full(length, -1, np.int64)
            row[length - num_text :] = self.content.tokens(shapes, sample)
            ids.append(row)
            labels.append(np.append(row[1:], -1))
        token_ids, targets = (torch.from_numpy(np.concatenate(rows)) for rows in (ids, labels))
        return Pack(tuple(lengths.tolist()), (), token_ids, targets)

    def positions(self, llm: ModuleSpec, samples: IntArray) -> Tensor:
        """Time, height and width of LLM tokens ``[3, tokens]``; adjacent video items of one size are one video."""
        shapes = self.shapes
        positions = []
        for sample in samples.tolist():
            parts: list[int | Picture] = []
            items = range(int(shapes.item_offsets[sample]), int(shapes.item_offsets[sample + 1]))
            for (name, part), same in groupby(items, partial(self._part, llm.config.mrope_frame_step)):
                count = len(list(same))
                if name == "video" and isinstance(part, Picture):
                    parts.append(replace(part, frames=count))
                else:
                    parts += count * [part]
            if text := int(shapes.text_tokens[sample]):
                parts.append(text)
            positions.append(multimodal_positions(parts))
        return torch.cat(positions, dim=1)

    def _part(self, frame_step: float, item: int) -> tuple[str, int | Picture]:
        """Modality and places of an item's LLM tokens: on its grid, or in rows of ceil(sqrt(tokens)) if not known."""
        shapes = self.shapes
        name = shapes.modalities[int(shapes.item_modality[item])]
        tokens = int(shapes.item_llm_tokens[item])
        if name == "audio":
            return name, tokens
        if shapes.item_grids is not None and shapes.item_grids[item, 0]:
            rows, columns = shapes.item_grids[item].tolist()
            merged = isqrt(int(shapes.item_encoder_tokens[item]) // tokens)
            if rows * columns == tokens * merged**2:
                return name, Picture(rows // merged, columns // merged, frame_step=frame_step)
        columns = isqrt(tokens - 1) + 1
        return name, Picture(-(-tokens // columns), columns, frame_step=frame_step, tokens=tokens)


type Features = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Content made up from the seed and the sample's identity: uniform tokens and features."""

    seed: int
    vocab_size: int

    def features(self, _: ModuleSpec, shapes: SampleShapes, items: IntArray, out: Features) -> None:
        """Write numbers of mean 0 and variance 1 for some items ``[sum of encoder tokens, input width]``."""
        samples = shapes.item_sample[items]
        numbers = 1 + items - shapes.item_offsets[samples]
        ends = np.cumsum(shapes.item_encoder_tokens[items])
        rows = np.split(out, ends[:-1])
        for sample, number, own in zip(shapes.sample_ids[samples].tolist(), numbers.tolist(), rows, strict=True):
            _noise(self.seed, sample, number).random(dtype=np.float32, out=own)
        out -= 0.5
        out *= sqrt(12)

    def numbers(self, sample: int, item: int, size: Sequence[int]) -> Tensor:
        """Numbers of mean 0 and variance 1 for an item of a sample, by its identity."""
        made = _noise(self.seed, sample, item).random(dtype=np.float32, size=tuple(size))
        return torch.from_numpy((made - np.float32(0.5)) * np.float32(sqrt(12)))

    def tokens(self, shapes: SampleShapes, sample: int) -> IntArray:
        """Uniform tokens."""
        noise = _noise(self.seed, int(shapes.sample_ids[sample]), 0)
        return noise.integers(self.vocab_size, size=int(shapes.text_tokens[sample]))


def _noise(seed: int, sample: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed << 32 | stream, sample]))


# Inputs of forwards that wait for their rank, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4
# Arguments of ``Data.inputs`` for one chunk.
type Request = tuple[Any, ...]


class ThreadLoader:
    """Makes inputs in one thread, at most ``ahead`` of the consumer."""

    def __init__(self, device: torch.device, ahead: int = LOAD_AHEAD) -> None:
        self._pins = device.type == "cuda"
        # A thread computes on the first GPU until it chooses; pinning memory would leave a context there.
        choose = partial(torch.cuda.set_device, device) if self._pins else None
        self._thread = ThreadPoolExecutor(1, "load", choose)
        self._ahead = ahead
        self._asked = deque[Callable[[], Inputs]]()
        self._begun = deque[Future[Inputs]]()
        self._turn = Lock()

    def load(self, data: Data, requests: Sequence[Request]) -> Iterator[Inputs]:
        """Yield the inputs of chunks in order; those of earlier calls must be taken first, and leave room."""
        with self._turn:
            self._asked += [partial(self._make, data, request) for request in requests]
            self._begin()
        return (self._take() for _ in requests)

    def _make(self, data: Data, request: Request) -> Inputs:
        inputs = data.inputs(*request)
        return inputs.pin_memory() if self._pins else inputs

    def _take(self) -> Inputs:
        made = self._begun[0].result()
        with self._turn:
            self._begun.popleft()
            self._begin()
        return made

    def _begin(self) -> None:
        while self._asked and len(self._begun) < self._ahead:
            self._begun.append(self._thread.submit(self._asked.popleft()))
