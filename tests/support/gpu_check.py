"""A machine for tests of the check on GPUs."""

from __future__ import annotations

from pathlib import Path

from entrain_bench.lab.gpu_check import Check
from entrain_bench.lab.measuring import Machine


def machine(gpus: int = 0, variables: dict[str, str] | None = None) -> Machine:
    host = {"processor": "one of a kind", "cores": "2", "load average": "0.5"}
    return Machine(["A GPU"] * gpus, host, variables or {})


def check_in(folder: Path, kind: str = "cpu", num_devices: int = 2) -> Check:
    """A check on that machine."""
    return Check(machine(num_devices if kind == "cuda" else 0), kind, num_devices, folder, "here")
