"""Samples as a model's own processor makes them: token ids, labels, and the inputs of every image or sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from entrain_bench.base.arrays import IntArray
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes, shapes_from_lists
from entrain_bench.train.running.data import Inputs

UNLABELLED = -100  # label of tokens without a loss, as in torch's cross-entropy and transformers


@dataclass(frozen=True, slots=True)
class Item:
    """An image, video or sound: ``inputs`` of the encoder with one row each, and its tokens there and in the LLM."""

    modality: str
    inputs: Mapping[str, Tensor]
    encoder_tokens: int
    llm_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids and labels ``[tokens]``, where ``UNLABELLED`` has no loss; items in the order of their tokens."""

    ids: Tensor
    labels: Tensor
    items: tuple[Item, ...]

    @property
    def num_labelled(self) -> int:
        """Tokens that are predicted: the first one has no token before it."""
        return int((self.labels[1:] != UNLABELLED).sum())

    @property
    def sizes(self) -> Sizes:
        """All that balancing knows of the sample."""
        items = tuple((item.modality, item.encoder_tokens, item.llm_tokens) for item in self.items)
        return Sizes(len(self.ids) - sum(item.llm_tokens for item in self.items), items, self.num_labelled)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Text tokens, tokens of each item in encoder and LLM, and labeled tokens of a sample."""

    text_tokens: int
    items: tuple[tuple[str, int, int], ...]
    num_labelled: int


def shapes_of_sizes(sizes: Sequence[Sizes], modalities: Sequence[str], names: Sequence[int]) -> SampleShapes:
    """The shapes of samples; ``names`` are their identities."""
    shapes = shapes_from_lists(modalities, [(each.text_tokens, each.items) for each in sizes])
    return replace(shapes, sample_ids=np.array(names, np.int64))


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Samples padded on the right: ``ids``, ``mask`` and ``labels`` ``[samples, longest]``, and all items in order."""

    ids: Tensor
    mask: Tensor
    labels: Tensor
    items: tuple[Item, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> TokenBatch:
        """Pad to the longest."""
        longest = max(len(sample.ids) for sample in samples)

        def padded(rows: Sequence[Tensor], value: int) -> Tensor:
            return torch.stack([functional.pad(row, (0, longest - len(row)), value=value) for row in rows])

        ids = padded([sample.ids for sample in samples], 0)
        mask = padded([torch.ones_like(sample.ids) for sample in samples], 0)
        labels = padded([sample.labels for sample in samples], UNLABELLED)
        return cls(ids, mask, labels, tuple(item for sample in samples for item in sample.items))

    def on(self, device: torch.device, multiple: int = 1) -> TokenBatch:
        """The batch on a device, padded to a ``multiple`` of tokens."""
        more = -self.ids.shape[1] % multiple
        fills = (self.ids, 0), (self.mask, 0), (self.labels, UNLABELLED)
        ids, mask, labels = (functional.pad(tensor, (0, more), value=value).to(device) for tensor, value in fills)
        return TokenBatch(ids, mask, labels, self.items)


@dataclass(frozen=True, slots=True)
class ItemBatch:
    """Items of an encoder's chunk."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class HubData:
    """Data of one iteration's samples; ``content`` reads a sample by its position among the shapes."""

    shapes: SampleShapes
    content: Callable[[SampleShapes, int], Sample]
    num_loss_tokens: int

    def inputs(
        self,
        module: ModuleSpec,
        stage: int,  # noqa: ARG002
        members: IntArray,
        remade: int = 0,  # noqa: ARG002
        splits_backward: bool = False,  # noqa: ARG002
    ) -> Inputs:
        """Return a chunk of items (encoder) or samples (LLM); whole stages recompute, and no backward is split."""
        shapes = self.shapes
        if not module.is_encoder:
            return Inputs(TokenBatch.of([self.content(shapes, sample) for sample in members.tolist()]))
        samples = shapes.item_sample[members].tolist()
        numbers = (members - shapes.item_offsets[samples]).tolist()
        found = (self.content(shapes, s).items[number] for s, number in zip(samples, numbers, strict=True))
        return Inputs(ItemBatch(tuple(found)))


def joined_inputs(items: Sequence[Item], device: torch.device) -> dict[str, Tensor]:
    """The encoder's inputs of several items, one after another; fewer tiles than others have are filled up."""
    joined = {}
    for name in items[0].inputs:
        rows = [item.inputs[name] for item in items]
        if rows[0].dim() > 1 and len({row.shape[1:] for row in rows}) > 1:
            most = max(row.shape[1] for row in rows)
            rows = [functional.pad(row, (*(row.dim() - 2) * (0, 0), 0, most - row.shape[1])) for row in rows]
        joined[name] = torch.cat(rows).to(device)
    return joined
