"""Constants of the device: its name, its memory, and rates that are measured or stated by the user."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from entrain_bench.costs.profiled.points import Constants, Subject, module_values
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.device import device_name, dtype_name
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.profiling.sampling import Patience, sample
from entrain_bench.train.profiling.settings import ProfileSettings

# Rows of square products, and bytes of copies, that are large for the device and take it milliseconds.
PRODUCT_ROWS = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
PATIENCE = Patience(5, 20, 0.02, 2.0)


def subject_of(model: ModelSpec, dtype: torch.dtype, device: torch.device, *, sequence_parallel: bool) -> Subject:
    """Device, libraries and model of a profile."""
    return Subject(
        device=device_name(device),
        kind=device.type,
        dtype=dtype_name(dtype),
        sequence_parallel=sequence_parallel,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        megatron_core=version("megatron-core"),
        model=model.name,
        modules={module.name: module_values(module) for module in model.modules},
    )


def constants_of(
    settings: ProfileSettings, dtype: torch.dtype, device: torch.device, known: Constants | None = None
) -> Constants:
    """Constants, each with its source: as the settings state, else as already known, else measured."""
    is_gpu, rows, size = device.type == "cuda", PRODUCT_ROWS[device.type], COPY_BYTES[device.type]

    def product_flops() -> float:
        left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        return 2 * rows**3 / _shortest_s(lambda: torch.mm(left, right), device)

    def memory_bytes() -> int:
        if is_gpu:
            return int(torch.cuda.get_device_properties(device).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def copy_s(*, to_host: bool) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.zeros(size, dtype=torch.uint8, pin_memory=is_gpu) if to_host else torch.zeros_like(source)
        return _shortest_s(lambda: target.copy_(source, non_blocking=to_host), device)

    product = f"best {rows} x {rows} x {rows} product in {dtype_name(dtype)}"
    measured: dict[str, tuple[str, str, Callable[[], float]]] = {
        "peak_bf16_flops": ("FLOP/s", product, product_flops),
        "memory_bytes": ("bytes", "all there is", memory_bytes),
        "memory_bandwidth_bytes_per_s": ("bytes/s", "copy, read and written", lambda: 2 * size / copy_s(to_host=False)),
        "host_bandwidth_bytes_per_s": ("bytes/s", "copy to the host", lambda: size / copy_s(to_host=True)),
    }
    values, sources, date = dict[str, Any](), dict[str, str](), datetime.now(UTC).date().isoformat()
    for name, (unit, what, measure) in measured.items():
        if (stated := getattr(settings, name, None)) is not None:
            values[name], sources[name] = stated, f"{unit}; the user; {date}; stated"
        elif known is not None:
            values[name], sources[name] = getattr(known, name), known.sources[name]
        else:
            values[name], sources[name] = measure(), f"{unit}; {what}, entrain-bench profile; {date}; measured"
    return Constants(**values, sources=sources)


def _shortest_s(call: Callable[[], object], device: torch.device) -> float:
    def turn(clock: Clock) -> None:
        with clock.action(0):
            call()

    return float(sample(turn, device, PATIENCE).min())
