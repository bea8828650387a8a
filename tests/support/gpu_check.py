"""A machine for tests of the check on GPUs."""

from __future__ import annotations

from entrain_bench.lab.gpu_check.machine import Machine


def machine(nvidia_smi: str = "", variables: dict[str, str] | None = None) -> Machine:
    """One without GPUs that torch sees."""
    system = {"processor": "one of a kind", "cores": "2"}
    return Machine([], {"torch": "2"}, system, variables or {}, nvidia_smi, "", {"processor": "one of a kind"})
