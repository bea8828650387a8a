"""Inputs of a chunk: features of items, text of samples, made up from the seed alone.

A sample is the same whatever batch, chunk or rank it is in, so all strategies train on the same data. Features are
uniform with mean 0 and variance 1, which are drawn several times faster than normal ones; tokens are uniform over the
vocabulary. Only shapes come from the workload.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from entrain_bench.arrays import IntArray
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.modules import Pack, input_width


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the forward of a chunk needs of its samples, on the CPU.

    Attributes:
        pack: the sequences.
        features: for the first stage of an encoder ``[tokens, input width]``.
    """

    pack: Pack
    features: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampleData:
    """Data of one iteration's samples.

    Attributes:
        shapes: of the samples.
        seed: of their content.
        vocab_size: of the LLM.
        pinned: whether features are in memory that a GPU can copy from by itself.
    """

    shapes: SampleShapes
    seed: int
    vocab_size: int
    pinned: bool = False

    @property
    def num_loss_tokens(self) -> int:
        """Predicted tokens of the whole batch: text tokens that have a token before them."""
        starts_with_text = np.diff(self.shapes.item_offsets) == 0
        return int((self.shapes.text_tokens - (starts_with_text & (self.shapes.text_tokens > 0))).sum())

    def inputs(
        self, module: ModuleSpec, stage: int, members: IntArray, remade: int = 0, *, splits_backward: bool = False
    ) -> Inputs:
        """What a stage of a module needs for a chunk of the given items (encoder) or samples (LLM).

        Args:
            module: the module.
            stage: which of its stages.
            members: items or samples.
            remade: blocks of the stage that the chunk recomputes.
            splits_backward: whether gradients of weights have a pass of their own.
        """
        pack = self.encoder_pack(members) if module.is_encoder else self.llm_pack(members)
        pack = replace(pack, remade=remade, splits_backward=splits_backward)
        return Inputs(pack, self.features(module, members) if module.is_encoder and not stage else None)

    def encoder_pack(self, items: IntArray) -> Pack:
        """Lengths of the given items."""
        shapes = self.shapes
        return Pack(tuple(shapes.item_encoder_tokens[items].tolist()), tuple(shapes.item_llm_tokens[items].tolist()))

    def features(self, module: ModuleSpec, items: IntArray) -> Tensor:
        """Input of an encoder for the given items ``[tokens, input width]``, float32, on the CPU."""
        samples, lengths = self.shapes.item_sample[items], self.shapes.item_encoder_tokens[items]
        numbers = items - self.shapes.item_offsets[samples]
        size = (int(lengths.sum()), input_width(module))
        features = torch.empty(size, dtype=torch.float32, pin_memory=self.pinned)
        for rows, sample, number in zip(
            torch.split(features, lengths.tolist()), samples.tolist(), numbers.tolist(), strict=True
        ):
            values = rows.numpy()
            self._noise(sample, 1 + number).random(out=values, dtype=np.float32)
            values -= 0.5
            values *= sqrt(12)
        return features

    def llm_pack(self, samples: IntArray) -> Pack:
        """Tokens and labels of the given samples: the items' projected tokens, then the text, which is predicted."""
        shapes, ids, labels = self.shapes, [], []
        lengths = shapes.llm_tokens[samples]
        for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True):
            num_text = int(shapes.text_tokens[sample])
            row = np.full(length, -1, np.int64)
            row[length - num_text :] = self._noise(sample, 0).integers(self.vocab_size, size=num_text)
            ids.append(row)
            labels.append(np.append(row[1:], -1))
        token_ids, targets = (torch.from_numpy(np.concatenate(rows)) for rows in (ids, labels))
        return Pack(tuple(lengths.tolist()), (), token_ids, targets)

    def _noise(self, sample: int, stream: int) -> np.random.Generator:
        identity = int(self.shapes.sample_ids[sample])
        return np.random.Generator(np.random.Philox(key=[(self.seed << 32) + stream, identity]))
