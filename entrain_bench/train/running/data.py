"""Content of samples and inputs of chunks, as stages take them."""

from __future__ import annotations

import os
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
from torch.utils.data import DataLoader, Dataset

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.run.parallel import end_with_parent
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.workload import SOUND_HZ, Moved, Readable, Samples, Workload
from entrain_bench.train.device import to_device
from entrain_bench.train.features import FRAMES_OF_TOKEN, HOP, KERNEL, PatchRules, write_patches, write_windows
from entrain_bench.train.messages.control import portable
from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.packing import Pack, Picture, in_stage_order, multimodal_positions
from entrain_bench.train.settings import FILES, MADE_UP, TrainSettings


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
    content: Content

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


@dataclass(frozen=True, slots=True)
class FromFiles:
    """Content of the samples themselves, preprocessed as by the processors of published models."""

    samples: Samples
    rules: TokenRules

    def features(self, module: ModuleSpec, shapes: SampleShapes, items: IntArray, out: Features) -> None:
        """Write the input of an encoder for some items ``[sum of encoder tokens, input width]``, in natural order.

        ``UserError`` names a sample that cannot be read or differs from its shape.
        """
        is_sound = "audio" in module.config.modalities
        patches = None if is_sound else patch_rules(module, out.shape[1], self.rules)
        ends = np.cumsum(shapes.item_encoder_tokens[items])
        for item, rows in zip(items.tolist(), np.split(out, ends[:-1]), strict=True):
            if patches is None:
                write_windows(self.samples.sound(shapes, item), rows)
            else:
                pixels = self.samples.picture(shapes, item)
                if len(pixels) not in (1, patches.frames):
                    raise IncompatibleError(
                        f"model.modules.{module.name}: a patch spans {patches.frames} frames, but a video item has "
                        f"{len(pixels)}. Check model.tokens.temporal_patch_frames"
                    )
                write_patches(pixels, patches, rows)

    def tokens(self, shapes: SampleShapes, sample: int) -> IntArray:
        """Token ids of the text of a sample ``[text tokens]``, int64; raises as ``features``."""
        return self.samples.tokens(shapes, sample)


# Features and tokens of samples; they do not depend on batch, chunk, rank or process.
type Content = FromFiles | MadeUp


def patch_rules(module: ModuleSpec, width: int, rules: TokenRules) -> PatchRules:
    """How an encoder takes pixels; ``IncompatibleError`` for an input that is not one of whole patches."""
    where = f"model.modules.{module.name}"
    return PatchRules.of(width, rules.patch_pixels, rules.merge_patches, module.config.checkpoint, where)


def content_of(settings: TrainSettings, workload: Workload, model: ModelSpec, seed: int) -> Content:
    """Return the content of a run's samples; ``UserError`` for shapes alone and unsupported inputs."""
    vocab_size = model.llm.config.vocab_size
    if settings.data == MADE_UP:
        return MadeUp(seed, vocab_size)
    if not isinstance(workload, Readable):
        raise UserError(
            f"harness.data={FILES}: workload={workload.name} has shapes only. Use workload=trace with a trace that "
            "entrain-bench trace made"
        )
    for module in model.encoders:
        check_input(module, model.tokens)
    moved = Moved(settings.data_path, settings.data_root, settings.data_tokenizer)
    return FromFiles(workload.samples(model.tokens, vocab_size, moved), model.tokens)


def check_input(module: ModuleSpec, rules: TokenRules) -> None:
    """Raise ``IncompatibleError`` for an encoder whose input is not made here."""
    first = module.layers[0].gemms[0]
    if "audio" not in module.config.modalities:
        patch_rules(module, round(first.k * first.rows_per_token), rules)
        return
    frames, rest = divmod(SOUND_HZ, HOP * rules.audio_frames_per_s)
    if first.k % KERNEL or first.rows_per_token != FRAMES_OF_TOKEN or rest or frames != FRAMES_OF_TOKEN:
        raise IncompatibleError(
            f"model.modules.{module.name}: harness.data={FILES} needs {FRAMES_OF_TOKEN} log-mel frames per token, a "
            f"first kernel of {KERNEL}, and model.tokens.audio_frames_per_s={SOUND_HZ // HOP // FRAMES_OF_TOKEN}"
        )


def _noise(seed: int, sample: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed << 32 | stream, sample]))


# Inputs of forwards that wait for their rank, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4
# Worker processes of a rank, if there are as many free cores.
WORKERS_PER_RANK = 2

# Arguments of ``Data.inputs`` for one chunk.
type Request = tuple[Any, ...]


def load_inline(data: Data, requests: Sequence[Request]) -> Iterator[Inputs]:
    """Yield the inputs of chunks in order, made when they are taken."""
    return (data.inputs(*request) for request in requests)


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
        """Yield the inputs of chunks in order; they are made as soon as earlier calls leave room."""
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


@dataclass(frozen=True, slots=True)
class _Chunks(Dataset[Inputs | Exception]):
    """Inputs of chunks, made where they are asked for."""

    data: Data
    requests: Sequence[Request]

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Inputs | Exception:
        try:
            return self.data.inputs(*self.requests[index])
        except Exception as error:
            return portable(error, "a worker")


def load_by_workers(
    device: torch.device, num_workers: int, data: Data, requests: Sequence[Request]
) -> Iterator[Inputs]:
    """Yield the inputs of chunks in order, which workers of torch's ``DataLoader`` begin now; pinned for a GPU.

    Raises the exception of a worker.
    """
    loader = DataLoader(
        _Chunks(data, requests),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=max(1, LOAD_AHEAD // num_workers),
        pin_memory=device.type == "cuda",
        worker_init_fn=_end_worker_with_rank,
        # Workers hold only the data that their rank has loaded, and compute on no device.
        multiprocessing_context="fork",
    )
    return map(_made, iter(loader))


def _made(made: Inputs | Exception) -> Inputs:
    if isinstance(made, Exception):
        raise made
    return made


def _end_worker_with_rank(_: int) -> None:
    end_with_parent()


# Makes inputs of chunks, in order; those of earlier calls must be taken first.
type Loader = Callable[[Data, Sequence[Request]], Iterator[Inputs]]


def make_loader(settings: TrainSettings, device: torch.device) -> Loader:
    """Return the loader that ``harness.preprocessing`` names."""
    if settings.preprocessing == "inline":
        return load_inline
    if settings.preprocessing == "thread":
        return ThreadLoader(device).load
    return partial(load_by_workers, device, num_workers(settings))


def num_workers(settings: TrainSettings) -> int:
    """Return the worker processes of a rank of this machine: as given, or as many as cores are free, one at least."""
    if settings.preprocessing_processes is not None:
        return settings.preprocessing_processes
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.num_ranks))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // ranks - 1, WORKERS_PER_RANK))
