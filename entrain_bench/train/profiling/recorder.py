"""Measurement of a profile; the file keeps every point that is there, and the next session resumes it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from entrain_bench.base.errors import UserError
from entrain_bench.costs.profiled.file import (
    CollectivePoint,
    Constants,
    DeviceProfile,
    StagePoint,
    StepPoint,
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
    measure_collectives,
    measure_step,
    one_of_many,
    packs_of,
    sample,
    targets_of,
)
from entrain_bench.train.running.stages import TrainedStage

# Ranks whose communication is measured unless others are asked for, where there are as many GPUs.
USUAL_RANKS = (2, 4)
# Rows of square products, and bytes of copies, that are large for the device and take it milliseconds.
PRODUCT_ROWS = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
CONSTANT_PATIENCE = Patience(20, 2.0)


@dataclass(slots=True)
class ProfileRecorder:
    """A profile that grows; ``left_out`` are packs that took too long or too much memory."""

    model: ModelSpec
    settings: ProfileSettings
    path: Path
    profile: DeviceProfile
    device: torch.device
    left_out: list[str] = field(default_factory=list)

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
        today = datetime.now(UTC).date().isoformat()
        profile = known or DeviceProfile(subject, measure_constants(dtype, device, today), today)
        return cls(model, settings, path, replace(profile, finished=False), device)

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
        """Measure all missing points and return the profile, as in the file; ``advance`` receives the next step's name.

        ``UserError`` names layers that cannot be built, or a file that cannot be written.
        """
        settings = self.settings
        patience = Patience(settings.repetitions, settings.point_s)
        dtype = dtype_of(settings, self.device)
        split = settings.sequence_parallel
        degrees = settings.degrees(self.model)
        with one_of_many(self.model, degrees, dtype, self.device, sequence_parallel=split) as bench:
            if not self.profile.steps:
                targets = targets_of(self.model.llm, *min(degrees))
                depths = [(target, depth) for target in targets for depth in target.depths]
                self._save(steps=[measure_step(target, depth, bench, patience) for target, depth in depths])
            self._measure_stages(bench, patience, advance)
        known = {point.ranks for point in self.profile.collectives}
        for num_ranks in ranks_of(settings, self.device):
            advance(f"communication of {num_ranks} ranks")
            if num_ranks not in known:
                sizes = settings.message_bytes
                self._save(collectives=measure_collectives(self.device.type, num_ranks, sizes, patience))
        self.profile = replace(self.profile, finished=True)
        self._save()
        return self.profile

    def _measure_stages(self, bench: Bench, patience: Patience, advance: Callable[[str], None]) -> None:
        known = {point.key for point in self.profile.stages}
        built: Target | None = None
        for target, lengths in self.packs():
            key = target.module.name, target.kind
            degrees = f"tp {target.tp}, cp {target.cp}"
            what = f"{' '.join(key)}, {degrees}, {sum(lengths)} tokens in {len(lengths)}"
            advance(what)
            if known.issuperset((*key, depth, target.tp, target.cp, lengths) for depth in target.depths):
                continue
            if built != target:
                # Those before go first.
                stages = dict[int, TrainedStage]()
                stages = bench.stages(target)
                built = target
            points = bench.measure(target, stages, lengths, patience)
            if not points:
                self.left_out.append(what)
            self._save(stages=points)

    def _save(
        self,
        stages: Iterable[StagePoint] = (),
        steps: Iterable[StepPoint] = (),
        collectives: Iterable[CollectivePoint] = (),
    ) -> None:
        """Add points and write the file."""
        profile = self.profile
        self.profile = replace(
            profile,
            stages=(*profile.stages, *stages),
            steps=(*profile.steps, *steps),
            collectives=(*profile.collectives, *collectives),
        )
        write_profile(self.path, self.profile)


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


def measure_constants(dtype: torch.dtype, device: torch.device, today: str) -> Constants:
    """Constants of a device as measured, each with its source."""
    is_gpu = device.type == "cuda"
    rows = PRODUCT_ROWS[device.type]
    size = COPY_BYTES[device.type]
    left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    beside = torch.zeros_like(source)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=is_gpu)
    if is_gpu:
        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ways = {
        "peak_bf16_flops": f"FLOP/s; best {rows} x {rows} x {rows} product in {dtype_name(dtype)}",
        "memory_bytes": "bytes; all there is",
        "memory_bandwidth_bytes_per_s": "bytes/s; copy, read and written",
        "host_bandwidth_bytes_per_s": "bytes/s; copy to the host",
    }
    return Constants(
        peak_bf16_flops=2 * rows**3 / _shortest_s(lambda: torch.mm(left, right), device),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=2 * size / _shortest_s(lambda: beside.copy_(source), device),
        host_bandwidth_bytes_per_s=size / _shortest_s(lambda: host.copy_(source, non_blocking=True), device),
        sources={name: f"{way}, entrain-bench profile; {today}; measured" for name, way in ways.items()},
    )


def _shortest_s(call: Callable[[], object], device: torch.device) -> float:
    def turn(clock: Clock) -> None:
        with clock.action(0):
            call()

    return float(sample(turn, device, CONSTANT_PATIENCE).min())
