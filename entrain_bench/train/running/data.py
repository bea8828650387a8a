"""Content of samples and inputs of chunks, as stages take them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, groupby
from math import isqrt, sqrt
from queue import Queue, SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, multiprocessing
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.run.parallel import end_with_parent
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.workload import SOUND_HZ, Moved, Readable, Samples, Workload
from entrain_bench.train.device import to_device
from entrain_bench.train.features import FRAMES_OF_TOKEN, HOP, KERNEL, PatchRules, write_patches, write_windows
from entrain_bench.train.messages.control import Failure
from entrain_bench.train.modules import Pack, in_stage_order, input_width
from entrain_bench.train.modules.packing import Picture, multimodal_positions
from entrain_bench.train.settings import FILES, MADE_UP, TrainSettings

# Multipliers of a mixing function of 32 bits with little bias ("lowbias32", C. Wellons, Prospecting for Hash Functions,
# 2018), as signed numbers.
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - 2**32
# A step through 32 bits that visits all of them: 2^32 over the golden ratio, odd.
_STEP = 0x9E3779B9 - 2**32
_UPPER_16 = 0xFFFF
_UPPER_17 = 0x1FFFF
# Odd numbers of 24 bits and a sign, exact in float32 and symmetric, scaled to a variance of 1.
_NUM_BITS = 24
_SCALE = sqrt(3) / 2 ** (_NUM_BITS - 1)
# Numbers that a CPU makes at a time, for its caches.
_NUM_ON_CPU = 2**17


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a forward, on the CPU; an encoder's first stage has ``features [tokens, width]`` or ``row_keys``."""

    pack: Pack
    features: Tensor | None = None
    row_keys: Tensor | None = None

    def pin_memory(self) -> Inputs:
        """Return the inputs with features in memory that a GPU can copy from by itself."""
        return self if self.features is None else replace(self, features=self.features.pin_memory())

    def features_on(self, device: torch.device, module: ModuleSpec) -> Tensor | None:
        """Return the features of an encoder's first stage on the computing device; None for other stages."""
        if self.row_keys is not None:
            return made_up_features(to_device(self.row_keys, device), input_width(module))
        return None if self.features is None else to_device(self.features, device)


@dataclass(frozen=True, slots=True)
class SampleData:
    """Data of one iteration's samples. If ``pinned``, features are in memory that a GPU can copy from by itself."""

    shapes: SampleShapes
    content: Content
    pinned: bool = False

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
            return Inputs(pack)
        if isinstance(self.content, MadeUp):
            keys = torch.from_numpy(self.content.row_keys(self.shapes, members))
            return Inputs(pack, row_keys=in_stage_order(module, self.encoder_pack(members), keys))
        size = int(self.shapes.item_encoder_tokens[members].sum()), input_width(module)
        features = torch.empty(size, dtype=torch.float32, pin_memory=self.pinned)
        self.content.features(module, self.shapes, members, features.numpy())
        return Inputs(pack, in_stage_order(module, self.encoder_pack(members), features))

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
        """Time, height and width of LLM tokens ``[3, tokens]``; neighbouring video items of one size are one video."""
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


def made_up_features(keys: Tensor, width: int) -> Tensor:
    """Independent uniform float32 of mean 0, variance 1 ``[rows, width]`` for keys ``[rows, 2]``, on their device."""
    device = keys.device
    columns = _columns(width, device)
    features = torch.empty(len(keys), width, device=device)
    at_once = max(1, _NUM_ON_CPU // width if device.type == "cpu" else len(keys))
    for some, rows in zip(torch.split(keys, at_once), torch.split(features, at_once), strict=True):
        _fill(rows, some, columns)
    return features


def _columns(width: int, device: torch.device) -> Tensor:
    """A word for each column ``[width]``."""
    words = torch.arange(width, dtype=torch.int32, device=device) * _STEP
    for multiplier in (_FIRST, _SECOND):
        words = (words ^ ((words >> 16) & _UPPER_16)) * multiplier
    return words ^ ((words >> 16) & _UPPER_16)


def _fill(features: Tensor, keys: Tensor, columns: Tensor) -> None:
    """Make rows ``[rows, width]`` out of their keys; shifts bring in zeros, where torch's bring in the sign."""
    words = torch.add(keys[:, :1], columns)
    shifted = features.view(torch.int32)
    torch.bitwise_right_shift(words, 16, out=shifted).bitwise_and_(_UPPER_16)
    words.bitwise_xor_(shifted).mul_(_FIRST).bitwise_xor_(keys[:, 1:])
    torch.bitwise_right_shift(words, 15, out=shifted).bitwise_and_(_UPPER_17)
    words.bitwise_xor_(shifted).mul_(_SECOND)
    # The upper bits depend on all others; with their lowest set they are odd, so that none is the mean.
    words.bitwise_right_shift_(32 - _NUM_BITS).bitwise_or_(1)
    features.copy_(words).mul_(_SCALE)


type Features = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Content made up from the seed and the sample's identity: uniform tokens, and keys of rows of features."""

    seed: int
    vocab_size: int

    def row_keys(self, shapes: SampleShapes, items: IntArray) -> NDArray[np.int32]:
        """Keys of the rows of some items, one after the other, each in its natural order ``[encoder tokens, 2]``."""
        samples = shapes.item_sample[items]
        numbers = items - shapes.item_offsets[samples]
        return row_keys(self.seed, shapes.sample_ids[samples], numbers, shapes.item_encoder_tokens[items])

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

        ``UserError`` names a sample that cannot be read or is not what the shapes say.
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


# Features and tokens of samples, the same whatever batch, chunk, rank or process asks for them.
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


def row_keys(seed: int, samples: IntArray, numbers: IntArray, lengths: IntArray) -> NDArray[np.int32]:
    """Keys of rows ``[sum(lengths), 2]`` for items ``numbers`` of ``samples``, with ``lengths`` rows ``[items]``."""
    items = zip(samples.tolist(), numbers.tolist(), lengths.tolist(), strict=True)
    keys = [_noise(seed, one, 1 + number).integers(-(2**31), 2**31, (rows, 2), np.int32) for one, number, rows in items]
    return np.concatenate([np.zeros((0, 2), np.int32), *keys])


def _noise(seed: int, sample: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed << 32 | stream, sample]))


# Inputs of forwards that wait for their rank, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4
# Worker processes of a rank, if there are as many free cores.
WORKERS_PER_RANK = 2

# Arguments of ``SampleData.inputs`` for one chunk.
type Request = tuple[Any, ...]


class InlineLoader:
    """Makes inputs when they are taken; ``pins``: in memory that a GPU can copy from by itself."""

    def __init__(self, device: torch.device) -> None:
        self.pins = device.type == "cuda"

    def load(self, data: SampleData, requests: Sequence[Request]) -> Iterator[Inputs]:
        """Yield the inputs of chunks in order."""
        return (data.inputs(*request) for request in requests)


class ThreadLoader:
    """Makes inputs in one thread, at most ``ahead`` of the consumer."""

    def __init__(self, device: torch.device, ahead: int = LOAD_AHEAD) -> None:
        self.pins = device.type == "cuda"
        self._asked = SimpleQueue[Callable[[], Inputs] | None]()
        # One more is in the thread's hands.
        self._made = Queue[Inputs | Exception](max(1, ahead - 1))
        Thread(target=_make, args=(self._asked, self._made, device), name="load", daemon=True).start()
        finalize(self, self._asked.put, None)

    def load(self, data: SampleData, requests: Sequence[Request]) -> Iterator[Inputs]:
        """Yield the inputs of chunks in order; they are made as soon as earlier calls leave room."""
        for request in requests:
            self._asked.put(partial(data.inputs, *request))
        return (self._take() for _ in requests)

    def _take(self) -> Inputs:
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        return made


def _make(asked: SimpleQueue[Any], made: Queue[Inputs | Exception], device: torch.device) -> None:
    # A thread computes on the first GPU until it chooses; pinning memory would leave a context there.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (make := asked.get()) is not None:
        try:
            made.put(make())
        except Exception as error:
            made.put(error)


class _Requests(IterableDataset[Inputs | Failure]):
    """Inputs that the workers of a ``DataLoader`` make; each takes requests from its own queue."""

    def __init__(self, content: Content, num_workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.queues = [context.Queue() for _ in range(num_workers)]
        self._content = content

    def __iter__(self) -> Iterator[Inputs | Failure]:
        worker = get_worker_info()
        assert worker is not None
        while (asked := self.queues[worker.id].get()) is not None:
            shapes, request = asked
            made: Inputs | Failure
            try:
                made = SampleData(shapes, self._content).inputs(*request)
            except Exception as error:
                made = Failure.of(error, f"worker {worker.id}")
            yield made


class WorkerLoader:
    """Has the workers of torch's ``DataLoader`` make inputs, in turn; where ranks compute on a GPU, it pins them."""

    pins = False

    def __init__(self, device: torch.device, content: Content, num_workers: int, timeout_s: float) -> None:
        requests = _Requests(content, num_workers)
        # Forked: workers hold nothing but what their rank has loaded, and compute on no device.
        loader = DataLoader(
            requests,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=max(1, LOAD_AHEAD // num_workers),
            pin_memory=device.type == "cuda",
            timeout=timeout_s,
            worker_init_fn=lambda _: end_with_parent(),
            multiprocessing_context="fork",
        )
        self._made: Iterator[Any] = iter(loader)
        # As torch asks its workers.
        self._queues = cycle(requests.queues)
        # A worker that waits for a request would keep torch waiting for its end.
        finalize(self, _end_workers, requests.queues)

    def load(self, data: SampleData, requests: Sequence[Request]) -> Iterator[Inputs]:
        """Yield the inputs of chunks in order; raise what making them raised."""
        for request in requests:
            next(self._queues).put((data.shapes, request))
        return (self._take() for _ in requests)

    def _take(self) -> Inputs:
        made = next(self._made)
        if isinstance(made, Failure):
            raise made.as_error()
        assert isinstance(made, Inputs)
        return made


# Where inputs come from, in order; those of earlier calls of ``load`` must be taken first.
type Loader = InlineLoader | ThreadLoader | WorkerLoader


def make_loader(settings: TrainSettings, device: torch.device, content: Content) -> Loader:
    """Return the loader that ``harness.preprocessing`` names."""
    if settings.preprocessing == "inline":
        return InlineLoader(device)
    if settings.preprocessing == "thread":
        return ThreadLoader(device)
    return WorkerLoader(device, content, num_workers(settings), settings.timeout_s)


def num_workers(settings: TrainSettings) -> int:
    """Return the worker processes of a rank of this machine: as given, or as many as cores are free, one at least."""
    if settings.preprocessing_processes is not None:
        return settings.preprocessing_processes
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.num_ranks))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // ranks - 1, WORKERS_PER_RANK))


def _end_workers(queues: Sequence[Any]) -> None:
    for queue in queues:
        queue.put(None)
