"""Attention of packed sequences with one of several kernels; context-parallel ranks gather keys and values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.modules.packing import Segments, Shares, make_segments
from entrain_bench.train.modules.positions import Rotation


class AttentionKernel(StrEnum):
    """Attention kernels.

    ``FLASH2`` to ``FLASH4`` are torch's variable-length attention (3 and 4 from packages), ``CPU`` its flash attention
    for CPUs, ``SDPA`` its scaled dot-product attention with one call for all sequences of equal length.
    """

    CPU = "cpu"
    SDPA = "sdpa"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    FLASH4 = "flash4"


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask argument that megatron-core passes to a layer's attention."""

    segments: Segments
    shares: Shares
    rotation: Rotation | None = None

    @property
    def cp(self) -> dist.ProcessGroup:
        """Ranks that hold the other tokens."""
        return self.shares.cp


class PackedAttention(torch.nn.Module):
    """Core attention of a megatron-core layer; its attention mask is a ``Mask``."""

    def __init__(
        self,
        *,
        attn_mask_type: AttnMaskType,
        kernel: AttentionKernel,
        **_: Any,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.causal = attn_mask_type == AttnMaskType.causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **_: Any) -> Tensor:
        """Attend, ``[tokens of this rank, 1, heads, head_dim]`` to ``[tokens of this rank, 1, heads * head_dim]``."""
        segments = mask.segments
        remade: AbstractContextManager[None] = nullcontext()
        if mask.rotation is not None:
            query = mask.rotation.apply(query)
            key = mask.rotation.apply(key)
        # Copies of their own: views would keep the product that queries, keys and values are cut out of.
        query = query.squeeze(1).contiguous()
        if mask.cp.size() > 1:
            both = torch.cat([key, value], dim=-1)
            key, value = _gathered(both, mask)
            remade = _gathered_again(both.detach(), (key, value), mask)
        else:
            key, value = (rows.squeeze(1).contiguous() for rows in (key, value))
        with remade:
            output = packed_attention(query, key, value, segments, causal=self.causal, kernel=self.kernel)
        return output.reshape(len(query), 1, -1)


def _gathered(rows_here: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, each ``[keys, heads, head_dim]``."""
    both = gather_from_sequence_parallel_region(rows_here, tensor_parallel_output_grad=True, group=mask.cp)
    if mask.segments.keys is not None:
        both = both.index_select(0, mask.segments.keys)
    key, value = (rows.squeeze(1).contiguous() for rows in both.chunk(2, dim=-1))
    return key, value


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Stands for keys (0) or values (1) of all ranks, which backward gathers again."""

    place: int


@contextmanager
def _gathered_again(both: Tensor, gathered: tuple[Tensor, Tensor], mask: Mask) -> Iterator[None]:
    """Have autograd keep this rank's keys and values only, as Megatron-Core's kernels do; backward gathers again."""
    # Hooks do not nest: those around, such as a checkpoint's, get all that is kept.
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (lambda kept: kept,) * 2
    places = {rows.untyped_storage()._cdata: place for place, rows in enumerate(gathered) if len(rows)}
    held = pack(both)
    made = dict[int, Tensor]()

    def keep(tensor: Tensor) -> Any:
        place = places.get(tensor.untyped_storage()._cdata)
        return pack(tensor) if place is None else _Gathered(place)

    def take(kept: Any) -> Any:
        if not isinstance(kept, _Gathered):
            return unpack(kept)
        if kept.place not in made:
            made.update(enumerate(_gathered(unpack(held), mask)))
        return made.pop(kept.place)

    with torch.autograd.graph.saved_tensors_hooks(keep, take):
        yield


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, kernel: AttentionKernel
) -> Tensor:
    """Return scaled dot-product attention inside each segment, in the shape of ``query``.

    ``query`` is ``[sum(query_lengths), heads, head_dim]``; ``key`` and ``value`` are ``[sum(key_lengths), key-value
    heads, head_dim]``. A segment's queries are its last tokens; if ``causal``, each sees only keys up to itself.
    """
    output: Any
    if kernel is AttentionKernel.CPU:
        output = _FlashOnCpu.apply(query, key, value, segments, causal)  # type: ignore[no-untyped-call]
    elif kernel is AttentionKernel.SDPA:
        output = _by_length(query, key, value, segments, causal)
    else:
        output = varlen_attn(
            query,
            key,
            value,
            segments.query_offsets,
            segments.key_offsets,
            max(segments.query_lengths),
            max(segments.key_lengths),
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=query.shape[1] != key.shape[1],
        )
    assert isinstance(output, Tensor)
    return output


def _by_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    # Not every backend of the operator takes fewer keys and values than queries.
    key, value = (rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1) for rows in (key, value))
    outputs: dict[int, Tensor] = {}
    for alike, (q, k, v) in _batches((query, key, value), segments):
        attended = scaled_dot_product_attention(q, k, v, **_causality(q, k, causal))
        outputs |= dict(zip(alike, attended.transpose(1, 2), strict=True))
    return torch.cat([outputs[index] for index in range(len(outputs))])


class _FlashOnCpu(torch.autograd.Function):
    """torch's flash attention for CPUs; it keeps the same tensors as a GPU kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
        output = torch.empty_like(query)
        sums = []
        into = torch.split(output, list(segments.query_lengths))
        for alike, (q, k, v) in _batches((query, key, value), segments):
            attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, **_causality(q, k, causal)
            )
            sums.append(log_sum)
            for i, rows in zip(alike, attended.transpose(1, 2), strict=True):
                into[i].copy_(rows)
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.segments = segments
        ctx.causal = causal
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *sums = ctx.saved_tensors
        segments: Segments = ctx.segments
        results = [torch.empty_like(rows) for rows in (query, key, value)]
        lengths = (segments.query_lengths, segments.key_lengths, segments.key_lengths)
        into = [torch.split(rows, list(sizes)) for rows, sizes in zip(results, lengths, strict=True)]
        batches = _batches((query, key, value, output, gradients[0]), segments)
        for (alike, (q, k, v, attended, gradient)), log_sum in zip(batches, sums, strict=True):
            by_input = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, k, v, attended, log_sum, 0.0, **_causality(q, k, ctx.causal)
            )
            for rows, values in zip(into, by_input, strict=True):
                for i, part in zip(alike, values.transpose(1, 2), strict=True):
                    rows[i].copy_(part)
        return *results, None, None


def _batches(tensors: tuple[Tensor, ...], segments: Segments) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Segments of equal lengths with their rows of each tensor ``[segments, heads, rows, head_dim]``."""
    queries = segments.query_lengths
    keys = segments.key_lengths
    members = defaultdict(list)
    for index, lengths in enumerate(zip(queries, keys, strict=True)):
        members[lengths].append(index)
    sizes = (queries, keys, keys, queries, queries)
    parts = [torch.split(rows, list(count)) for rows, count in zip(tensors, sizes, strict=False)]
    for alike in members.values():
        yield alike, [torch.stack([rows[i] for i in alike]).transpose(1, 2) for rows in parts]


def _causality(query: Tensor, key: Tensor, causal: bool) -> dict[str, Any]:
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    if not causal or num_queries == num_keys:
        return {"is_causal": causal}
    hidden = query.new_full((num_queries, num_keys), -torch.inf).triu(1 + num_keys - num_queries)
    return {"is_causal": False, "attn_mask": hidden}


FLASH_HEAD_DIMS = range(8, 257, 8)  # messages of torch 2.13's kernel (libtorch_cuda), read 2026-11
# Packages that torch 2.13 can call instead of its own kernel: torch's name, and the module to import.
PACKAGES = {
    AttentionKernel.FLASH3: ("FA3", "flash_attn_interface"),
    AttentionKernel.FLASH4: ("FA4", "flash_attn.cute.interface"),
}
HOPPER = 9  # Major compute capability of GPUs that FlashAttention 3 is for.
# Compute capability from which torch's own variable-length kernel runs (Ampere).
LEAST_CAPABILITY = (8, 0)
# Trial: largest error of outputs and gradients in bfloat16 against float32, relative to their norm.
TOLERANCE = 0.03
# Trial: queries and keys per sequence. One is longer than a kernel's tiles; context parallelism has more keys.
QUERIES = [5, 300, 17, 1]
KEYS = [9, 300, 200, 1]
NUM_HEADS = 4
NUM_KV_HEADS = 2
AUTO = "To use the best kernel that works here, set harness.kernels=auto"


@dataclass(frozen=True, slots=True)
class Machine:
    """A device: its kind, a GPU's compute capability, and whether FlashAttention 3 can be imported."""

    device: str
    capability: tuple[int, int] = (0, 0)
    has_flash3: bool = False


@dataclass(frozen=True, slots=True)
class Kernels:
    """The attention kernel of each module; ``passed_over`` says why preferred kernels failed their trial."""

    attention: Mapping[str, AttentionKernel] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


def candidates(request: str, machine: Machine, dtype: torch.dtype, head_dim: int) -> tuple[AttentionKernel, ...]:
    """Return the kernels that can compute a module's attention, preferred first; raises as ``find_kernels``."""
    if request in PACKAGES:
        if head_dim not in FLASH_HEAD_DIMS:
            raise IncompatibleError(
                f"harness.kernels={request}: cannot take head_dim={head_dim}; it must be a multiple of "
                f"{FLASH_HEAD_DIMS.step}, at most {FLASH_HEAD_DIMS[-1]}. {AUTO}"
            )
        return (AttentionKernel(request),)
    if machine.device == "cpu" and request != "sdpa":
        return (AttentionKernel.CPU,)
    fits = dtype is torch.bfloat16 and head_dim in FLASH_HEAD_DIMS and machine.capability >= LEAST_CAPABILITY
    if request == "sdpa" or not fits:
        return (AttentionKernel.SDPA,)
    # FlashAttention 4 only on request: its backward is new, and torch calls its support a prototype.
    usable = request == "auto" and machine.has_flash3 and machine.capability[0] == HOPPER
    usual = (AttentionKernel.FLASH2, AttentionKernel.SDPA)
    return (AttentionKernel.FLASH3, *usual) if usable else usual


def find_kernels(
    request: str,
    modules: Sequence[ModuleSpec],
    dtype: torch.dtype,
    device: torch.device,
    machine: Machine | None = None,
) -> Kernels:
    """Choose the attention kernel of each module, one for all packed sequences; others use ``sdpa``.

    Raises:
        UserError: if the requested kernel is not available or fails its trial.
        IncompatibleError: if it cannot take a module's heads.
    """
    machine = machine or machine_of(device)
    allowed = {module.name: candidates(request, machine, dtype, module.config.head_dim) for module in modules}
    passed_over = []
    # In the order of preference, which is the same for all modules that have several.
    for kernel in max(allowed.values(), key=len, default=()):
        taken = {name: kernel if kernel in fitting else fitting[-1] for name, fitting in allowed.items()}
        dims = {module.config.head_dim for module in modules if taken.get(module.name) is kernel}
        if reason := _try(kernel, sorted(dims), dtype, device):
            if request == kernel:
                raise UserError(f"harness.kernels={request}: failed its trial on this device ({reason}). {AUTO}")
            passed_over.append(f"attention kernel {kernel} failed its trial and is not used: {reason}")
            continue
        return Kernels(taken, tuple(passed_over))
    return Kernels({}, ())


def machine_of(device: torch.device) -> Machine:
    """Return the device and packages of this process."""
    if device.type != "cuda":
        return Machine(device.type)
    _, package = PACKAGES[AttentionKernel.FLASH3]
    return Machine("cuda", torch.cuda.get_device_capability(device), find_spec(package) is not None)


def _try(kernel: AttentionKernel, head_dims: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    """Activate a kernel in this process and compute with it; return the problem, or an empty string."""
    if kernel in (AttentionKernel.CPU, AttentionKernel.SDPA):
        return ""
    try:
        if kernel in PACKAGES:
            activate_flash_attention_impl(PACKAGES[kernel][0])
        else:
            restore_flash_attention_impl(_raise_warn=False)
        errors = [_error(kernel, head_dim, dtype, device) for head_dim in head_dims]
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    wrong = [error for error in errors if not error <= TOLERANCE]
    return f"results differ from float32 by {wrong[0]:.2g} of their norm; allowed: {TOLERANCE}" if wrong else ""


@cache
def _error(kernel: AttentionKernel, head_dim: int, dtype: torch.dtype, device: torch.device) -> float:
    """Largest error of output and gradients against ``sdpa`` in float32, relative to its norm, causal and not."""
    segments = make_segments(QUERIES, KEYS, None, device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(QUERIES), NUM_HEADS), (sum(KEYS), NUM_KV_HEADS), (sum(KEYS), NUM_KV_HEADS)]
    *inputs, gradient = (
        torch.randn(*shape, head_dim, generator=generator).to(device, dtype) for shape in (*shapes, shapes[0])
    )

    def results(kernel: AttentionKernel, dtype: torch.dtype, causal: bool) -> list[Tensor]:
        leaves = [rows.to(dtype).requires_grad_() for rows in inputs]
        query, key, value = leaves
        output = packed_attention(query, key, value, segments, causal=causal, kernel=kernel)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))]

    errors = []
    for causal in (True, False):
        exact = results(AttentionKernel.SDPA, torch.float32, causal)
        for actual, wanted in zip(results(kernel, dtype, causal), exact, strict=True):
            errors.append(torch.linalg.vector_norm(actual.float() - wanted) / torch.linalg.vector_norm(wanted))
    return float(torch.stack(errors).max())
