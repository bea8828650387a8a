"""Bytes of a call on the CPU: most at a time, by torch's profiler, and what it saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes that tensors of a call have at any time, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = call()
    assert trace.profiler is not None
    held: dict[int, int] = {}
    peak = 0
    events = _allocations(trace.profiler.kineto_results.experimental_event_tree())
    for event in sorted(events, key=attrgetter("start_time_ns")):
        fields = event.extra_fields
        held.pop(fields.ptr, None)
        if fields.alloc_size > 0:
            held[fields.ptr] = fields.alloc_size
            peak = max(peak, sum(held.values()))
    del result
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def saved_bytes(call: Callable[[], Any], *others: torch.Tensor | None) -> int:
    """Bytes of all that a call saves for backward and returns, but for the other tensors.

    Where several ranks compute, threads of gloo free tensors too, which the profiler does not see.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in others if tensor is not None}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # Kept until all are counted, so that no address comes twice.
        result = note(call())
    assert result is not None
    return sum(size for address, size in storages.items() if address not in known)


def num_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the tensors that there are."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
