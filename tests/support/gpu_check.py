"""A machine for tests of the check on GPUs."""

from __future__ import annotations

from pathlib import Path

from entrain_bench.lab.gpu_check.sections import Check
from entrain_bench.lab.measuring import Machine


def machine(nvidia_smi: str = "", variables: dict[str, str] | None = None) -> Machine:
    host = {"processor": "one of a kind", "cores": "2", "load average": "0.5"}
    return Machine([], host, variables or {}, nvidia_smi)


def check_in(folder: Path, kind: str = "cpu", num_devices: int = 2, everything: bool = False) -> Check:
    """A check on that machine."""
    return Check(machine(), kind, num_devices, everything, folder, "here")
