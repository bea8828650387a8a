"""Choose the attention kernel and try it on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.modules.attention import AttentionKernel, packed_attention
from entrain_bench.train.modules.packing import make_segments

FLASH_HEAD_DIMS = range(8, 257, 8)  # messages of torch 2.13's kernel (libtorch_cuda), read 2026-11
# Packages that torch 2.13 can call instead of its own kernel: torch's name, the module to import, and the major compute
# capabilities they support (torch/nn/attention/_fa3.py, _fa4.py).
PACKAGES = {
    AttentionKernel.FLASH3: ("FA3", "flash_attn_interface", (9,)),
    AttentionKernel.FLASH4: ("FA4", "flash_attn.cute.interface", (9, 10)),
}
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
    """A device: its kind, a GPU's compute capability, and the kernels of ``PACKAGES`` that can be imported."""

    device: str
    capability: tuple[int, int] = (0, 0)
    packages: frozenset[AttentionKernel] = frozenset()


@dataclass(frozen=True, slots=True)
class Kernels:
    """The attention kernel of each module; ``passed_over`` says why preferred kernels failed their trial."""

    attention: Mapping[str, AttentionKernel] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


def candidates(request: str, machine: Machine, dtype: torch.dtype, head_dim: int) -> tuple[AttentionKernel, ...]:
    """Return the kernels that can compute a module's attention, preferred first; raises as ``find_kernels``."""
    if request in PACKAGES:
        _check_request(AttentionKernel(request), machine, dtype, head_dim)
        return (AttentionKernel(request),)
    if machine.device == "cpu" and request != "sdpa":
        return (AttentionKernel.CPU,)
    fits = dtype is torch.bfloat16 and head_dim in FLASH_HEAD_DIMS and machine.capability >= LEAST_CAPABILITY
    if request == "sdpa" or not fits:
        return (AttentionKernel.SDPA,)
    # FlashAttention 4 only on request: its backward is new, and torch calls its support a prototype.
    third = AttentionKernel.FLASH3
    usable = request == "auto" and third in machine.packages and machine.capability[0] in PACKAGES[third][2]
    own = (AttentionKernel.FLASH2, AttentionKernel.SDPA)
    return (third, *own) if usable else own


def _check_request(kernel: AttentionKernel, machine: Machine, dtype: torch.dtype, head_dim: int) -> None:
    _, package, majors = PACKAGES[kernel]
    said = f"harness.kernels={kernel}"
    if machine.device != "cuda" or machine.capability[0] not in majors:
        needed = " or ".join(f"{major}.x" for major in majors)
        raise UserError(f"{said}: needs a GPU of compute capability {needed}. {AUTO}")
    if kernel not in machine.packages:
        raise UserError(f"{said}: needs the Python package {package}, which cannot be imported. {AUTO}")
    if dtype is not torch.bfloat16:
        raise UserError(f"{said}: needs harness.dtype=bfloat16")
    if head_dim not in FLASH_HEAD_DIMS:
        raise IncompatibleError(
            f"{said}: cannot take head_dim={head_dim}; it must be a multiple of {FLASH_HEAD_DIMS.step}, at most "
            f"{FLASH_HEAD_DIMS[-1]}. {AUTO}"
        )


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
        taken = {name: kernel if kernel in found else found[-1] for name, found in allowed.items()}
        dims = {module.config.head_dim for module in modules if taken.get(module.name) is kernel}
        if reason := _try(kernel, sorted(dims), dtype, device, machine):
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
    kernels = set()
    for kernel, (_, package, _) in PACKAGES.items():
        with suppress(ImportError):
            kernels |= {kernel} if find_spec(package) else set()
    return Machine("cuda", torch.cuda.get_device_capability(device), frozenset(kernels))


def _try(
    kernel: AttentionKernel, head_dims: Sequence[int], dtype: torch.dtype, device: torch.device, machine: Machine
) -> str:
    """Activate a kernel in this process and compute with it; return the problem, or an empty string."""
    if machine.device == "cpu" or kernel is AttentionKernel.SDPA:
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
        for own, wanted in zip(results(kernel, dtype, causal), exact, strict=True):
            errors.append(torch.linalg.vector_norm(own.float() - wanted) / torch.linalg.vector_norm(wanted))
    return float(torch.stack(errors).max())
