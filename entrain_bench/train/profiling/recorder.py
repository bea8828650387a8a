"""Measurement of a profile; the file keeps every point that is there, and the next session resumes it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from entrain_bench.base.errors import UserError
from entrain_bench.costs.profiled.file import (
    Constants,
    DeviceProfile,
    Subject,
    module_values,
    read_profile,
    write_profile,
)
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.device import device_name, dtype_name, dtype_on
from entrain_bench.train.measuring import Clock
from entrain_bench.train.profiling.settings import ProfileSettings
from entrain_bench.train.profiling.timing import (
    Bench,
    Patience,
    Target,
    TargetStages,
    measure_collectives,
    measure_step,
    one_of_many,
    packs_of,
    sample,
    targets_of,
)

# Between two writes of the file.
WRITE_S = 2.0
# Ranks whose communication is measured unless others are asked for, where there are as many GPUs.
USUAL_RANKS = (2, 4)
# Rows of square products, and bytes of copies, that are large for the device and take it milliseconds.
PRODUCT_ROWS = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
CONSTANT_PATIENCE = Patience(5, 20, 0.02, 2.0)


@dataclass(slots=True)
class ProfileRecorder:
    """A profile that grows; ``left_out`` are packs that took too long or too much memory."""

    model: ModelSpec
    settings: ProfileSettings
    path: Path
    profile: DeviceProfile
    device: torch.device
    patience: Patience
    left_out: list[str] = field(default_factory=list)
    _written: float = 0.0

    @classmethod
    def begin(cls, model: ModelSpec, settings: ProfileSettings, path: Path, device: torch.device) -> ProfileRecorder:
        """Begin a profile, or resume the one in the file; ``UserError`` if the file is not one of this model."""
        dtype = dtype_of(settings, device)
        subject = Subject(
            device=device_name(device),
            kind=device.type,
            dtype=dtype_name(dtype),
            sequence_parallel=settings.sequence_parallel,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            megatron_core=version("megatron-core"),
            model=model.name,
            modules={module.name: module_values(module) for module in model.modules},
        )
        known = read_profile(path, f"output={path}") if path.exists() else None
        if known and (difference := subject.difference(known.subject)):
            raise UserError(f"output={path}: holds a profile with {difference}. Choose another file, or remove it")
        constants = constants_of(settings, dtype, device, known.constants if known else None)
        new = DeviceProfile(subject, constants, datetime.now(UTC).date().isoformat())
        profile = replace(known, constants=constants, finished=False) if known else new
        patience = Patience(settings.min_repetitions, settings.max_repetitions, settings.precision, settings.point_s)
        return cls(model, settings, path, profile, device, patience)

    def packs(self) -> list[tuple[Target, tuple[int, ...]]]:
        """All packs to time, of every kind of layer at every pair of degrees, the smallest first."""
        return [
            (target, lengths)
            for module in self.model.modules
            for tp, cp in self.settings.degrees(self.model)
            for target in targets_of(module, tp, cp)
            for tokens in sorted(self.settings.tokens)
            for lengths in packs_of(target, tokens)
        ]

    def run(self, advance: Callable[[str], None]) -> DeviceProfile:
        """Measure all missing points and return the profile, as in the file; ``advance`` is told what comes next.

        ``UserError`` names layers that cannot be built, or a file that cannot be written.
        """
        settings = self.settings
        device = self.device
        degrees = settings.degrees(self.model)
        dtype = dtype_of(settings, device)
        try:
            split = settings.sequence_parallel
            with one_of_many(self.model, degrees, dtype, device, sequence_parallel=split) as bench:
                self._measure_steps(bench)
                self._measure_stages(bench, advance)
            self._measure_collectives(advance)
            self.profile = replace(self.profile, finished=True)
        finally:
            write_profile(self.path, self.profile)
        return self.profile

    def _measure_steps(self, bench: Bench) -> None:
        if self.profile.steps:
            return
        for target in targets_of(self.model.llm, *min(bench.groups)):
            for depth in target.depths:
                point = measure_step(target, depth, bench, self.patience)
                self._save(replace(self.profile, steps=(*self.profile.steps, point)))

    def _measure_stages(self, bench: Bench, advance: Callable[[str], None]) -> None:
        known = {point.key for point in self.profile.stages}
        stages: TargetStages | None = None
        for target, lengths in self.packs():
            name = target.module.name
            kind = target.kind
            tp = target.tp
            cp = target.cp
            what = f"{name} {kind}, tp {tp}, cp {cp}, {sum(lengths)} tokens in {len(lengths)}"
            advance(what)
            if known.issuperset((name, kind, depth, tp, cp, lengths) for depth in target.depths):
                continue
            if stages is None or stages.target != target:
                # Those before go first.
                stages = None
                stages = TargetStages.build(target, bench)
            points = stages.measure(lengths, self.patience)
            if not points:
                self.left_out.append(what)
            self._save(replace(self.profile, stages=(*self.profile.stages, *points)))

    def _measure_collectives(self, advance: Callable[[str], None]) -> None:
        known = {point.ranks for point in self.profile.collectives}
        for num_ranks in ranks_of(self.settings, self.device):
            advance(f"communication of {num_ranks} ranks")
            if num_ranks not in known:
                points = measure_collectives(self.device.type, num_ranks, self.settings.message_bytes, self.patience)
                self._save(replace(self.profile, collectives=(*self.profile.collectives, *points)))

    def _save(self, profile: DeviceProfile) -> None:
        """Take a profile with more points; write the file if the last time is ``WRITE_S`` ago."""
        self.profile = profile
        if perf_counter() - self._written > WRITE_S:
            write_profile(self.path, profile)
            self._written = perf_counter()


def dtype_of(settings: ProfileSettings, device: torch.device) -> torch.dtype:
    """Type of parameters and activations; the default is that of training on such a device."""
    return dtype_on(device, settings.dtype or "auto")


def ranks_of(settings: ProfileSettings, device: torch.device) -> tuple[int, ...]:
    """Numbers of ranks whose communication is measured; ``UserError`` for more than there are GPUs."""
    most = torch.cuda.device_count() if device.type == "cuda" else max(USUAL_RANKS)
    if settings.ranks is None:
        return tuple(ranks for ranks in USUAL_RANKS if ranks <= most)
    if device.type == "cuda" and max(settings.ranks, default=0) > most:
        raise UserError(f"ranks={[*settings.ranks]}: must be at most the {most} GPUs of this machine")
    return settings.ranks


def default_path(model: ModelSpec, device: torch.device, dtype: torch.dtype) -> Path:
    """Default path: one file for each model, device and dtype."""
    words = f"{model.name} {device_name(device)} {dtype_name(dtype)}"
    return Path("results") / "profiles" / f"{re.sub('[^A-Za-z0-9_.]+', '-', words)}.json"


def constants_of(
    settings: ProfileSettings, dtype: torch.dtype, device: torch.device, known: Constants | None = None
) -> Constants:
    """Constants, each with its source: as the settings state, else as already known, else measured."""
    is_gpu = device.type == "cuda"
    rows = PRODUCT_ROWS[device.type]
    size = COPY_BYTES[device.type]

    def shortest_s(call: Callable[[], object]) -> float:
        def turn(clock: Clock) -> None:
            with clock.action(0):
                call()

        return float(sample(turn, device, CONSTANT_PATIENCE).min())

    def product_flops() -> float:
        left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        return 2 * rows**3 / shortest_s(lambda: torch.mm(left, right))

    def memory_bytes() -> int:
        if is_gpu:
            return int(torch.cuda.get_device_properties(device).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def copy_s(*, to_host: bool) -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.zeros(size, dtype=torch.uint8, pin_memory=is_gpu) if to_host else torch.zeros_like(source)
        return shortest_s(lambda: target.copy_(source, non_blocking=to_host))

    product = f"best {rows} x {rows} x {rows} product in {dtype_name(dtype)}"
    measured: dict[str, tuple[str, str, Callable[[], float]]] = {
        "peak_bf16_flops": ("FLOP/s", product, product_flops),
        "memory_bytes": ("bytes", "all there is", memory_bytes),
        "memory_bandwidth_bytes_per_s": ("bytes/s", "copy, read and written", lambda: 2 * size / copy_s(to_host=False)),
        "host_bandwidth_bytes_per_s": ("bytes/s", "copy to the host", lambda: size / copy_s(to_host=True)),
    }
    values = dict[str, Any]()
    sources = dict[str, str]()
    date = datetime.now(UTC).date().isoformat()
    for name, (unit, what, measure) in measured.items():
        if (stated := getattr(settings, name, None)) is not None:
            values[name] = stated
            sources[name] = f"{unit}; the user; {date}; stated"
        elif known is not None:
            values[name] = getattr(known, name)
            sources[name] = known.sources[name]
        else:
            values[name] = measure()
            sources[name] = f"{unit}; {what}, entrain-bench profile; {date}; measured"
    return Constants(**values, sources=sources)
