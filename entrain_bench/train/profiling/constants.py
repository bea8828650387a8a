"""Constants of the device at hand: its name, peaks that are measured, or stated by who knows better, and its memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

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
    """What is measured with what."""
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
    """Constants, each with its source: what the settings state, else what is known already, else measured."""
    rows, size = PRODUCT_ROWS[device.type], COPY_BYTES[device.type]
    date = datetime.now(UTC).date().isoformat()
    values: dict[str, float] = {}
    sources: dict[str, str] = {}

    def note(name: str, unit: str, what: str, measure: Callable[[], float]) -> None:
        stated = getattr(settings, name, None)
        if stated is None and known is not None:
            values[name], sources[name] = getattr(known, name), known.sources[name]
            return
        values[name] = measure() if stated is None else stated
        what, how = (f"{what}, entrain-bench profile", "measured") if stated is None else ("the user", "stated")
        sources[name] = f"{unit}; {what}; {date}; {how}"

    product = f"best {rows} x {rows} x {rows} product in {dtype_name(dtype)}"
    note("peak_bf16_flops", "FLOP/s", product, partial(_product_flops, rows, dtype, device))
    note("memory_bytes", "bytes", "all there is", partial(_memory_bytes, device))
    note("memory_bandwidth_bytes_per_s", "bytes/s", "copy, read and written", partial(_bandwidth, size, device))
    note("host_bandwidth_bytes_per_s", "bytes/s", "copy to the host", partial(_host_bandwidth, size, device))
    return Constants(
        values["peak_bf16_flops"],
        int(values["memory_bytes"]),
        values["memory_bandwidth_bytes_per_s"],
        values["host_bandwidth_bytes_per_s"],
        sources,
    )


def _product_flops(rows: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    return 2 * rows**3 / _shortest_s(lambda: torch.mm(left, right), device)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bandwidth(size: int, device: torch.device) -> float:
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _shortest_s(lambda: target.copy_(source), device)


def _host_bandwidth(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return size / _shortest_s(lambda: target.copy_(source, non_blocking=True), device)


def _shortest_s(call: Callable[[], object], device: torch.device) -> float:
    def turn(clock: Clock) -> None:
        with clock.action(0):
            call()

    return float(sample(turn, device, PATIENCE).min())
