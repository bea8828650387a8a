"""Sample shapes: all that balancing knows of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
        object.__setattr__(self, "_item_sample", owner)
        object.__setattr__(self, "_llm_tokens", self.text_tokens + projected.astype(np.int64))
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
        if wrong := np.flatnonzero((places != 0) & (places != self.item_encoder_tokens)).tolist():
            rows, columns = grids[wrong[0]].tolist()
            tokens = int(self.item_encoder_tokens[wrong[0]])
            raise UserError(f"sample shapes: an item of {tokens} encoder tokens has a grid of {rows} x {columns}")
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
        """LLM sequence length of each sample ``[samples]``: its text and the projected tokens of its items."""
        return self._llm_tokens

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
        items = self._items.get(names)
        if items is None:
            wanted = np.array([name in names for name in self.modalities], bool)
            items = self._items[names] = np.flatnonzero(wanted[self.item_modality])
            freeze(items)
        return items

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
        )


def shapes_from_lists(
    modalities: Sequence[str], samples: Sequence[tuple[int, Sequence[tuple[str, int, int]]]]
) -> SampleShapes:
    """Build shapes by hand: each sample is ``(text_tokens, [(modality, encoder_tokens, llm_tokens), ...])``."""
    items = [item for _, row in samples for item in row]
    return SampleShapes(
        tuple(modalities),
        np.arange(len(samples)),
        np.array([text for text, _ in samples], np.int64),
        offsets_from_counts(np.array([len(row) for _, row in samples], np.int64)),
        np.array([list(modalities).index(name) for name, _, _ in items], np.int64),
        np.array([tokens for _, tokens, _ in items], np.int64),
        np.array([tokens for _, _, tokens in items], np.int64),
    )


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
    counts = np.zeros(len(text), np.int64)
    for name, part in modalities.items():
        owned = int(np.sum(part.counts))
        require(len(part.counts) == len(text), f"{name}: counts", len(part.counts), f"of all {len(text)} samples")
        for tokens in (part.encoder_tokens, part.llm_tokens):
            require(len(tokens) == owned, f"{name}: items", len(tokens), f"{owned}, the sum of counts")
        counts += part.counts
    owners = [np.repeat(np.arange(len(text)), part.counts) for part in parts]
    order = np.argsort(_joined(owners), kind="stable")
    kinds = [np.full(len(part.llm_tokens), index) for index, part in enumerate(parts)]
    numbers, sample_names = _identities(sample_ids, len(text))
    return SampleShapes(
        tuple(modalities),
        numbers,
        text,
        offsets_from_counts(counts),
        _joined(kinds)[order],
        _joined([part.encoder_tokens for part in parts])[order],
        _joined([part.llm_tokens for part in parts])[order],
        sample_names,
        None if (grids := _grids([(part.grids, len(part.llm_tokens)) for part in parts])) is None else grids[order],
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


def _identities(given: IntArray | TextArray | None, num_samples: int) -> tuple[IntArray, TextArray | None]:
    """Numbers of samples, and names if strings are given."""
    if given is None:
        return np.arange(num_samples), None
    if given.dtype.kind in "iu":
        return given.astype(np.int64, copy=False), None
    return np.arange(num_samples), given.astype(np.object_)


def _names(shapes: SampleShapes) -> TextArray:
    return np.array([shapes.name_of(sample) for sample in range(len(shapes))], np.object_)


def _grids(parts: Sequence[tuple[IntArray | None, int]]) -> IntArray | None:
    """Grids of several items, 0 for those of a part that knows none; None if no part knows any."""
    if all(grids is None for grids, _ in parts):
        return None
    return np.concatenate([np.zeros((count, 2), np.int64) if grids is None else grids for grids, count in parts])


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
