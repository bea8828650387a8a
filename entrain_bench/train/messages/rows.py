"""Rows of tensors: cut out for a message, and put in their places at its receiver."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from entrain_bench.base.arrays import IntArray
from entrain_bench.train.device import to_device
from entrain_bench.train.messages.rank_plan import Message, Step


def gather_rows(step: Step, received: Mapping[tuple[int, int], Tensor], blank: Callable[[], Tensor]) -> Tensor:
    """All received rows at their places in a tensor of zeros, or the one message that carries all."""
    into = None
    for message in step.receives:
        if message.target_rows is None:
            return received[message.key]
        into = blank() if into is None else into
        into[_on_device(message.target_rows, into.device)] = received[message.key]
    return blank() if into is None else into


def cut_rows(tensor: Tensor, message: Message) -> Tensor:
    """The rows a message carries."""
    return tensor if message.source_rows is None else tensor[_on_device(message.source_rows, tensor.device)]


def _on_device(rows: slice | IntArray, device: torch.device) -> slice | Tensor:
    return rows if isinstance(rows, slice) else to_device(torch.from_numpy(rows), device)
