"""Inputs of a chunk: features of items and text of samples, as stages take them.

A sample is the same whatever batch, chunk or rank it is in, so all strategies train on the same data. Made-up features
are expanded from the keys of their rows where they are needed: a number follows from its row's key and its column by
integer arithmetic alone, which wraps around at 32 bits on CPUs and GPUs alike. So hosts hand over eight bytes a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt, sqrt

import numpy as np
import torch
from torch import Tensor

from entrain_bench.base.arrays import IntArray
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.device import to_device
from entrain_bench.train.modules import Pack, in_stage_order, input_width
from entrain_bench.train.modules.positions import Picture, multimodal_positions
from entrain_bench.train.running.content import Content, MadeUp

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
        self, module: ModuleSpec, stage: int, members: IntArray, remade: int = 0, *, splits_backward: bool = False
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
        """Time, height and width of the LLM tokens of the given samples ``[3, tokens]``.

        A sample's neighbouring video items of one size are the frames of one video; audio counts as text does.
        """
        shapes = self.shapes
        positions = []
        for sample in samples.tolist():
            parts: list[int | Picture] = []
            before: Picture | None = None
            for item in range(int(shapes.item_offsets[sample]), int(shapes.item_offsets[sample + 1])):
                name = shapes.modalities[int(shapes.item_modality[item])]
                tokens = int(shapes.item_llm_tokens[item])
                if name == "audio":
                    parts.append(tokens)
                    before = None
                    continue
                picture = replace(self._picture(item, tokens), frame_step=llm.config.mrope_frame_step)
                if name == "video" and before == replace(picture, frames=before.frames if before else 0):
                    picture = replace(before, frames=before.frames + 1)
                    parts.pop()
                parts.append(picture)
                before = picture if name == "video" else None
            if text := int(shapes.text_tokens[sample]):
                parts.append(text)
            positions.append(multimodal_positions(parts))
        return torch.cat(positions, dim=1)

    def _picture(self, item: int, tokens: int) -> Picture:
        """Places of an item's LLM tokens: on its grid, or in rows of ceil(sqrt(tokens)) if that is not known."""
        grids = self.shapes.item_grids
        if grids is not None and grids[item, 0]:
            rows, columns = grids[item].tolist()
            merged = isqrt(int(self.shapes.item_encoder_tokens[item]) // tokens)
            if rows * columns == tokens * merged**2:
                return Picture(rows // merged, columns // merged)
        columns = isqrt(tokens - 1) + 1
        return Picture(-(-tokens // columns), columns, tokens=tokens)


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
