"""Conversations of a data set as training samples, by a model's own processor and chat template."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.errors import ExecutionError, require
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import stable_rng, stream_blocks
from entrain_bench.train.runner.families import Family
from entrain_bench.train.runner.samples import UNLABELLED, Sample, Sizes, shapes_of_sizes

SKIP, SUBSTITUTE, FAIL = ON_BAD_SAMPLE = ("skip", "substitute", "fail")
KEPT = 256  # processed samples that a rank remembers
ROLE = "assistant"
NOTHING = -1  # identity of a sample in the place of one that is skipped

type Message = Mapping[str, Any]


class Rows(Protocol):
    """A data set with numbered rows, as Hugging Face's."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int, /) -> Any:
        """A row."""


def messages_of(row: Any) -> list[Message]:
    """The conversation of a row: its ``messages``, whose image parts without an image take the next of ``images``."""
    images = iter(row.get("images") or ())

    def filled(part: Mapping[str, Any]) -> dict[str, Any]:
        # Data sets of Arrow give every part all keys of the others.
        given = {key: value for key, value in part.items() if value is not None}
        is_open = given["type"] == "image" and not {"image", "url", "path"} & given.keys()
        return given | {"image": next(images)} if is_open else given

    return [
        {**message, "content": [filled(part) for part in message["content"]]}
        if not isinstance(message["content"], str)
        else message
        for message in row["messages"]
    ]


class Chats:
    """Samples of a data set in a new random order every epoch.

    ``messages`` turns a row into a conversation as ``processor.apply_chat_template`` takes it, with images and sounds
    in the contents (default: ``messages_of``). Only tokens of answers are labeled. A row that cannot be read or has no
    answer is bad: ``on_bad_sample`` skips it, takes the next readable row in its place, or fails. For a skipped row the
    batch has a token without a label, so it stays full. All ranks decide the same; ``counts`` says how often.
    """

    def __init__(
        self,
        rows: Rows,
        processor: Any,
        messages: Callable[[Any], Sequence[Message]] | None = None,
        on_bad_sample: str = FAIL,
    ) -> None:
        require(on_bad_sample in ON_BAD_SAMPLE, "on_bad_sample", on_bad_sample, f"one of {', '.join(ON_BAD_SAMPLE)}")
        self.rows = rows
        self.processor = processor
        self.on_bad_sample = on_bad_sample
        self.messages = messages or messages_of
        self.counts: Counter[str] = Counter()
        self._family: Family | None = None
        self._kept: OrderedDict[int, Sample] = OrderedDict()
        self._labelled: dict[int, int] = {}

    def bind(self, family: Family) -> None:
        """Take the names of a model's parts."""
        self._family = family

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """The sizes of a batch, of which every rank processes a part; collective.

        ``ExecutionError`` on all ranks for a bad sample with ``fail``, or if no sample is good.
        """
        blocks = stream_blocks(iteration, num_samples, seed, len(self.rows))
        names = [
            int(name)
            for epoch, low, high in blocks
            for name in stable_rng("rows", seed, epoch).permutation(len(self.rows))[low:high]
        ]
        sizes = self._sizes(names)
        tried = 0
        while bad := {name: size for name, size in zip(names, sizes, strict=True) if isinstance(size, str)}:
            name, cause = next(iter(bad.items()))
            if self.on_bad_sample == FAIL:
                raise ExecutionError(
                    f"row {name}: {cause}. To continue without it, use on_bad_sample={SKIP} or {SUBSTITUTE}"
                )
            tried += 1
            if len(bad) == len(names) and (self.on_bad_sample == SKIP or tried > len(self.rows)):
                raise ExecutionError(f"iteration {iteration}: no row can be read ({cause})")
            self.counts[self.on_bad_sample] += sum(isinstance(size, str) for size in sizes)
            instead = {name: NOTHING if self.on_bad_sample == SKIP else (name + 1) % len(self.rows) for name in bad}
            found = dict(zip(instead.values(), self._sizes([*instead.values()]), strict=True))
            sizes = [found[instead[name]] if name in bad else size for name, size in zip(names, sizes, strict=True)]
            names = [instead.get(name, name) for name in names]
        known = [size for size in sizes if not isinstance(size, str)]
        self._labelled = {name: size.num_labelled for name, size in zip(names, known, strict=True)}
        modalities = dict.fromkeys([self.family.modality, *(item[0] for size in known for item in size.items)])
        return shapes_of_sizes(known, [*modalities], names)

    @property
    def family(self) -> Family:
        """The model's parts; known once a runner has taken the samples."""
        assert self._family is not None, "ProgramRunner binds its samples"
        return self._family

    def num_labelled(self, shapes: SampleShapes) -> int:
        """Labeled tokens of the last batch."""
        return sum(self._labelled[int(name)] for name in shapes.sample_ids)

    def sample(self, identity: int) -> Sample:
        """A processed row; raises the error of reading it."""
        if identity == NOTHING:
            return Sample(torch.zeros(1, dtype=torch.int64), torch.full((1,), UNLABELLED), ())
        if identity not in self._kept:
            self._kept[identity] = self._processed(self.rows[identity])
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[identity]

    def _sizes(self, names: Sequence[int]) -> list[Sizes | str]:
        """Sizes of rows, or why one is bad, on all ranks."""
        ranks = dist.get_world_size()
        mine = [self._size(name) for name in names[dist.get_rank() :: ranks]]
        everyone: list[list[Sizes | str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(everyone, mine)
        return [everyone[place % ranks][place // ranks] for place in range(len(names))]

    def _size(self, name: int) -> Sizes | str:
        try:
            sizes = self.sample(name).sizes
        # Decoders and processors raise errors of any kind for a bad row.
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return sizes if sizes.num_labelled or name == NOTHING else "no answer has a token"

    def _processed(self, row: Any) -> Sample:
        messages = [*self.messages(row)]
        encoded = self.processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        return self.family.sample(encoded, self._labels(messages, encoded["input_ids"][0]))

    def _labels(self, messages: Sequence[Message], ids: Tensor) -> Tensor:
        """Labels of answers, each with the mark of its end; found by the tokens that open an answer.

        ``ValueError`` if a template writes an answer in another way than alone.
        """
        labels = torch.full_like(ids, UNLABELLED)
        place = 0
        for turn, message in enumerate(messages):
            if message["role"] != ROLE:
                continue
            before = self._text(messages[:turn])
            opening = self._text(messages[:turn], add_generation_prompt=True)
            whole = self._text(messages[: turn + 1])
            if not (opening.startswith(before) and whole.startswith(opening)):
                raise ValueError("the chat template writes an answer otherwise than after its opening")
            head = self._tokens(opening[len(before) :])
            answer = self._tokens(whole[len(before) :])
            found = _find(ids, answer, place)
            labels[found + len(head) : found + len(answer)] = ids[found + len(head) : found + len(answer)]
            place = found + len(answer)
        return labels

    def _text(self, messages: Sequence[Message], **options: Any) -> str:
        return str(self.processor.apply_chat_template([*messages], tokenize=False, **options))

    def _tokens(self, text: str) -> Tensor:
        return torch.tensor(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)


def _find(ids: Tensor, part: Tensor, place: int) -> int:
    """The first place of tokens among others; ``ValueError`` if there is none."""
    windows = ids[place:].unfold(0, len(part), 1) if len(ids) - place >= len(part) else ids.new_empty(0, len(part))
    matches = (windows == part).all(1).nonzero()
    if not len(matches):
        raise ValueError("the tokens of an answer are not those of the whole conversation")
    return place + int(matches[0])
