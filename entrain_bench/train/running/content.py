"""Content of the samples that shapes describe: features of items and tokens of text, without torch.

Content travels to the processes that make inputs: it is frozen, made of plain values, and opens what it reads where it
is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.specs.contents import SOUND_HZ, Moved, Readable, Samples
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.workload import Workload
from entrain_bench.train.features.pictures import PatchRules, write_patches
from entrain_bench.train.features.sounds import FRAMES_OF_TOKEN, HOP, KERNEL, write_windows
from entrain_bench.train.settings import FILES, MADE_UP, TrainSettings

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
        """Write the input of an encoder for some items: patches of images and frames, windows of log-mel frames.

        One item after the other, each in its natural order: that of a picture's patches is the one before
        ``in_stage_order``, block by block, row by row. ``out`` is ``[sum of their encoder tokens, input width]``.

        Raises:
            UserError: naming a sample that cannot be read or is not what the shapes say.
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
    """Keys of rows ``[sum(lengths), 2]``, 64 bits each, which ``made_up_features`` expands on a device.

    Items are those of ``numbers`` in ``samples``, with ``lengths`` rows each ``[items]``.
    """
    items = zip(samples.tolist(), numbers.tolist(), lengths.tolist(), strict=True)
    keys = [_noise(seed, one, 1 + number).integers(-(2**31), 2**31, (rows, 2), np.int32) for one, number, rows in items]
    return np.concatenate([np.zeros((0, 2), np.int32), *keys])


def _noise(seed: int, sample: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed << 32 | stream, sample]))
