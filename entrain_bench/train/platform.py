"""What megatron-core needs to run without a GPU.

megatron-core names CUDA devices literally in the parts the training runtime uses. Where no GPU is present, this file
puts the CPU in their place, inside megatron's own modules only:

- ``MODULES`` see a ``torch`` whose ``torch.cuda.current_device`` is the CPU, whose current stream is nothing, and whose
  tensor factories take ``device="cuda"`` as the CPU.
- ``Tensor.type()`` called by megatron's optimizer answers as for a CUDA tensor of the same element type; that is how
  it tells half from full precision.

``tests/test_train_platform.py`` holds the list of call sites these redirections were written for.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

MODULES = (
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.utils",
)
_FACTORIES = ("empty", "tensor", "zeros")
_TYPE_CALLER = "megatron.core.optimizer."
_original_type: Callable[..., Any] = torch.Tensor.type


class _Overlay:
    """A namespace with some of its names replaced."""

    def __init__(self, base: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def prepare_platform(modules: Sequence[str] = MODULES) -> None:
    """Let megatron-core run on the CPU where CUDA is absent; may be called again, at any time."""
    if torch.cuda.is_available():
        return
    for name in modules:
        module: Any = importlib.import_module(name)
        if not isinstance(module.torch, _Overlay):
            module.torch = _torch_on_cpu()
    if torch.Tensor.type is not _type:
        torch.Tensor.type = _type  # type: ignore[assignment, method-assign]


def _type(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """``Tensor.type``; asked by megatron's optimizer, the name of the CUDA type."""
    answer = _original_type(tensor, *args, **options)
    asked_by = sys._getframe(1).f_globals.get("__name__", "")
    if not args and not options and asked_by.startswith(_TYPE_CALLER):
        return answer.replace("torch.", "torch.cuda.")
    return answer


@functools.cache
def _torch_on_cpu() -> _Overlay:
    cuda = _Overlay(torch.cuda, current_device=lambda: torch.device("cpu"), current_stream=lambda: None)
    return _Overlay(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return factory(*args, device="cpu" if device == "cuda" else device, **options)

    return create
