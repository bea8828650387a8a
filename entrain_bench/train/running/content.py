"""What stands in the samples that shapes describe: features of items and tokens of text, without torch.

Content travels to the processes that make inputs: it is frozen, made of plain values, and opens what it reads where it
is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from entrain_bench.arrays import IntArray
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.running.row_keys import row_keys

type Features = NDArray[np.float32]


class Content(Protocol):
    """Features and tokens of samples, the same whatever batch, chunk, rank or process asks for them."""

    def features(self, module: ModuleSpec, shapes: SampleShapes, items: IntArray, out: Features) -> None:
        """Write the input of an encoder for some items, one after the other, each in its natural order.

        The natural order of a picture's patches is that before ``in_stage_order``: block by block, row by row.

        Args:
            module: the encoder.
            shapes: of the samples.
            items: numbers of items of ``shapes``.
            out: ``[sum of their encoder tokens, input width]``.

        Raises:
            UserError: naming a sample that cannot be read or is not what the shapes say.
        """
        ...

    def tokens(self, shapes: SampleShapes, sample: int) -> IntArray:
        """Token ids of the text of a sample of ``shapes`` ``[text tokens]``, int64.

        Raises:
            UserError: as ``features``.
        """
        ...


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Content made up from the seed and the sample's identity alone.

    Features are uniform with mean 0 and variance 1, and made where they are used, of the keys of their rows
    (``made_up``); tokens are uniform over the vocabulary.

    Attributes:
        seed: of the content.
        vocab_size: of the LLM.
    """

    seed: int
    vocab_size: int

    def row_keys(self, shapes: SampleShapes, items: IntArray) -> NDArray[np.int32]:
        """Keys of the rows of some items, one after the other, each in its natural order ``[encoder tokens, 2]``."""
        samples = shapes.item_sample[items]
        numbers = items - shapes.item_offsets[samples]
        return row_keys(self.seed, shapes.sample_ids[samples], numbers, shapes.item_encoder_tokens[items])

    def tokens(self, shapes: SampleShapes, sample: int) -> IntArray:
        """Uniform tokens."""
        noise = np.random.Generator(np.random.Philox(key=[self.seed << 32, int(shapes.sample_ids[sample])]))
        return noise.integers(self.vocab_size, size=int(shapes.text_tokens[sample]))
