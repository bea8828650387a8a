"""Sample shapes: all that balancing knows of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, TextArray, freeze, offsets_from_counts, rows_of, take_rows
from entrain_bench.base.errors import UserError, require


@dataclass(frozen=True, slots=True)
class SampleShapes:
    """Sizes of a set of samples as a struct of arrays; a sample's items, any number or none, are one CSR row."""

    modalities: tuple[str, ...]
    sample_ids: IntArray  # identity of each sample in its workload [samples]
    text_tokens: IntArray  # [samples]
    item_offsets: IntArray  # CSR row offsets of the items [samples + 1]
    item_modality: IntArray  # index into modalities [items]
    item_encoder_tokens: IntArray  # inside the encoder [items]
    item_llm_tokens: IntArray  # projected tokens handed to the LLM [items]
    sample_names: TextArray | None = None  # in messages [samples]; None: their identities
    item_grids: IntArray | None = None  # rows and columns of encoder tokens [items, 2], 0 if unknown; for training only
    padding_tokens: IntArray | None = None  # that a sample's LLM sequence is longer [samples]; None: no padding
    _item_sample: IntArray = field(init=False, repr=False, compare=False)
    _llm_tokens: IntArray = field(init=False, repr=False, compare=False)
    _items: dict[tuple[str, ...], IntArray] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        items = len(self.item_modality)
        names = self.sample_ids if self.sample_names is None else self.sample_names
        offsets = self.item_offsets
        item_columns = len(self.item_encoder_tokens), len(self.item_llm_tokens), items
        sample_columns = len(self.text_tokens), len(names), len(offsets) - 1, len(self.sample_ids)
        if len({*item_columns}) > 1 or (self.item_grids is not None and self.item_grids.shape != (items, 2)):
            raise UserError("sample shapes: item columns differ in length")
        if len({*sample_columns}) > 1:
            raise UserError("sample shapes: sample columns differ in length")
        if offsets[0] != 0 or offsets[-1] != items or np.any(np.diff(offsets) < 0):
            raise UserError("sample shapes: item offsets must rise from 0 to the number of items")
        for name, least in (("text_tokens", 0), ("item_encoder_tokens", 1), ("item_llm_tokens", 1)):
            smallest = getattr(self, name).min(initial=least)
            require(smallest >= least, f"sample shapes: {name}", smallest, f"at least {least}")
        owner = rows_of(self.item_offsets)
        projected = np.bincount(owner, weights=self.item_llm_tokens, minlength=len(self))
        llm_tokens = self.text_tokens + projected.astype(np.int64)
        if self.padding_tokens is not None:
            llm_tokens = llm_tokens + self.padding_tokens
        object.__setattr__(self, "_item_sample", owner)
        object.__setattr__(self, "_llm_tokens", llm_tokens)
        freeze(self._item_sample, self._llm_tokens)
        empty = np.flatnonzero(self.llm_tokens == 0)
        if empty.size:
            raise UserError(f"sample {self.name_of(empty[0])}: has neither text nor items")
        if self.item_grids is not None:
            self._check_grids(self.item_grids)
        freeze(self.sample_ids, self.text_tokens, self.item_offsets, self.item_modality)
        freeze(self.item_encoder_tokens, self.item_llm_tokens)

    def _check_grids(self, grids: IntArray) -> None:
        places = grids.prod(axis=1)
        for wrong in np.flatnonzero((places != 0) & (places != self.item_encoder_tokens))[:1]:
            grid = f"a grid of {grids[wrong, 0]} x {grids[wrong, 1]}"
            raise UserError(f"sample shapes: an item of {self.item_encoder_tokens[wrong]} encoder tokens has {grid}")
        freeze(grids)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def name_of(self, sample: int | np.integer) -> str:
        """Return the name of a sample in messages, by its index."""
        return str((self.sample_ids if self.sample_names is None else self.sample_names)[sample])

    @property
    def num_items(self) -> int:
        """Number of items of all samples."""
        return len(self.item_modality)

    @property
    def item_sample(self) -> IntArray:
        """Index of the sample that owns each item ``[items]``."""
        return self._item_sample

    @property
    def llm_tokens(self) -> IntArray:
        """LLM sequence length of each sample ``[samples]``: its text, the projected tokens of its items, padding."""
        return self._llm_tokens

    @property
    def unpadded(self) -> SampleShapes:
        """Return the samples without padding."""
        return self if self.padding_tokens is None else replace(self, padding_tokens=None)

    @property
    def labelled_tokens(self) -> IntArray:
        """Tokens of each sample that have a label ``[samples]``: as many as text tokens with a token before them."""
        starts_with_text = np.diff(self.item_offsets) == 0
        return np.asarray(self.text_tokens - (starts_with_text & (self.text_tokens > 0)))

    def encoder_tokens(self, modalities: Sequence[str]) -> IntArray:
        """Encoder tokens of each sample over the given modalities ``[samples]``."""
        chosen = self.items_of(modalities)
        weights = self.item_encoder_tokens[chosen]
        return np.bincount(self.item_sample[chosen], weights=weights, minlength=len(self)).astype(np.int64)

    def items_of(self, modalities: Sequence[str]) -> IntArray:
        """Indices of the items of the given modalities, in order; read-only."""
        names = tuple(modalities)
        if names not in self._items:
            wanted = np.array([name in names for name in self.modalities], bool)
            self._items[names] = np.flatnonzero(wanted[self.item_modality])
            freeze(self._items[names])
        return self._items[names]

    def sum_items(self, items: IntArray, values: FloatArray) -> FloatArray:
        """Sum values given for some items over the samples that own them ``[samples]``."""
        return np.bincount(self.item_sample[items], weights=values, minlength=len(self))

    def take(self, samples: IntArray) -> SampleShapes:
        """The chosen samples, in the given order; an index may repeat."""
        offsets, items = take_rows(self.item_offsets, np.asarray(samples))
        return SampleShapes(
            self.modalities,
            self.sample_ids[samples],
            self.text_tokens[samples],
            offsets,
            self.item_modality[items],
            self.item_encoder_tokens[items],
            self.item_llm_tokens[items],
            None if self.sample_names is None else self.sample_names[samples],
            None if self.item_grids is None else self.item_grids[items],
            None if self.padding_tokens is None else self.padding_tokens[samples],
        )


def shapes_from_lists(
    modalities: Sequence[str], samples: Sequence[tuple[int, Sequence[tuple[str, int, int]]]]
) -> SampleShapes:
    """Build shapes by hand: each sample is ``(text_tokens, [(modality, encoder_tokens, llm_tokens), ...])``."""
    items = [(list(modalities).index(name), *tokens) for _, row in samples for name, *tokens in row]
    columns = np.array(items, np.int64).reshape(len(items), 3).T.copy()
    text_tokens = np.array([text for text, _ in samples], np.int64)
    counts = np.array([len(row) for _, row in samples], np.int64)
    return SampleShapes(tuple(modalities), np.arange(len(samples)), text_tokens, offsets_from_counts(counts), *columns)


@dataclass(frozen=True, slots=True)
class Items:
    """Items of one modality, grouped by sample."""

    counts: IntArray  # items of each sample [samples]
    encoder_tokens: IntArray  # inside the encoder [items]
    llm_tokens: IntArray  # projected tokens handed to the LLM [items]
    grids: IntArray | None = None  # rows and columns of the encoder tokens [items, 2], if known


def shapes_of(
    text_tokens: IntArray, modalities: Mapping[str, Items], sample_ids: IntArray | TextArray | None = None
) -> SampleShapes:
    """Return the shapes of samples with items of several modalities; ``sample_ids`` are by default row numbers."""
    text = np.asarray(text_tokens, np.int64)
    parts = list(modalities.values())
    for name, part in modalities.items():
        owned = int(np.sum(part.counts))
        require(len(part.counts) == len(text), f"{name}: counts", len(part.counts), f"of all {len(text)} samples")
        for tokens in (part.encoder_tokens, part.llm_tokens):
            require(len(tokens) == owned, f"{name}: items", len(tokens), f"{owned}, the sum of counts")
    owner = _joined([np.repeat(np.arange(len(text)), part.counts) for part in parts])
    order = np.argsort(owner, kind="stable")
    kinds = [np.full(len(part.llm_tokens), index) for index, part in enumerate(parts)]
    grids = _grids([(part.grids, len(part.llm_tokens)) for part in parts])
    numbers = np.arange(len(text)) if sample_ids is None else sample_ids
    named = numbers.dtype.kind not in "iu"
    return SampleShapes(
        tuple(modalities),
        np.arange(len(text)) if named else numbers.astype(np.int64, copy=False),
        text,
        offsets_from_counts(np.bincount(owner, minlength=len(text))),
        _joined(kinds)[order],
        _joined([part.encoder_tokens for part in parts])[order],
        _joined([part.llm_tokens for part in parts])[order],
        numbers.astype(np.object_) if named else None,
        None if grids is None else grids[order],
    )


def concatenate(parts: Sequence[SampleShapes]) -> SampleShapes:
    """The samples of several shapes with the same modalities, one after another."""
    return SampleShapes(
        parts[0].modalities,
        _joined([part.sample_ids for part in parts]),
        _joined([part.text_tokens for part in parts]),
        offsets_from_counts(_joined([np.diff(part.item_offsets) for part in parts])),
        _joined([part.item_modality for part in parts]),
        _joined([part.item_encoder_tokens for part in parts]),
        _joined([part.item_llm_tokens for part in parts]),
        np.concatenate([_names(part) for part in parts])
        if any(part.sample_names is not None for part in parts)
        else None,
        _grids([(part.item_grids, part.num_items) for part in parts]),
    )


def _names(shapes: SampleShapes) -> TextArray:
    return np.array([shapes.name_of(sample) for sample in range(len(shapes))], np.object_)


def _grids(parts: Sequence[tuple[IntArray | None, int]]) -> IntArray | None:
    """Grids of several items, 0 for those of a part that knows none; None if no part knows any."""
    if all(grids is None for grids, _ in parts):
        return None
    return np.concatenate([np.zeros((count, 2), np.int64) if grids is None else grids for grids, count in parts])


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
