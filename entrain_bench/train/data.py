"""Tensors of a chunk: features of items, text of samples, made up from the seed alone.

A sample is the same whatever batch, chunk or rank it is in, so all strategies train on the same data. Features are
standard normal, tokens uniform over the vocabulary; only their shapes come from the workload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from entrain_bench.arrays import IntArray
from entrain_bench.shapes import SampleShapes
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.modules import Pack, input_width


@dataclass(frozen=True, slots=True)
class SampleData:
    """Data of one iteration's samples."""

    shapes: SampleShapes
    seed: int
    vocab_size: int
    device: torch.device

    @property
    def num_loss_tokens(self) -> int:
        """Predicted tokens of the whole batch: text tokens that have a token before them."""
        starts_with_text = np.diff(self.shapes.item_offsets) == 0
        return int((self.shapes.text_tokens - (starts_with_text & (self.shapes.text_tokens > 0))).sum())

    def encoder_pack(self, items: IntArray) -> Pack:
        """Lengths of the given items."""
        shapes = self.shapes
        return Pack(tuple(shapes.item_encoder_tokens[items].tolist()), tuple(shapes.item_llm_tokens[items].tolist()))

    def features(self, module: ModuleSpec, items: IntArray) -> Tensor:
        """Input of an encoder for the given items ``[tokens, features]``, float32."""
        width = input_width(module)
        owner, rows = self.shapes.item_sample, []
        for item in items.tolist():
            sample = int(owner[item])
            number = item - int(self.shapes.item_offsets[sample])
            noise = self._noise(sample, 1 + number)
            size = (int(self.shapes.item_encoder_tokens[item]), width)
            rows.append(torch.from_numpy(noise.standard_normal(size, dtype=np.float32)))
        return torch.cat(rows).to(self.device)

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
        tensors = [torch.from_numpy(np.concatenate(rows)).to(self.device) for rows in (ids, labels)]
        return Pack(tuple(lengths.tolist()), (), *tensors)

    def _noise(self, sample: int, stream: int) -> np.random.Generator:
        identity = int(self.shapes.sample_ids[sample])
        return np.random.Generator(np.random.Philox(key=[(self.seed << 32) + stream, identity]))
