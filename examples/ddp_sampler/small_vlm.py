"""A vision-language model and samples for it, in plain PyTorch, as a training loop of your own would have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from entrain_bench import SampleShapes

PATCH_VALUES, VOCABULARY, MERGED_PATCHES = 48, 512, 4
# As in model/small_vlm.yaml.
IMAGE_WIDTH, TEXT_WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 128, 4, 2


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a dataset.

    Attributes:
        images: patches of each image ``[patches, values]``.
        text: token ids ``[tokens]``.
    """

    images: tuple[Tensor, ...]
    text: Tensor


class RandomContent(Dataset[Sample]):
    """Samples of given sizes, with content drawn by their index."""

    def __init__(self, shapes: SampleShapes) -> None:
        self._shapes = shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Sample:
        shapes, draw = self._shapes, torch.Generator().manual_seed(index)
        items = range(*shapes.item_offsets[index : index + 2].tolist())
        images = tuple(torch.randn(int(shapes.item_encoder_tokens[i]), PATCH_VALUES, generator=draw) for i in items)
        return Sample(images, torch.randint(VOCABULARY, (int(shapes.text_tokens[index]),), generator=draw))


class Block(nn.Module):
    """Attention within each sequence, then an MLP; sequences are packed behind one another."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, packed: Tensor, lengths: Sequence[int]) -> Tensor:
        """From and to ``[tokens, width]``."""
        attended = []
        for sequence in torch.split(self.qkv(self.norms[0](packed)), list(lengths)):
            query, key, value = sequence.view(len(sequence), 3, NUM_HEADS, -1).permute(1, 2, 0, 3).unsqueeze(1)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
            attended.append(mixed[0].transpose(0, 1).flatten(1))
        packed = packed + self.out(torch.cat(attended))
        changed: Tensor = self.mlp(self.norms[1](packed))
        return packed + changed


class SmallVlm(nn.Module):
    """An image encoder, its projector, and a causal LLM over image and text tokens, packed or padded to the longest."""

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.padded = padded
        self.patches = nn.Linear(PATCH_VALUES, IMAGE_WIDTH)
        self.encoder = nn.ModuleList([Block(IMAGE_WIDTH, causal=False) for _ in range(NUM_BLOCKS)])
        self.projector = nn.Linear(MERGED_PATCHES * IMAGE_WIDTH, TEXT_WIDTH)
        self.words = nn.Embedding(VOCABULARY, TEXT_WIDTH)
        self.llm = nn.ModuleList([Block(TEXT_WIDTH, causal=True) for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(TEXT_WIDTH, VOCABULARY)

    def forward(self, samples: Sequence[Sample]) -> Tensor:
        """Mean loss of each sample's text tokens ``[samples]``."""
        images = [image for sample in samples for image in sample.images]
        seen = iter(self._encode(images))
        rows = [torch.cat([*(next(seen) for _ in s.images), self.words(s.text)]) for s in samples]
        longest = max(len(row) for row in rows)
        if self.padded:
            # On the right, where a causal LLM's tokens do not see it.
            rows = [functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows]
        hidden, lengths = torch.cat(rows), [len(row) for row in rows]
        for block in self.llm:
            hidden = block(hidden, lengths)
        losses = []
        for sample, row in zip(samples, torch.split(hidden, lengths), strict=True):
            end = len(sample.text) + sum(len(image) // MERGED_PATCHES for image in sample.images)
            predicted = self.head(row[end - len(sample.text) : end - 1])
            losses.append(functional.cross_entropy(predicted, sample.text[1:]))
        # DDP waits for the gradient of every weight, also where a microbatch has no image.
        unused = sum(
            weight.sum() for part in (self.patches, self.encoder, self.projector) for weight in part.parameters()
        )
        return torch.stack(losses) + 0.0 * unused

    def _encode(self, images: Sequence[Tensor]) -> Sequence[Tensor]:
        """LLM tokens of each image ``[tokens, width]``."""
        if not images:
            return ()
        lengths = [len(image) for image in images]
        hidden = self.patches(torch.cat(list(images)))
        for block in self.encoder:
            hidden = block(hidden, lengths)
        merged = self.projector(hidden.unflatten(0, (-1, MERGED_PATCHES)).flatten(1))
        tokens: Sequence[Tensor] = torch.split(merged, [length // MERGED_PATCHES for length in lengths])
        return tokens
