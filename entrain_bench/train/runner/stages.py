"""Stages of a Hugging Face model: its own forward, of which only a stage's blocks run, by a rank that holds no others.

Blocks before the stage return their input. The first block of the stage takes the states that the stage before sent,
and the first block after it ends the forward. Masks, positions and indices of layers are therefore the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import Parameter, functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from entrain_bench.base.errors import UserError
from entrain_bench.train.runner.families import Family
from entrain_bench.train.runner.samples import UNLABELLED, Item, ItemBatch, TokenBatch

SHARED = "entrain_bench_shared"  # name of the attention of ranks that share sequences


class _Left(Exception):  # noqa: N818
    """Ends a forward at the block after a stage, whose input it carries."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass(frozen=True, slots=True)
class Share:
    """Ranks that compute chunks together: every ``count``-th token from ``index`` on is this one's."""

    group: dist.ProcessGroup
    index: int
    count: int

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's tokens."""
        return whole[(slice(None),) * (dim % whole.dim()) + (slice(self.index, None, self.count),)]

    def join(self, own: Tensor, dim: int) -> Tensor:
        """All ranks' tokens, in order; backward adds up the gradients of each."""
        gathered = all_gather_tensor_autograd(own.unsqueeze(0).contiguous(), 0, self.group)
        joined: Tensor = gathered.movedim(0, dim + 1).flatten(dim, dim + 1)
        return joined

    def only_own(self, gradient: Tensor) -> Tensor:
        """A gradient without the rows that other ranks start from."""
        own = torch.zeros_like(gradient)
        own[self.index :: self.count] = gradient[self.index :: self.count]
        return own


@dataclass(slots=True)
class _Run:
    """The stage that a forward runs: blocks from ``start`` to ``stop``, with states and taps of the stage before."""

    start: int
    stop: int
    is_last: bool
    received: Tensor | None = None
    tapped: dict[int, Tensor] = field(default_factory=dict)
    share: Share | None = None
    joined_until: int = 0  # blocks before it are followed by work on all tokens
    recomputes: bool = False
    seen: dict[int, Tensor] = field(default_factory=dict)
    is_cut: bool = False


_RUN: ContextVar[_Run] = ContextVar("run")


@contextmanager
def _running(run: _Run) -> Iterator[None]:
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def _shared_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Attention of this rank's queries to the keys and values of all ranks of a share."""
    run = _RUN.get(None)
    if run is not None and (share := run.share) is not None:
        key, value = share.join(key, 2), share.join(value, 2)
        if mask is None:
            mask = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()[None, None]
        mask = share.cut(mask, 2)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)


AttentionInterface.register(SHARED, _shared_attention)
AttentionMaskInterface.register(SHARED, sdpa_mask)


class Stages:
    """Makes stages of one model, whose blocks it wraps."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.model = family.model
        self.blocks = {True: family.part(family.blocks), False: family.part(f"{family.text}.layers")}
        self.tied = self._tied()
        for blocks in self.blocks.values():
            for index, block in enumerate(blocks):
                block.forward = _passing(index, len(blocks), block.forward)
        for name, part in self.model.named_modules():
            if isinstance(part, nn.ModuleList) and name in family.after:
                # DeepStack's mergers run between blocks, but belong to the last stage.
                for merger in part:
                    merger.forward = _only_in_last(merger.forward)

    def _tied(self) -> str | None:
        """The name of the words' embedding if the head has the same weight."""
        words = self.model.get_input_embeddings().weight
        if self.model.get_output_embeddings().weight is not words:
            return None
        names = (str(name) for name, parameter in self.model.named_parameters() if parameter is words)
        return next(names)

    def stage(self, layers: range, *, is_encoder: bool) -> Stage:
        """A stage by its layers: 0 is the embedding, the last one follows all blocks."""
        return Stage(self, layers, is_encoder=is_encoder)

    def names(self, layers: range, *, is_encoder: bool) -> list[str]:
        """Parameters of layers, by the model's names."""
        blocks = self.blocks[is_encoder]
        last = len(blocks) + 1
        names = []
        for name, _ in self.model.named_parameters():
            if _within(name, self.family.encoder) != is_encoder:
                continue
            prefix = f"{self.family.blocks if is_encoder else f'{self.family.text}.layers'}."
            after = self.family.after if is_encoder else (f"{self.family.text}.norm", "lm_head")
            if name.startswith(prefix):
                layer = 1 + int(name.removeprefix(prefix).partition(".")[0])
            else:
                layer = last if _within(name, after) else 0
            if layer in layers or (name == self.tied and last in layers):
                names.append(name)
        return names

    def carried(self, block: int, *, is_encoder: bool) -> list[int]:
        """Features that stages hand on: taps of the encoder, or numbers of those that the LLM still adds."""
        if is_encoder:
            return [tap for tap in self.family.taps if tap < block - 1]
        return [*range(block, self.family.depth)]

    def keep(self, stages: Sequence[Stage]) -> None:
        """Free all weights but those of some stages; an encoder's embedding stays, for its shapes."""
        kept = {name for stage in stages for name in stage.names}
        if any(stage.is_encoder for stage in stages):
            kept |= {*self.names(range(1), is_encoder=True)}
        for name, parameter in self.model.named_parameters():
            if name not in kept:
                parameter.data = parameter.data.new_empty(0)
                parameter.requires_grad_(False)

    def share_sequences(self) -> None:
        """Let attention of the LLM see all tokens of ranks that share them; ``UserError`` for another kernel."""
        config = self.family.part(self.family.text).config
        kernel = config._attn_implementation
        if kernel not in ("sdpa", SHARED):
            raise UserError(f"attn_implementation={kernel}: ranks share sequences (layout.cp, widths) only with sdpa")
        config._attn_implementation = SHARED


class Stage(nn.Module):
    """Consecutive layers of encoder or LLM: ``stage(hidden, batch, share)`` on rows of all tokens of a chunk.

    ``hidden`` are states of the stage before ``[tokens, width]``, projected tokens of all items of an LLM's chunk, or
    None. Returns such states, an encoder's projected tokens, or the LLM's summed loss of this rank's tokens.
    """

    recomputes = False
    passes_gradients = True

    def __init__(self, stages: Stages, layers: range, *, is_encoder: bool) -> None:
        super().__init__()
        self._stages = stages
        self.is_encoder = is_encoder
        self.names = stages.names(layers, is_encoder=is_encoder)
        self.num_blocks = len(stages.blocks[is_encoder])
        self.is_first = layers.start == 0
        self.is_last = layers.stop == self.num_blocks + 2
        self.start = max(layers.start - 1, 0)
        self.stop = min(layers.stop - 1, self.num_blocks)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Parameter]]:
        """Parameters by the model's names."""
        return ((name, self._stages.model.get_parameter(name)) for name in self.names)

    def held_blocks(self) -> Sequence[nn.Module]:
        """The stage's blocks."""
        return [*self._stages.blocks[self.is_encoder][self.start : self.stop]]

    def _carried(self, block: int) -> list[int]:
        return self._stages.carried(block, is_encoder=self.is_encoder)

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""
        return self._stages.model.device  # type: ignore[no-any-return]

    def blank(self, rows: int) -> Tensor:
        """Projected tokens without content, as an LLM's first stage takes them."""
        width = self._stages.family.config.get_text_config().hidden_size * (1 + self._stages.family.depth)
        return torch.zeros(rows, width, dtype=self._stages.model.dtype, device=self.device)

    def forward(self, hidden: Tensor | None, batch: TokenBatch | ItemBatch, share: Share | None = None) -> Tensor:
        """Run the stage."""
        if isinstance(batch, TokenBatch):
            return self._run_text(hidden, batch.on(self.device, share.count if share else 1), share)
        return self._run_encoder(hidden, batch.items)

    def _run_encoder(self, hidden: Tensor | None, items: Sequence[Item]) -> Tensor:
        run = _Run(self.start, self.stop, self.is_last, recomputes=self.recomputes)
        if not self.is_first:
            assert hidden is not None
            run.received, *taps = hidden.chunk(1 + len(self._carried(self.start)), 1)
            run.tapped = dict(zip(self._carried(self.start), taps, strict=True))
        device = self._stages.model.device
        with _running(run):
            if self.is_last:
                return self._stages.family.features(items, device)
            try:
                self._stages.family.features(items, device)
            except _Left as left:
                run.seen |= run.tapped
                columns = [left.hidden, *(run.seen[tap] for tap in self._carried(self.stop))]
                return torch.cat([column.reshape(-1, column.shape[-1]) for column in columns], 1)
        raise AssertionError("an encoder ended before its last block")

    def _run_text(self, hidden: Tensor | None, batch: TokenBatch, share: Share | None) -> Tensor:
        family = self._stages.family
        run = _Run(
            self.start,
            self.stop,
            self.is_last,
            share=share,
            joined_until=family.depth,
            recomputes=self.recomputes,
        )
        rows = batch.mask.bool()
        wanted = family.is_placeholder(batch.ids)
        added: dict[int, Tensor] = {}
        if self.is_first:
            # Some placeholders are no words.
            embeds = self._stages.model.get_input_embeddings()(batch.ids.masked_fill(wanted, 0))
            if hidden is not None and len(hidden):
                first, *rest = hidden.chunk(1 + family.depth, 1)
                embeds = embeds.masked_scatter(wanted[..., None], first.to(embeds.dtype))
                added = dict(enumerate(rest))
        else:
            assert hidden is not None
            first, *rest = hidden.chunk(1 + len(self._carried(self.start)), 1)
            embeds = first.new_zeros(*batch.ids.shape, first.shape[1])
            run.received = embeds.masked_scatter(rows[..., None], first)
            added = {number: each[wanted[rows]] for number, each in zip(self._carried(self.start), rest, strict=True)}
        options = family.text_inputs(batch, embeds)
        if added:
            blank = next(iter(added.values())).detach() * 0
            options |= {
                "visual_pos_masks": wanted,
                "deepstack_visual_embeds": [added.get(number, blank) for number in range(family.depth)],
            }
        text = family.part(family.text)
        with _running(run):
            try:
                states = text(inputs_embeds=embeds, use_cache=False, **options).last_hidden_state
            except _Left as left:
                carried = [
                    _placed(added.get(number), left.hidden[rows], wanted[rows]) for number in self._carried(self.stop)
                ]
                return torch.cat([left.hidden[rows], *carried], 1)
        return self._loss(states, batch, share)

    def _loss(self, states: Tensor, batch: TokenBatch, share: Share | None) -> Tensor:
        """The summed loss of labeled tokens, of which ranks that share them take some each."""
        following = functional.pad(batch.labels[:, 1:], (0, 1), value=UNLABELLED)
        places = (following != UNLABELLED).nonzero(as_tuple=True)
        if share is not None:
            places = tuple(share.cut(axis, 0) for axis in places)
        logits = self._stages.model.lm_head(states[places])
        return functional.cross_entropy(logits.float(), following[places], reduction="sum")


def _placed(features: Tensor | None, like: Tensor, wanted: Tensor) -> Tensor:
    """Features of projected tokens among rows of all tokens."""
    blank = torch.zeros_like(like)
    return blank if features is None else blank.masked_scatter(wanted[:, None], features)


def _passing(index: int, num_blocks: int, block: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward inside of a running stage; without one, the block's own."""

    def forward(hidden: Tensor, *args: Any, **options: Any) -> Any:
        run = _RUN.get(None)
        if run is None:
            return block(hidden, *args, **options)
        if index == run.stop and run.stop < num_blocks:
            raise _Left(hidden)
        if run.received is not None and (index + 1 == run.start or index == run.start == 0):
            hidden = run.received.view_as(hidden)
        if index < run.start:
            return run.tapped[index].view_as(hidden) if index in run.tapped else hidden
        share = run.share
        if share is not None and not run.is_cut:
            hidden = share.cut(hidden, 1)
            run.is_cut = True
        if share is not None and "position_embeddings" in options:
            options["position_embeddings"] = tuple(share.cut(each, -2) for each in options["position_embeddings"])
        if run.recomputes:
            hidden = checkpoint(_again, block, run, hidden, *args, use_reentrant=False, **options)
        else:
            hidden = block(hidden, *args, **options)
        if share is not None and (index + 1 == run.stop or index < run.joined_until):
            hidden = share.join(hidden, 1)
            run.is_cut = False
        run.seen[index] = hidden
        if index + 1 == num_blocks and not run.is_last:
            # The layers after the blocks are a stage of their own.
            raise _Left(hidden)
        return hidden

    return forward


def _only_in_last(merge: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A merger's forward, which other stages than the last pass by."""

    def forward(hidden: Tensor) -> Tensor:
        run = _RUN.get(None)
        return merge(hidden) if run is None or run.is_last else hidden

    return forward


def _again(block: Callable[..., Any], run: _Run, hidden: Tensor, *args: Any, **options: Any) -> Any:
    with _running(run):
        return block(hidden, *args, **options)


def _within(name: str, parts: Sequence[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)
